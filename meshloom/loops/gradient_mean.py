"""The mean of gradients over replicas, of backwards that the script starts.

    backward reaches a parameter      -> what it has is laid aside, so that its gradient is of this backward alone
    its gradient is complete          -> into its bucket, which is summed over replicas when it is full
    backward has ended                -> sums divided by the number of replicas, added to what was laid aside

A share's gradient counts by the samples of the share that the module was called with, where gradients are summed: what else is
in the loss, like a penalty on parameters, is the same on all replicas and stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from meshloom.comm.windows import windows_of
from meshloom.core.errors import TrainingError
from meshloom.core.step_shape import StepShape
from meshloom.exchange.exchange import Exchange
from meshloom.exchange.registry import Setup
from meshloom.loops.part_tensor import AsPlain
from meshloom.loops.ranks import LoopRanks
from meshloom.loops.taken_shares import TakenShare, newest

F = TypeVar("F", bound=Callable[..., Any])


def as_plain(method: F) -> F:
    """The method, in a context in which parts are plain tensors."""

    @wraps(method)
    def plainly(*args: Any, **kwargs: Any) -> Any:
        with AsPlain():
            return method(*args, **kwargs)

    return cast(F, plainly)


_ONE_BACKWARD = StepShape(chunks=1)


class GradientMean:
    """Of `named`, the trainable parameters that this rank holds, along dp. replicated: names of those that other ranks of the replica
    hold, too.

    Parts of parameters are plain tensors here.
    """

    @as_plain
    def __init__(
        self, named: Mapping[str, nn.Parameter], ranks: LoopRanks, *, replicated: tuple[str, ...] = ()
    ) -> None:
        self._named, self._size = named, ranks.plan.dp
        plan = replace(ranks.plan, zero=0, microbatches=1, pp=1, tp=1)
        windows = windows_of(ranks.replicas) if ranks.device.type == "cpu" else None
        self._exchange: Exchange = Setup(
            plan=plan, named=list(named.items()), group=ranks.replicas, replicated=replicated, windows=windows
        ).open()
        self.backwards = 0  # that were exchanged
        self._runs = False  # a backward
        self._weight: float | None = None  # of the calls that it goes through; None: of none yet
        self._aside: dict[str, Tensor] = {}
        self._given: dict[str, Tensor] = {}  # gradients of this backward, whose memory is the parameters' own
        self._accumulates, self._is_local = False, False
        self._hooks: list[RemovableHandle] = []
        for name, parameter in named.items():
            ready = self._exchange.hook(parameter)
            self._hooks.append(parameter.register_hook(self._reached))
            complete = partial(self._complete, name, ready)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(complete))

    def follow(self, results: list[Tensor], share: TakenShare | None) -> None:
        """A backward that comes to these results of a call goes through it: its gradients count as `share` does."""
        if self._runs:  # the backward before has failed
            self._put_back()
        weight = share.weight if share else 1.0
        for each in results:
            if each.requires_grad and not each.is_leaf:
                each.register_hook(partial(self._through, weight))

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backwards within are of this replica alone; the first one after it sends the sum."""
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    @as_plain
    def check_complete(self) -> None:
        """Before an update. Raises `TrainingError` where gradients are a replica's own."""
        if self._is_local and any(each.grad is not None for each in self._named.values()):
            raise TrainingError(
                "The optimizer steps with gradients of this replica alone: every backward since the last step was within "
                "ml.accumulate(model). Leave the last one before the step outside."
            )

    @as_plain
    def close(self) -> None:
        for each in self._hooks:
            each.remove()

    def _through(self, weight: float, gradient: Tensor) -> None:
        self._begin()
        if self._weight not in (None, weight):
            raise TrainingError(
                f"One backward goes through calls of the module with shares of different sizes, which count {self._weight:.4g} and {weight:.4g} of an even "
                "share: their gradients cannot be told apart. Call backward() for each of them."
            )
        self._weight = weight

    @as_plain
    def _reached(self, gradient: Tensor | None) -> Tensor | None:
        """Before a parameter's gradient is added to what it has. None: a function of several parameters has none for this one."""
        if gradient is None:
            return None
        self._begin()
        if self._weight is None:
            share = newest()  # the backward goes through no call of the module
            self._weight = share.weight if share else 1.0
        return None if self._weight == 1.0 else gradient * self._weight

    def _begin(self) -> None:
        """With the first that a backward reaches."""
        if self._runs:
            return
        self._runs = True
        if self._is_local and all(each.grad is None for each in self._named.values()):
            self._is_local, self._aside = False, {}  # the script has let go of them
        torch.autograd.Variable._execution_engine.queue_callback(self._end)  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
        if not self._is_local:
            self._aside = {name: each.grad for name, each in self._named.items() if each.grad is not None}
        if self._aside:
            for each in self._named.values():
                each.grad = None

    @as_plain
    def _complete(
        self, name: str, ready: Callable[[nn.Parameter], None] | None, parameter: nn.Parameter
    ) -> None:
        if self._accumulates:
            self._is_local = True
            return
        if not self._given:
            self._open()
        if parameter.grad is not None:
            self._given[name] = parameter.grad
            if ready:
                with torch.no_grad():
                    ready(parameter)

    def _open(self) -> None:
        """The exchange of this backward, with what backwards before it have left to it."""
        before = {name: each.grad for name, each in self._named.items() if each.grad is not None}
        self._exchange.begin(_ONE_BACKWARD)
        for name, gradient in before.items():
            self._named[name].grad = gradient
        self._exchange.begin_chunk()

    @as_plain
    @torch.no_grad()
    def _end(self) -> None:
        """After the backward."""
        if not self._given:  # gradients of something else, or of this replica alone
            self._put_back(keeps_local=self._is_local)
            return
        for name, parameter in self._named.items():  # of the backwards before alone
            if parameter.grad is not None:
                self._given[name] = parameter.grad
        self._exchange.end_chunk()
        sums = self._exchange.finish(float(self._size))
        for (name, parameter), mean in zip(self._named.items(), self._in_order(sums), strict=True):
            own, aside = self._given.get(name), self._aside.get(name)
            if mean is None:
                parameter.grad = aside
                continue
            found = mean.view_as(parameter)
            if aside is not None:
                parameter.grad = aside.add_(found)
            elif own is not None and own.layout == torch.strided and not own.requires_grad:
                parameter.grad = own.copy_(found)
            else:
                parameter.grad = found.clone()
        self.backwards += 1
        self._is_local = False
        self._reset()

    def _in_order(self, sums: list[Tensor | None]) -> list[Tensor | None]:
        by_name = {each.name: found for each, found in zip(self._exchange.ownership.owned, sums, strict=True)}
        return [by_name[name] for name in self._named]

    def _put_back(self, *, keeps_local: bool = False) -> None:
        if not keeps_local:
            for name, gradient in self._aside.items():
                self._named[name].grad = gradient
            self._aside = {}
        self._reset(aside=not keeps_local)

    def _reset(self, *, aside: bool = True) -> None:
        self._runs, self._weight, self._given = False, None, {}
        if aside:
            self._aside = {}


def tensors_in(results: Any) -> list[Tensor]:
    """The tensors of a module's results."""
    return [each for each in tree_leaves(results) if isinstance(each, Tensor)]
