"""A small GPT in one file: packed projections, tied head, tokens in a file of uint16, random windows of it,
cosine schedule with warm-up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshloom as ml


@dataclass(frozen=True)
class Settings:
    block_size: int = 13
    vocab_size: int = 37
    n_layer: int = 2
    n_head: int = 3
    n_embd: int = 21
    bias: bool = False
    batch_size: int = 6
    steps: int = 5
    warmup: int = 2
    learning_rate: float = 1e-2
    min_lr: float = 1e-3
    weight_decay: float = 0.1
    grad_clip: float = 0.7
    eval_interval: int = 2
    eval_batches: int = 2


class LayerNorm(nn.Module):
    """With an optional bias."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Attention(nn.Module):
    def __init__(self, config: Settings) -> None:
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.n_head, self.n_embd = config.n_head, config.n_embd
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (
            each.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2) for each in (q, k, v)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))


class Block(nn.Module):
    def __init__(self, config: Settings) -> None:
        super().__init__()
        self.ln_1, self.attn = LayerNorm(config.n_embd, config.bias), Attention(config)
        self.ln_2 = LayerNorm(config.n_embd, config.bias)
        self.mlp = nn.ModuleDict(
            {
                "c_fc": nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias),
                "c_proj": nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))


class GPT(nn.Module):
    """Tokens [batch, length], targets [batch, length] or None -> (logits, loss); without targets only the
    last position's logits."""

    def __init__(self, config: Settings) -> None:
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "h": nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
                "ln_f": LayerNorm(config.n_embd, config.bias),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight
        self.apply(self._init)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):  # residual branches add up
                nn.init.normal_(parameter, std=0.2 / math.sqrt(2 * config.n_layer))

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.2)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        length = tokens.size(1)
        if length > self.config.block_size:
            raise ValueError(
                f"{length} tokens are more than the {self.config.block_size} that the model has positions for"
            )
        x = self.transformer["wte"](tokens) + self.transformer["wpe"](
            torch.arange(length, device=tokens.device)
        )
        for block in self.transformer["h"]:
            x = block(x)
        x = self.transformer["ln_f"](x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def write_tokens(path: Path, config: Settings, count: int = 600) -> None:
    """A text that can be learnt: each token follows from the two before it, most of the time."""
    draw = numpy.random.default_rng(1337)
    tokens = [1, 2]
    while len(tokens) < count:
        follows = (3 * tokens[-1] + tokens[-2] + 1) % config.vocab_size
        tokens.append(follows if draw.random() < 0.9 else int(draw.integers(config.vocab_size)))
    numpy.array(tokens, dtype=numpy.uint16).tofile(path)


def starts(length: int, config: Settings, count: int, seed: int) -> Tensor:
    """Where the windows begin [count * batch size], as one `randint` after another draws them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.cat(
        [
            torch.randint(length - config.block_size, (config.batch_size,), generator=generator)
            for _ in range(count)
        ]
    )


def window(data: Any, at: int, config: Settings) -> tuple[Tensor, Tensor]:
    """Tokens and the tokens after them, both [block size]."""
    part = torch.from_numpy(data[at : at + config.block_size + 1].astype(numpy.int64))
    return part[:-1], part[1:]


def decay_groups(named: list[tuple[str, Tensor]], config: Settings) -> list[dict[str, Any]]:
    """Matrices decay, the rest does not."""
    wanted = [(name, each) for name, each in named if each.requires_grad]
    return [
        {"params": [each for _, each in wanted if each.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [each for _, each in wanted if each.dim() < 2], "weight_decay": 0.0},
    ]


def rate(step: int, config: Settings) -> float:
    """Warm-up, then half a cosine down to the smallest."""
    if step < config.warmup:
        return config.learning_rate * (step + 1) / (config.warmup + 1)
    part = min(1.0, (step - config.warmup) / max(1, config.steps - config.warmup))
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * part)) * (config.learning_rate - config.min_lr)


# --- The script's loop.


def script(path: Path, config: Settings, model: GPT) -> tuple[list[float], list[float]]:
    """Trains `model`; the losses of the steps and those of the evaluations."""
    data = numpy.memmap(path, dtype=numpy.uint16, mode="r")
    optimizer = torch.optim.AdamW(
        decay_groups(list(model.named_parameters()), config), lr=config.learning_rate, betas=(0.9, 0.95)
    )
    drawn = iter(starts(len(data), config, config.steps, seed=0).split(config.batch_size))

    def get_batch(at: Tensor) -> tuple[Tensor, Tensor]:
        pairs = [window(data, int(each), config) for each in at]
        return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])

    @torch.no_grad()
    def estimate_loss() -> float:
        model.eval()
        found = [
            model(*get_batch(at))[1]
            for at in starts(len(data), config, config.eval_batches, seed=1).split(config.batch_size)
        ]
        model.train()
        return float(torch.stack(found).mean())

    losses, evaluations = [], []
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, config)
        loss = model(*get_batch(next(drawn)))[1]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % config.eval_interval == 0 or step + 1 == config.steps:
            evaluations.append(estimate_loss())
    return losses, evaluations


# --- The job that it becomes.


class Windows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """`count` batches of random windows, in the order in which the script draws them."""

    def __init__(self, path: Path, config: Settings, count: int, seed: int) -> None:
        self.data, self.config = numpy.memmap(path, dtype=numpy.uint16, mode="r"), config
        self.starts = starts(len(self.data), config, count, seed)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return window(self.data, int(self.starts[index]), self.config)


def loss(model: GPT, batch: list[Tensor]) -> Tensor:
    """Mean over all tokens; every window is as long."""
    return model(*batch)[1]


def job(path: Path, config: Settings) -> ml.Job:
    return ml.Job(
        model=lambda: GPT(config),
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(
            decay_groups(named, config), lr=config.learning_rate, betas=(0.9, 0.95)
        ),
        data=lambda: Windows(path, config, config.steps, seed=0),
        batch_size=config.batch_size,
        steps=config.steps,
        shuffle=False,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: rate(step, config) / config.learning_rate
        ),
        clip_grad_norm=config.grad_clip,
        evaluate=ml.Evaluate(
            lambda: Windows(path, config, config.eval_batches, seed=1),
            {"loss": loss},
            every=config.eval_interval,
        ),
    )
