"""Local SGD: every replica takes some steps by itself, then all take the mean of their parameters.

Source: Stich, "Local SGD Converges Fast and Communicates Little" (2019).

    replica 0    step  step  step \\         / step  step ...
    replica 1    step  step  step -> mean -> step  step ...         a *round* is `local_steps` steps and the mean that ends it
    replica 2    step  step  step /         \\ step  step ...

Each steps with the user's optimizer on the mean gradient of its own share, and keeps the optimizer's state to itself. The mean is a plain one: a
replica with a larger share counts no more than others. A round can be ended early (`settle`): a checkpoint, and the end of the run, need one model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from meshloom.comm.group import Group
from meshloom.comm.steps import Steps
from meshloom.exchange.exchange import Give

Named = Sequence[tuple[str, nn.Parameter]]


class RoundEnd(ABC):
    """What becomes of the mean of all replicas' parameters at the end of a round."""

    @abstractmethod
    def begin(self, named: Named) -> None:
        """A round begins; the parameters are the same on all replicas."""

    @abstractmethod
    def end(self, named: Named, means: Sequence[Tensor]) -> None:
        """Set the parameters, alike on all replicas. means: of each, in its shape; not kept."""


class TakeMean(RoundEnd):
    """Every replica goes on from the mean."""

    def begin(self, named: Named) -> None:
        pass

    def end(self, named: Named, means: Sequence[Tensor]) -> None:
        for (_, parameter), mean in zip(named, means, strict=True):
            parameter.data.copy_(mean)


class Rounds:
    """Counts the steps of a replica among those of `group`, and ends rounds.

    named: the trainable parameters. apart: names of those that other groups hold too, and average apart from others, so that the same bits come out.
    """

    def __init__(self, named: Named, group: Group, *, local_steps: int, end: RoundEnd, apart: Collection[str] = ()) -> None:
        self._group = group
        self._local_steps = local_steps
        self._end = end
        self._kinds: dict[tuple[torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in named:
            self._kinds.setdefault((parameter.dtype, name in apart), []).append((name, parameter))
        self._named = [pair for pairs in self._kinds.values() for pair in pairs]
        self._parameters = dict(named)
        self._taken = 0  # steps of this round
        self._times = 0  # means taken

    @property
    def settled(self) -> bool:
        """Whether all replicas hold the same parameters. Equal on all ranks."""
        return self._taken == 0

    def begin_step(self) -> None:
        """The replica is about to step."""
        if self.settled:
            self._end.begin(self._named)
        self._taken += 1

    def end_step(self) -> Steps[bool]:
        """The replica has stepped; whether that ended the round."""
        if self._taken < self._local_steps:
            return False
        return (yield from self.settle())

    def settle(self) -> Steps[bool]:
        """End the round, if one is under way; whether it was."""
        if self.settled:
            return False
        means = yield from self._means()
        self._end.end(self._named, means)
        self._taken = 0
        return True

    def mean(self) -> Steps[list[Tensor]]:
        """Put the mean in the place of the parameters; the values they had, for `put_back`."""
        means = yield from self._means()
        own = [parameter.data.clone() for _, parameter in self._named]
        for (_, parameter), mean in zip(self._named, means, strict=True):
            parameter.data.copy_(mean)
        return own

    def put_back(self, own: Sequence[Tensor]) -> None:
        """Undo `mean`."""
        for (_, parameter), value in zip(self._named, own, strict=True):
            parameter.data.copy_(value)

    def give_mean(self, give: Give, name: str, gradient: Tensor | None) -> Steps[None]:
        """Give the plain mean over replicas of a whole gradient, those that are None counting as zero: for inspection."""
        parameter = self._parameters[name]
        flat = parameter.new_zeros(parameter.numel() + 1, requires_grad=False)
        if gradient is not None:
            flat[:-1] = gradient.to_dense().reshape(-1)
            flat[-1] = 1
        work = self._group.all_reduce(flat)
        yield
        work.wait()
        yield from give(name, flat[:-1].div(self._group.size).view(parameter.shape) if bool(flat[-1]) else None)

    def bytes_so_far(self) -> dict[str, int]:
        """Bytes that all means handed to collectives."""
        num_bytes = sum(parameter.numel() * _precision(parameter.dtype).itemsize for _, parameter in self._named)
        return {"all_reduce": num_bytes * self._times}

    def _means(self) -> Steps[list[Tensor]]:
        self._times += 1
        flats = [torch.cat([each.detach().reshape(-1).to(_precision(each.dtype)) for _, each in pairs]) for pairs in self._kinds.values()]
        works = [self._group.all_reduce(flat) for flat in flats]
        yield
        for work in works:
            work.wait()
        means: list[Tensor] = []
        for flat, pairs in zip(flats, self._kinds.values(), strict=True):
            flat.div_(self._group.size)
            pieces = flat.split([each.numel() for _, each in pairs])
            means += [piece.view(each.shape) for piece, (_, each) in zip(pieces, pairs, strict=True)]
        return means


def _precision(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
