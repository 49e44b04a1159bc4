"""The mean of gradients over replicas, of backwards that the script starts.

    backward reaches a parameter      -> what it has is laid aside, so that its gradient is of this backward alone
    its gradient is complete          -> into its bucket, which is summed over replicas when it is full
    backward has ended                -> sums divided by the number of replicas, added to what was laid aside

A share's gradient counts by the samples of the share that the module was called with, where gradients are summed: what else is
in the loss, like a penalty on parameters, is the same on all replicas and stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from meshloom.comm.windows import windows_of
from meshloom.core.errors import TrainingError
from meshloom.core.step_shape import StepShape
from meshloom.exchange.exchange import Exchange, Ready
from meshloom.exchange.registry import Setup
from meshloom.loops.execution import Execution
from meshloom.loops.part_tensor import AsPlain
from meshloom.loops.ranks import LoopRanks
from meshloom.loops.taken_shares import TakenShare, newest, tensors_in

F = TypeVar("F", bound=Callable[..., Any])


def as_plain(method: F) -> F:
    """The method, in a context in which parts are plain tensors."""

    @wraps(method)
    def plainly(*args: Any, **kwargs: Any) -> Any:
        with AsPlain():
            return method(*args, **kwargs)

    return cast(F, plainly)


def refuse_graph_of_means() -> None:
    """Raises `TrainingError` within a backward that is recorded."""
    if torch.is_grad_enabled():
        raise TrainingError(
            "A gradient of parameters that is taken with create_graph=True is a mean over replicas, which has no second derivative. Gradients of inputs have "
            "one: torch.autograd.grad(loss, inputs, create_graph=True)."
        )


_ONE_BACKWARD = StepShape(chunks=1)


class GradientMean:
    """Along dp. backwards: that were exchanged. running: a call, which may have backwards within. Parts of parameters are plain tensors here."""

    def __init__(self, ranks: LoopRanks) -> None:
        self._ranks, self.backwards = ranks, 0
        self._named: Mapping[str, nn.Parameter] = {}
        self._exchange: Exchange
        self._hooks: list[RemovableHandle] = []
        self._runs = False  # a backward
        self._weight: float | None = None  # of the calls that it goes through; None: of none yet
        self.running, self._share = False, cast("TakenShare | None", None)  # a call, and its share
        self._aside: dict[str, Tensor] = {}
        self._given: dict[str, Tensor] = {}  # gradients of this backward, whose memory is the parameters' own
        self._accumulates, self._is_local = False, False

    @as_plain
    def open(self, named: Mapping[str, nn.Parameter], *, replicated: Sequence[str] = ()) -> None:
        """From now on of `named`, the trainable parameters that this rank holds. replicated: names of those that other ranks of the replica
        hold, too."""
        for each in self._hooks:
            each.remove()
        self._named, self._hooks = named, []
        if not named:
            return
        plan = replace(self._ranks.plan, zero=0, microbatches=1, pp=1, tp=1)
        group, is_cpu = self._ranks.replicas, self._ranks.device.type == "cpu"
        self._exchange = Setup(
            plan=plan, named=list(named.items()), group=group, replicated=replicated, windows=windows_of(group) if is_cpu else None
        ).open()  # fmt: skip
        for name, parameter in named.items():
            complete = partial(self._complete, name, self._exchange.hook(parameter))
            self._hooks += [
                parameter.register_hook(self._reached),
                parameter.register_post_accumulate_grad_hook(complete),
            ]

    def follow(self, results: Any, share: TakenShare | None) -> None:
        """A backward that comes to these results of a call goes through it: its gradients count as `share` does."""
        if not self._named:
            return
        if self._runs:  # the backward before has failed
            self._leave()
        weight = share.weight if share else 1.0
        for each in tensors_in(results):
            if each.requires_grad and not each.is_leaf:
                each.register_hook(partial(self._through, weight))

    @property
    def names(self) -> Set[str]:
        """Of the parameters."""
        return self._named.keys()

    @contextmanager
    def within(self, share: TakenShare | None) -> Iterator[None]:
        """A context for a call with this share, whose own backwards count as the share does."""
        self._share, self.running = share, True
        try:
            yield
        finally:
            self._share, self.running = None, False

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
            share = self._share or newest()  # the backward goes through no call of the module that has ended
            self._weight = share.weight if share else 1.0
        return None if self._weight == 1.0 else gradient * self._weight

    @as_plain
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
    def _complete(self, name: str, ready: Ready | None, parameter: nn.Parameter) -> None:
        refuse_graph_of_means()
        if self._accumulates:
            self._is_local = True
            return
        if not self._given:
            self._begin_exchange()
        if parameter.grad is not None:
            self._given[name] = parameter.grad
            if ready:
                with torch.no_grad():
                    ready(parameter)

    def _begin_exchange(self) -> None:
        """Of this backward, with what backwards before it have left to it."""
        before = {name: each.grad for name, each in self._named.items() if each.grad is not None}
        self._exchange.begin(_ONE_BACKWARD)
        for name, gradient in before.items():
            self._named[name].grad = gradient

    @as_plain
    @torch.no_grad()
    def _end(self) -> None:
        """After the backward."""
        if self._given:
            self._average()
            self.backwards += 1
            self._is_local, self._aside = False, {}
        self._leave()

    def _average(self) -> None:
        for name, parameter in self._named.items():  # of the backwards before alone
            if parameter.grad is not None:
                self._given[name] = parameter.grad
        self._exchange.end_chunk()
        means = self._exchange.finish(float(self._ranks.plan.dp))
        for (name, parameter), mean in zip(self._named.items(), means, strict=True):
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

    @as_plain
    def _leave(self) -> None:
        """The backward; what gradients of this replica alone wait with stays aside."""
        if not self._is_local:
            for name, gradient in self._aside.items():
                self._named[name].grad = gradient
            self._aside = {}
        self._runs, self._weight, self._given = False, None, {}


class AveragedExecution(Execution):
    """One whose gradients a `GradientMean` averages over replicas."""

    def __init__(self, ranks: LoopRanks) -> None:
        self.mean = GradientMean(ranks)
        self._known: list[Any] = []  # what is known of the parameters

    def follow(self, named: Iterable[tuple[str, nn.Parameter]]) -> bool:
        """Average gradients of those that are trained. Parameters may have been added, exchanged, moved, frozen and unfrozen since the last call:
        whether they have."""
        found = [*named]
        trained = {name for name, each in found if each.requires_grad}
        if self.mean.running and trained <= self.mean.names <= dict(found).keys():
            return False  # gradients of what is frozen are waited for until the backward ends, and no longer
        now = [(id(each), each.requires_grad, each.dtype, each.device) for _, each in found]
        if now == self._known:
            return False
        self._known = now
        self.mean.open({name: each for name, each in found if each.requires_grad})
        return True

    def accumulating(self) -> AbstractContextManager[None]:
        return self.mean.accumulating()

    def check_complete(self) -> None:
        self.mean.check_complete()

    @property
    def backwards(self) -> int:
        return self.mean.backwards
