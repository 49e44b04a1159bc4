"""Data parallel: every replica has a copy of the module, which runs as written on its share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.core.buffer_rules import BufferRule
from meshloom.loops.call_draws import CallDraws
from meshloom.loops.gradient_mean import AveragedExecution
from meshloom.loops.ranks import LoopRanks
from meshloom.loops.taken_shares import bind
from meshloom.loops.written_calls import WrittenCalls


class ModuleCopies(AveragedExecution):
    """Of `module`. rules: of its buffers (docs/contract.md)."""

    def __init__(self, module: nn.Module, ranks: LoopRanks, rules: Mapping[str, BufferRule]) -> None:
        super().__init__(ranks)
        self._module, self._group, self._rules = module, ranks.replicas, rules
        self._joined = ranks.joined
        self._draws = CallDraws(ranks.replica)
        self._calls: WrittenCalls
        self.refresh()

    def call(
        self, compute: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], method: str = "forward"
    ) -> Any:  # fmt: skip
        self.refresh()
        share = bind((args, kwargs))
        with self.mean.within(share):
            results = self._calls.call(compute, args, kwargs)
        self.refresh()
        if torch.is_grad_enabled():
            self.mean.follow(results, share)
        return results

    def whole(self) -> AbstractContextManager[None]:
        return nullcontext()

    def tensors(self) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        for name, each in self._module.state_dict().items():
            yield name, lambda each=each: each

    def alike(self) -> Iterable[tuple[str, Tensor]]:
        return self._module.named_parameters()

    def take_notes(self) -> list[str]:
        return self._calls.take_notes()

    def refresh(self) -> None:
        if self.follow(self._module.named_parameters()):
            self._calls = WrittenCalls(self._module, self._group, self._rules, self._draws, self._joined)
