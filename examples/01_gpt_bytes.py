"""A small GPT learns the bytes of Python's own standard library.

    meshloom train  examples/01_gpt_bytes.py                                # whatever devices there are
    meshloom train  examples/01_gpt_bytes.py --plan dp=2,microbatches=2     # two replicas
    meshloom verify examples/01_gpt_bytes.py --plan dp=2,microbatches=2     # ... and proof that they equal one device

Nothing here knows about ranks: this is the model, the loss, the optimizer and the data of one device.
"""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import meshloom as ml

LENGTH = 128  # bytes per sample
STEPS = 200
WARMUP = 20  # steps


class Bytes(Dataset[dict[str, Tensor]]):
    """The source files of the standard library, one after another, cut into samples of `LENGTH` bytes.

    x: int64 [LENGTH]; y: int64 [LENGTH], the byte that follows each of x. Every tenth file is held out of
        training.
    """

    def __init__(self, train: bool) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        chosen = [file for number, file in enumerate(files) if (number % 10 != 0) == train]
        text = b"".join(file.read_bytes() for file in chosen)
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.text) - 1) // LENGTH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.text[index * LENGTH : (index + 1) * LENGTH + 1].long()
        return {"x": window[:-1], "y": window[1:]}


class Attention(nn.Module):
    """Causal self-attention; [batch, length, width] -> the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then two linear layers, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Tokens [batch, length] -> logits [batch, length, vocabulary]."""

    def __init__(
        self, vocabulary: int = 256, width: int = 128, blocks: int = 4, heads: int = 4, length: int = LENGTH
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # Layers that write into the residual stream start smaller, the more blocks there are.
                scale = 1 / math.sqrt(2 * blocks) if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy, in nats per byte."""
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """AdamW; weight decay for matrices, none for biases and norms."""
    matrices = [(name, parameter) for name, parameter in named if parameter.ndim >= 2]
    vectors = [(name, parameter) for name, parameter in named if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95))


def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Linear warm-up, then half a cosine down to a tenth."""

    def scale(step: int) -> float:
        progress = min(1.0, max(0, step - WARMUP) / (STEPS - WARMUP))
        return min(1.0, (step + 1) / WARMUP) * (0.55 + 0.45 * math.cos(math.pi * progress))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, scale)


def held_out() -> Dataset[dict[str, Tensor]]:
    """256 samples, evenly spread over the files that are not trained on."""
    data = Bytes(train=False)
    return torch.utils.data.Subset(data, range(0, len(data), len(data) // 256)[:256])


job = ml.Job(
    model=GPT,
    loss=loss,
    optimizer=optimizer,
    scheduler=scheduler,
    data=lambda: Bytes(train=True),
    batch_size=64,
    steps=STEPS,
    clip_grad_norm=1.0,
    tokens_per_sample=LENGTH,
    evaluate=ml.Evaluate(
        held_out,
        {"loss": loss, "bits per byte": lambda model, batch: loss(model, batch) / math.log(2)},
        every=100,
    ),
)
