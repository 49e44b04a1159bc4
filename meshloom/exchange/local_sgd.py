"""Local SGD: replicas take independent local steps, then all take the mean of their parameters.

Source: Stich, "Local SGD Converges Fast and Communicates Little" (2019).

    replica 0    step  step  step \\         / step  step ...
    replica 1    step  step  step -> mean -> step  step ...         a *round* is `local_steps` steps and the mean that ends it
    replica 2    step  step  step /         \\ step  step ...

Each steps with the user's optimizer on the mean gradient of its own share, and keeps the optimizer's state to
itself. The mean is a plain one: a replica with a larger share counts no more than others. A round can be
ended early: a checkpoint, and the end of the run, need one model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from meshloom.comm.group import Group
from meshloom.core.losses.loss_sum import Divisor
from meshloom.exchange.alone import Alone
from meshloom.exchange.disjoint import parts_of
from meshloom.exchange.exchange import Emit, Exchange
from meshloom.exchange.registry import Named, Setup
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


class RoundEnd(ABC):
    """How parameters continue from their mean over the replicas at the end of a round."""

    @abstractmethod
    def begin(self, named: Named) -> None:
        """A round begins; the parameters are equal on all replicas."""

    @abstractmethod
    def end(self, named: Named, means: Sequence[Tensor]) -> None:
        """Sets the parameters, to equal values on all replicas. means: of each parameter, in its shape; not
        to be kept."""


class TakeMean(RoundEnd):
    """Every replica continues from the mean."""

    def begin(self, named: Named) -> None:
        pass

    def end(self, named: Named, means: Sequence[Tensor]) -> None:
        for (_, parameter), mean in zip(named, means, strict=True):
            parameter.data.copy_(mean)


def open_local_sgd(setup: Setup, end: RoundEnd | None = None) -> Exchange:
    """The exchange with the plan's number of local steps. end: of a round; default: every replica continues
    from the mean."""
    return LocalSGD(
        setup.dense,
        setup.named,
        setup.group,
        local_steps=setup.plan.local_steps,
        end=end or TakeMean(),
        replicated=setup.replicated,
    )


class LocalSGD(Alone):
    """Each replica of `group` steps with its own gradients; parameters are averaged at the end of a round.

    dense: the parameters whose gradients it takes. named: all that are trained. replicated: names of those
    that are replicated over other groups. They are averaged in messages of their own, so that the results
    have the same bits in all groups.
    """

    def __init__(
        self,
        dense: Named,
        named: Named,
        group: Group,
        *,
        local_steps: int,
        end: RoundEnd,
        replicated: Collection[str] = (),
    ) -> None:
        super().__init__(dense)
        self.ownership = replace(self.ownership, independent=True)
        self._group = group
        self._local_steps = local_steps
        self.end = end
        self._kinds: dict[tuple[torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in named:
            self._kinds.setdefault((parameter.dtype, name in replicated), []).append((name, parameter))
        self._named = [pair for pairs in self._kinds.values() for pair in pairs]
        self._parameters = dict(named)
        self.taken = 0  # steps of this round
        self._times = 0  # means taken

    def finish(self, weight: Divisor) -> list[Tensor | None]:
        if not self.taken:
            self.end.begin(self._named)
        self.taken += 1
        return super().finish(weight)

    def publish(self) -> bool:
        is_due = self.taken >= self._local_steps
        if is_due:
            self.settle()
        return is_due

    def settle(self) -> None:
        """Ends the round: parameters become equal on all replicas."""
        self.end.end(self._named, self._means())
        self.taken = 0

    def show_mean(self) -> Callable[[], None]:
        """Replaces the parameters by their mean over the replicas, until the returned function is called."""
        means = self._means()
        own = [parameter.data.clone() for _, parameter in self._named]
        self._set(means)
        return lambda: self._set(own)

    def mean(self, emit: Emit) -> Emit:
        """Passes the plain mean over replicas of the full gradients that it gets to `emit`; None counts as
        zero."""
        return partial(self._emit_mean, emit)

    def expected_bytes(self) -> ExpectedBytes:
        num_bytes = sum(
            parameter.numel() * _precision(parameter.dtype).itemsize for _, parameter in self._named
        )
        return ExpectedBytes(so_far=Traffic.along("dp", all_reduce=num_bytes * self._times))

    def _set(self, values: Sequence[Tensor]) -> None:
        for (_, parameter), value in zip(self._named, values, strict=True):
            parameter.data.copy_(value)

    def _emit_mean(self, emit: Emit, name: str, gradient: Tensor | None) -> None:
        parameter = self._parameters[name]
        flat = parameter.new_zeros(parameter.numel() + 1, requires_grad=False)
        if gradient is not None:
            flat[:-1] = gradient.to_dense().reshape(-1)
            flat[-1] = 1
        self._group.all_reduce(flat).wait()
        emit(name, flat[:-1].div(self._group.size).view(parameter.shape) if bool(flat[-1]) else None)

    def _means(self) -> list[Tensor]:
        self._times += 1
        flats = [
            torch.cat([each.detach().reshape(-1).to(_precision(each.dtype)) for _, each in pairs])
            for pairs in self._kinds.values()
        ]
        works = [self._group.all_reduce(flat) for flat in flats]
        for work in works:
            work.wait()
        means: list[Tensor] = []
        for flat, pairs in zip(flats, self._kinds.values(), strict=True):
            flat.div_(self._group.size)
            pieces = flat.split([each.numel() for _, each in pairs])
            means += [piece.view(each.shape) for piece, (_, each) in zip(pieces, pairs, strict=True)]
        return means


def rounds_of(exchange: Exchange) -> LocalSGD | None:
    """Whose replicas take local steps; None: they do not."""
    return next(iter(parts_of(exchange, LocalSGD)), None)


def within_round(exchange: Exchange) -> LocalSGD | None:
    """The same while their parameters differ, on all ranks at the same time; else None."""
    rounds = rounds_of(exchange)
    return rounds if rounds is not None and rounds.taken else None


def _precision(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
