"""Jobs that calibration and the development of prices have not seen: five kinds of model, sizes that are no
powers of two.

JOBS: name -> Job, each of which is also a name here: a byte GPT with packed projections, an MLP of odd
widths, a convolutional network, an LSTM, a Llama of `transformers`.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import meshloom as ml


class Drawn(Dataset[dict[str, Tensor]]):
    """Samples drawn once: field -> [samples, ...]."""

    def __init__(self, **fields: Tensor) -> None:
        self.fields = fields

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self.fields.items()}


def tokens(vocabulary: int, length: int, samples: int = 96) -> Drawn:
    """x, y: int64 [length]."""
    drawn = torch.randint(vocabulary, (samples, length + 1), generator=torch.Generator().manual_seed(5))
    return Drawn(x=drawn[:, :-1].contiguous(), y=drawn[:, 1:].contiguous())


class Layer(nn.Module):
    """A transformer block with packed projections: [batch, length, width] -> the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class ByteGPT(nn.Module):
    """Bytes [batch, length] -> logits [batch, length, 256]."""

    def __init__(self, width: int = 240, layers: int = 5, heads: int = 6, length: int = 96) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Parameter(torch.zeros(length, width))
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        x = self.token(x) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Convolutions(nn.Module):
    """Pictures [batch, 3, 36, 36] -> logits [batch, 17]."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 24, 40, 72]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(widths)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for width in widths[1:])
        self.head = nn.Linear(72, 17)

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.max_pool2d(F.relu(norm(convolution(x))), 2)
        return self.head(x.mean((2, 3)))


class Recurrent(nn.Module):
    """Tokens [batch, length] -> logits [batch, length, 500]."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(500, 144)
        self.lstm = nn.LSTM(144, 208, num_layers=2, batch_first=True)
        self.head = nn.Linear(208, 500)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.token(x))[0])


def llama() -> nn.Module:
    """A small one, with fewer key and value heads than query heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=700, hidden_size=224, intermediate_size=560, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=80, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def next_token(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy."""
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def of_class(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def of_llama(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The model's own."""
    return model(input_ids=batch["x"], labels=batch["x"]).loss


def odd_mlp() -> nn.Module:
    """Vectors [batch, 611] -> logits [batch, 23]."""
    widths = [611, 1403, 997, 1211, 503]
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.SiLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 23))


def classes(count: int, *shape: int, samples: int = 192) -> Drawn:
    """x: float [shape]; y: int64, below count."""
    generator = torch.Generator().manual_seed(6)
    return Drawn(
        x=torch.randn(samples, *shape, generator=generator),
        y=torch.randint(count, (samples,), generator=generator),
    )


def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-4)


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=1e-3, momentum=0.9)


gpt = ml.Job(
    model=ByteGPT,
    loss=next_token,
    optimizer=adamw,
    data=lambda: tokens(256, 96),
    batch_size=24,
    steps=100,
    clip_grad_norm=1.0,
)
mlp = ml.Job(
    model=odd_mlp, loss=of_class, optimizer=adamw, data=lambda: classes(23, 611), batch_size=180, steps=100
)
convolutions = ml.Job(
    model=Convolutions,
    loss=of_class,
    optimizer=sgd,
    data=lambda: classes(17, 3, 36, 36),
    batch_size=48,
    steps=100,
)
lstm = ml.Job(
    model=Recurrent, loss=next_token, optimizer=adamw, data=lambda: tokens(500, 40), batch_size=36, steps=100
)
small_llama = ml.Job(
    model=llama, loss=of_llama, optimizer=adamw, data=lambda: tokens(700, 72), batch_size=16, steps=100
)

JOBS = {"gpt": gpt, "mlp": mlp, "convolutions": convolutions, "lstm": lstm, "small_llama": small_llama}
