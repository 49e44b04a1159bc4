"""Small jobs whose losses use parameters in ways that zero=3 must see: outside of the forward of their unit,
again in backward, in another order on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshloom.core.job import Job
from tests.jobs import class_loss, make_job, vectors


class Part(nn.Module):
    """[batch, 6] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 11)
        self.down = nn.Linear(11, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Blocks(nn.Module):
    """[batch, 7] -> [batch, 5], through four blocks."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(7, 6)
        self.blocks = nn.ModuleList(Part() for _ in range(blocks))
        self.head = nn.Linear(6, 5)

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.through(torch.tanh(self.first(x))))


class Recomputed(Blocks):
    """Blocks that are checkpointed; `reentrant` names how."""

    reentrant = False

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)  # type: ignore[assignment]
        return x


class RecomputedReentrant(Recomputed):
    reentrant = True


class Again(Blocks):
    """Every block twice, in another order the second time."""

    def through(self, x: Tensor) -> Tensor:
        return super().through(super().through(x.flip(1))) + self.blocks[2](x)


class Shuffled(Blocks):
    """The samples decide which blocks run and in what order."""

    def through(self, x: Tensor) -> Tensor:
        order = x.detach().double().mean(0)[:4].argsort().tolist()
        for number in order[: 2 + int(x.detach().sum() > 0)]:
            x = self.blocks[number](x)
        return x


class Inside(Blocks):
    """Calls parts of blocks, and uses their weights directly."""

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            assert isinstance(block, Part)
            x = x + F.linear(torch.tanh(block.up(x)), block.down.weight)
        return x


class Tied(Blocks):
    """Two blocks share a layer, and the head is a block's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].up = self.blocks[0].up
        self.blocks[2].norm.weight = self.blocks[1].norm.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(x).detach() * 0.5


class LendingPart(Part):
    """Returns its weight, too, in another dtype."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        lent = self.down.weight.double()
        return super().forward(x) + F.linear(torch.tanh(x.double()) @ lent, lent).to(x.dtype), lent


class Lending(Blocks):
    """Casts that blocks make of their weights are used after them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LendingPart() for _ in range(4))

    def through(self, x: Tensor) -> Tensor:
        lent: list[Tensor] = []
        for block in self.blocks:
            x, own = block(x)
            lent.append(own)
        return x + sum(F.linear(torch.tanh(x.double()) @ each, each).to(x.dtype) for each in lent)


class Frozen(Blocks):
    """Some blocks, and parts of others, are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.blocks[2].up.requires_grad_(False)
        self.blocks[0].norm.requires_grad_(False)
        self.first.requires_grad_(False)


class Adapted(Blocks):
    """A frozen base, whose layers have trained adapters of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            for name in ("down", "up"):
                setattr(block, name, Adapter(getattr(block, name)))
        self.head.requires_grad_()


class Adapter(nn.Module):
    """A layer and what it learns beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Read(Blocks):
    """All blocks read the same value, as those of a decoder read what an encoder gives: along tp their layers are one operator."""

    def forward(self, x: Tensor) -> Tensor:
        given, x = self.first(x), torch.zeros(6, dtype=x.dtype)
        for block in self.blocks:
            assert isinstance(block, Part)
            x = block.norm(x + block.down(torch.tanh(block.up(given))))
        return self.head(x)


class Steered(torch.autograd.Function):
    """Twice x; its backward uses a weight that its forward saves, and does not read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return gradients[0] * weight.mean().to(gradients[0].dtype), None


class Saved(Blocks):
    """Weights of blocks are saved for backward while they are not here."""

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = Steered.apply(x, block.up.weight)  # type: ignore[no-untyped-call]
        return super().through(x)


class Recurrent(nn.Module):
    """[batch, 7] -> [batch, 5]: recurrent layers, attention and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(4, 4, batch_first=True) for _ in range(2))
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(1, 4, 3, padding=1))
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x[:, None]).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)[0]
        return self.head((x + self.attend(x, x, x)[0]).mean(1))


def _decayed(model: Any, batch: Any) -> Tensor:
    squares = [each.square().sum() for name, each in model.named_parameters() if name.endswith("up.weight")]
    return class_loss(model, batch) + 1e-2 * torch.stack(squares).sum()


def _functional(model: Any, batch: Any) -> Tensor:
    parameters = {name: 1.5 * each for name, each in model.named_parameters()}
    return F.cross_entropy(torch.func.functional_call(model, parameters, (batch["x"],)), batch["y"])


def _penalised(model: Any, batch: Any) -> Tensor:
    x = batch["x"].clone().requires_grad_()
    loss = F.cross_entropy(model(x), batch["y"])
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.square().sum()


KINDS: dict[str, tuple[type[nn.Module], Callable[[Any, Any], Tensor]]] = {
    "blocks": (Blocks, class_loss),
    "recomputed": (Recomputed, class_loss),
    "recomputed_reentrant": (RecomputedReentrant, class_loss),
    "again": (Again, class_loss),
    "shuffled": (Shuffled, class_loss),
    "inside": (Inside, class_loss),
    "tied": (Tied, class_loss),
    "lending": (Lending, class_loss),
    "frozen": (Frozen, class_loss),
    "adapted": (Adapted, class_loss),
    "read": (Read, class_loss),
    "saved": (Saved, class_loss),
    "recurrent": (Recurrent, class_loss),
    "decayed": (Blocks, _decayed),
    "functional": (Blocks, _functional),
    "penalised": (Blocks, _penalised),
}


def unit_job(kind: str, optimizer: str = "adamw", samples: int = 22, **overrides: Any) -> Job:
    """The job of a kind in `KINDS`."""
    build, loss = KINDS[kind]
    settings: dict[str, Any] = {"loss": loss, "data": partial(vectors, samples), "batch_size": 9}
    return replace(make_job("mlp", optimizer, **{**settings, **overrides}), model=build)
