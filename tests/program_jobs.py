"""Models that the program tests read: name -> (build, loss, batch of a generator). Odd sizes, at least two
layers, a few milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from meshloom.core.job import Job

Batch = Callable[[torch.Generator], Any]
Model = tuple[Callable[[], nn.Module], Callable[[nn.Module, Any], Any], Batch]


class Loss(nn.Module):
    """A job's loss, to be exported by hand."""

    def __init__(self, model: nn.Module, loss: Any) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Any) -> Any:
        return self.loss(self.model, batch)


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    """Mean square of the output: every element has a gradient."""
    output = model(batch["x"])
    return (output[0] if isinstance(output, tuple) else output).float().square().mean()


def job_of(build: Any, loss: Any = lambda model, batch: model(batch["x"]).square().mean()) -> Job:
    """A job that is read and never trained."""
    return Job(
        model=build,
        loss=loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        data=lambda: [0],
        batch_size=1,
        steps=1,
    )


def batches_of(model: Model, count: int = 2) -> list[Any]:
    """So many of a model's batches."""
    generator = torch.Generator().manual_seed(3)
    return [model[2](generator) for _ in range(count)]


def normal(*shape: int) -> Batch:
    return lambda generator: {"x": torch.randn(shape, generator=generator)}


def tokens(*shape: int) -> Batch:
    return lambda generator: {"x": torch.randint(13, shape, generator=generator)}


class InPlace(nn.Module):
    """Convolutions with batch norm, in-place ReLU and dropout, and a residual added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1)
        self.norm = nn.BatchNorm2d(5)
        self.conv2 = nn.Conv2d(5, 5, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(5, affine=False)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.3, inplace=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.conv(x)))
        y = self.norm2(self.conv2(x))
        y += x
        y = self.drop(1 * F.leaky_relu(y, 0.2))
        return self.head(y.mean((2, 3)))


class SliceWrites(nn.Module):
    """Writes through slices, selections, chunks, transposes and masks, and reads other views of what was
    written."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.full((6, 6), float("-inf"))
        mask[torch.arange(6)[:, None] >= torch.arange(6)] = 0
        y = self.first(x)
        early = y[:, 1:3]  # a view made before the write sees it
        z = y.clone()
        z[:, 0] = 1.5
        z[::2, 1:4] *= 2
        z[1].add_(y[0].detach())
        left, right = mask.clone().clamp(min=-1).chunk(2, 1)
        right.mul_(left - 3)
        z.narrow(1, 3, 3).mul_(right)
        z.t()[2].neg_()
        z.view(-1)[3:5].zero_()
        z.unflatten(1, (2, 3)).transpose(1, 2)[:, 1].fill_(0.25)
        z.masked_fill_(x[:, :6] > 1.5, 0.0)
        z.index_put_((torch.tensor([0, 2]), torch.tensor([1, 1])), z.new_tensor([3.0, 4.0]), accumulate=True)
        z.diagonal().add_(1)
        y.relu_()
        a, b, c = (z[:, column] for column in range(3))
        b.copy_(a)
        out = torch.zeros(x.shape[0], 6)
        out[:, 2:] = self.second(z)[:, 2:]
        out[:, :2] = early
        weights = (out[:6, None] * mask.exp()[None, :, :].sum(1)).softmax(-1)
        return torch.cat([out, z, weights.flatten(1)[:, :1].expand(6, 2), c[:, None]], 1)


class Autocast(nn.Module):
    """A layer used twice under autocast (its cast is cached), one in float32 inside, no_grad inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.second = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.first(self.first(x))
            with torch.autocast("cpu", enabled=False):
                y = y + self.first(x)
            with torch.no_grad():
                z = self.second(y)
            y = self.second(y)
        with torch.autocast("cpu", torch.bfloat16):
            return y * z.float() + self.second(x)


class NoGrad(nn.Module):
    """A target network's output without gradient, a detached value, gradients on again inside, a decorated
    function."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Linear(7, 5)
        self.target = nn.Linear(7, 5)

    @torch.no_grad()
    def teach(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = self.online(x)
        return self.target(x) + inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            goal = self.target(x).softmax(-1)
            with torch.enable_grad():
                also = self.online(x).square()
        return (self.online(x) - goal) * self.online(x).detach() + self.teach(x) + also


class Checkpointed(nn.Module):
    """A block recomputed in backward, in both of torch's ways, with dropout in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.second = nn.Linear(7, 7)
        self.drop = nn.Dropout(0.2)

    def block(self, x: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(x)
        x = checkpoint(self.block, x, use_reentrant=False)
        return self.second(checkpoint(self.block, x, use_reentrant=True))


class Tied(nn.Module):
    """Embedding and output projection are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6, padding_idx=0)
        self.mid = nn.Linear(6, 6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.mid(self.embed(x))))


