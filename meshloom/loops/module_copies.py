"""Data parallel: every replica has a copy of the module, which runs as written on its share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.core.buffer_rules import BufferRule
from meshloom.loops.call_draws import CallDraws
from meshloom.loops.execution import Execution
from meshloom.loops.gradient_mean import GradientMean, tensors_in
from meshloom.loops.ranks import LoopRanks
from meshloom.loops.taken_shares import bind
from meshloom.replica.buffers.merged_buffers import RunningStatistics


class ModuleCopies(Execution):
    """Of `module`. rules: of its buffers (docs/contract.md)."""

    def __init__(self, module: nn.Module, ranks: LoopRanks, rules: Mapping[str, BufferRule]) -> None:
        self._module, self._ranks, self._rules = module, ranks, rules
        self._known: list[
            Any
        ] = []  # of the parameters: identities, whether they are trained, dtypes, devices
        self._mean: GradientMean | None = None
        self._before = 0  # backwards of those before
        self._statistics: RunningStatistics | None = None
        self._with_buffers: list[nn.Module] = []
        self._draws = CallDraws(ranks.replica)
        self._follow()

    def call(self, compute: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._follow()
        share = bind((args, kwargs))
        statistics = self._statistics if any(each.training for each in self._with_buffers) else None
        with self._draws.of_a_call(), statistics.chunk() if statistics else nullcontext():
            results = compute(*args, **kwargs)
        if statistics:
            statistics.finish()
        if self._mean and torch.is_grad_enabled():
            self._mean.follow(tensors_in(results), share)
        return results

    def accumulating(self) -> AbstractContextManager[None]:
        return self._mean.accumulating() if self._mean else nullcontext()

    def check_complete(self) -> None:
        if self._mean:
            self._mean.check_complete()

    def whole(self) -> AbstractContextManager[None]:
        return nullcontext()

    def tensors(self) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        for name, each in self._module.state_dict().items():
            yield name, lambda each=each: each

    def alike(self) -> Iterable[tuple[str, Tensor]]:
        return self._module.named_parameters()

    @property
    def backwards(self) -> int:
        return self._before + (self._mean.backwards if self._mean else 0)

    def take_notes(self) -> list[str]:
        return self._statistics.take_notes() if self._statistics else []

    def _follow(self) -> None:
        """Parameters may have been added, exchanged, frozen and unfrozen since the last call."""
        now = [(id(each), each.requires_grad, each.dtype, each.device) for each in self._module.parameters()]
        if now == self._known:
            return
        self._known = now
        if self._mean:
            self._before += self._mean.backwards
            self._mean.close()
        trained = {name: each for name, each in self._module.named_parameters() if each.requires_grad}
        self._mean = GradientMean(trained, self._ranks) if trained else None
        self._with_buffers = [
            each for each in self._module.modules() if any(True for _ in each.buffers(recurse=False))
        ]
        found = RunningStatistics(self._module, self._ranks.replicas, rules=self._rules)
        self._statistics = found if found.merges else None
