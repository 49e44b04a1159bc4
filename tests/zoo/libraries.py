"""What torch brings besides layers: scripts, checkpoints, nested tensors, fake quantisation, attention by functions, batches that
are no dicts of tensors."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint_sequential

from meshloom.core.job import Job
from tests.zoo import integers, job_of, normal

DATA = (normal(201, 7), integers(202, 5))
TOKENS = (integers(203, 17, 6), DATA[1], integers(204, 7, least=2))


def _cross_entropy(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def cumulative_batch_norm() -> Job:
    """Running statistics that are means over all batches so far."""
    norm = lambda width: nn.BatchNorm1d(width, momentum=None)  # noqa: E731
    model = lambda: nn.Sequential(  # noqa: E731
        nn.Linear(7, 11), norm(11), nn.ReLU(), nn.Linear(11, 9), norm(9), nn.ReLU(), nn.Linear(9, 5)
    )
    return job_of(model, _cross_entropy, DATA)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is deprecated, and used
            self.one = torch.jit.script(nn.Sequential(nn.Linear(7, 11), nn.ReLU(), nn.Linear(11, 9)))
        self.head = nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.one(x)))


def scripted_layers() -> Job:
    return job_of(Scripted, _cross_entropy, DATA)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(11), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(5))
        self.net(torch.zeros(2, 7))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def lazy_layers() -> Job:
    return job_of(Lazy, _cross_entropy, DATA)


class Sequentially(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *[nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7), nn.ReLU()) for _ in range(4)]
        )
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint_sequential(self.layers, 2, x, use_reentrant=False))


def checkpointed_sequence() -> Job:
    return job_of(Sequentially, _cross_entropy, DATA)


class FakeQuantised(nn.Module):
    """Observers whose minima and maxima move with the batch."""

    def __init__(self) -> None:
        super().__init__()
        fake = lambda: FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)  # noqa: E731
        self.one, self.two, self.head = nn.Linear(7, 11), nn.Linear(11, 9), nn.Linear(9, 5)
        self.quant1, self.quant2 = fake(), fake()

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant1(F.relu(self.one(x)).float()).to(x.dtype)
        x = self.quant2(F.relu(self.two(x)).float()).to(x.dtype)
        return self.head(x)


def fake_quantisation() -> Job:
    return job_of(FakeQuantised, _cross_entropy, DATA)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.one, self.head = nn.Embedding(17, 9), nn.Linear(9, 11), nn.Linear(11, 5)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        rows = [self.embed(row[: int(n)]) for row, n in zip(ids, lengths, strict=True)]
        nested = torch.nested.nested_tensor_from_jagged(torch.cat(rows), torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))  # fmt: skip
        x = torch.relu(self.one(nested))
        return self.head(torch.nested.to_padded_tensor(x, 0.0).sum(1) / lengths.unsqueeze(1))


def jagged_tensors() -> Job:
    return job_of(Nested, lambda m, b: F.cross_entropy(m(b[0], b[2]), b[1]), TOKENS)


class Padded(nn.Module):
    """torch's own encoder, its fast path off in training, causal masks and masks of padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 13, dropout=0.1, batch_first=True, activation="gelu")
        self.embed, self.encoder = nn.Embedding(17, 8, padding_idx=0), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)  # fmt: skip
        self.head = nn.Linear(8, 5)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        padding = torch.arange(ids.size(1)) >= lengths.unsqueeze(1)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1), dtype=self.head.weight.dtype)
        float_padding = torch.zeros_like(padding, dtype=mask.dtype).masked_fill_(padding, float("-inf"))
        x = self.encoder(self.embed(ids), mask=mask, src_key_padding_mask=float_padding)
        return self.head(x[torch.arange(len(x)), lengths - 1])


def torch_encoder_with_padding() -> Job:
    return job_of(Padded, lambda m, b: F.cross_entropy(m(b[0], b[2]), b[1]), TOKENS)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(8, 2, 13, dropout=0.0, batch_first=True, norm_first=True)
        self.embed, self.decoder, self.head = (
            nn.Embedding(17, 8),
            nn.TransformerDecoder(layer, 2),
            nn.Linear(8, 17),
        )

    def forward(self, ids: Tensor) -> Tensor:
        x, t = self.embed(ids), ids.size(1)
        causal = torch.triu(torch.full((t, t), float("-inf"), dtype=x.dtype), diagonal=1)
        return F.linear(self.decoder(x, x.detach(), tgt_mask=causal, tgt_is_causal=True), self.embed.weight)


def torch_decoder_with_tied_head() -> Job:
    return job_of(Decoder, lambda m, b: F.cross_entropy(m(b[0][:, :-1]).transpose(1, 2), b[0][:, 1:]), TOKENS)


class Adaptive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru = nn.Embedding(17, 9), nn.GRU(9, 8, num_layers=2, batch_first=True, dropout=0.1)
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(8, 17, cutoffs=[5, 11], div_value=2.0)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.gru(self.embed(ids[:, :-1]))[0]
        return self.loss(h.reshape(-1, 8), ids[:, 1:].reshape(-1)).loss


def adaptive_softmax() -> Job:
    return job_of(Adaptive, lambda m, b: m(b[0]), TOKENS)


@dataclass
class Example:
    x: Tensor
    y: Tensor
    weight: np.ndarray


def _examples(samples: list[Any]) -> Example:
    x, y = torch.stack([s[0] for s in samples]), torch.stack([s[1] for s in samples])
    return Example(x, y, 1.0 + np.abs(x[:, 0].numpy()))


def _weighted(model: Any, b: Example) -> Tensor:
    losses = F.cross_entropy(model(b.x), b.y, reduction="none")
    return (losses * torch.as_tensor(b.weight).to(losses.dtype)).mean()


def dataclass_with_numpy() -> Job:
    model = lambda: nn.Sequential(nn.Linear(7, 11), nn.ReLU(), nn.Linear(11, 9), nn.ReLU(), nn.Linear(9, 5))  # noqa: E731
    return job_of(model, _weighted, DATA, collate=_examples)


class ClippedGradients(nn.Module):
    """A tensor hook that is not linear: gradients are clamped, and NaNs of them zeroed."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(7, 11), nn.Linear(11, 9), nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.one(x))
        if x.requires_grad:
            x.register_hook(lambda grad: torch.nan_to_num(grad).clamp(-0.01, 0.01))
        return self.head(torch.tanh(self.two(x)))


def clamped_gradients() -> Job:
    return job_of(ClippedGradients, _cross_entropy, DATA)


class Normalises(nn.Module):
    """A full backward hook that scales by the gradient's norm."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(7, 11), nn.Linear(11, 9), nn.Linear(9, 5)
        self.two.register_full_backward_hook(lambda module, grads, outs: (grads[0] / (1 + grads[0].norm()),))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.two(torch.tanh(self.one(x)))))


def normalised_gradients() -> Job:
    return job_of(Normalises, _cross_entropy, DATA)


def quasi_newton() -> Job:
    model = lambda: nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5))  # noqa: E731
    lbfgs = lambda named: torch.optim.LBFGS([p for _, p in named], lr=0.5, max_iter=3, history_size=4)  # noqa: E731
    return job_of(model, _cross_entropy, DATA, optimizer=lbfgs)