class Parametrised(nn.Module):
    """Weight norm, orthogonal weights, spectral norm (whose vectors are buffers that the forward updates in
    place)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(7, 6))
        self.second = parametrizations.spectral_norm(nn.Linear(6, 6))
        self.third = parametrizations.orthogonal(nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Rotary(nn.Module):
    """Attention with complex rotary positions (Llama's original form)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 5)
        angles = torch.outer(torch.arange(5.0), 100.0 ** -torch.arange(0, 1, 0.5))
        self.register_buffer("rotation", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * self.rotation[:, None]
        return torch.view_as_real(turned).flatten(3).type_as(x)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).unbind(2)
        q, k, v = (each.transpose(1, 2) for each in (self.rotate(q), self.rotate(k), v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Average(nn.Module):
    """A buffer that follows the activations and is read before and after it is updated."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 6)
        self.second = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) - self.mean.clone()
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
            self.steps += 1
        return self.second(y + self.mean) / self.steps


class Noise(nn.Module):
    """Every kind of draw: before the layers, in place, discarded."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(3)  # nobody uses it, and the draws after it are counted from it
        x = x + 0.1 * torch.randn_like(x)
        y = self.first(x) * torch.empty(6, 6).bernoulli_(0.7)
        y = F.alpha_dropout(F.rrelu(y, training=True), 0.2, training=True)
        y = y + torch.rand(6) * torch.empty_like(y).normal_() + F.gumbel_softmax(y)
        y.add_(torch.randint(0, 3, (6,)))
        return F.dropout1d(self.second(F.dropout(y, 0.2, inplace=True))[None], 0.3)[0]


class Recurrent(nn.Module):
    """LSTM with dropout between its layers, then a bidirectional GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(7, 5, 2, dropout=0.3, batch_first=True)
        self.gru = nn.GRU(5, 3, 2, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(self.lstm(x)[0])[0]


class Precisions(nn.Module):
    """Inner casts to float32, float64 and bfloat16, whatever the model's own precision is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        variance = y.to(torch.float32).pow(2).mean(-1, keepdim=True)
        y = self.scale * (y * torch.rsqrt(variance + 1e-6).to(y.dtype))
        return y + y.to(torch.bfloat16).float() * torch.arange(6, dtype=torch.float64).float()


class Transformer(nn.Module):
    """torch's own encoder, with a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 9, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.attention = nn.MultiheadAttention(6, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[:, -1] = True
        y = self.encoder(x, src_key_padding_mask=padding)
        return self.attention(y, x, x)[0]


OWN: dict[str, Model] = {
    "in_place": (InPlace, mean_square, normal(4, 3, 6, 6)),
    "slice_writes": (SliceWrites, mean_square, normal(6, 7)),
    "autocast": (Autocast, mean_square, normal(4, 7)),
    "no_grad": (NoGrad, mean_square, normal(4, 7)),
    "checkpointed": (Checkpointed, mean_square, normal(4, 7)),
    "tied": (Tied, mean_square, tokens(4, 5)),
    "parametrised": (Parametrised, mean_square, normal(4, 7)),
    "rotary": (Rotary, mean_square, normal(3, 5, 8)),
    "average": (Average, mean_square, normal(4, 7)),
    "noise": (Noise, mean_square, normal(6, 7)),
    "recurrent": (Recurrent, mean_square, normal(3, 5, 7)),
    "precisions": (Precisions, mean_square, normal(4, 7)),
    "transformer": (Transformer, mean_square, normal(3, 5, 6)),
}
