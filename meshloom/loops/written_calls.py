"""Calls of a module that runs as written on each replica's share: its draws, and its buffers, which are merged over replicas."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import nn

from meshloom.comm.group import Group
from meshloom.core.buffer_rules import BufferRule
from meshloom.loops.call_draws import CallDraws
from meshloom.loops.taken_shares import is_alike, rows_weight
from meshloom.replica.buffers.batch_norm import join_batch_norm
from meshloom.replica.buffers.merged_buffers import RunningStatistics


class WrittenCalls:
    """Of `module`. group: the replicas. rules: of its buffers (docs/contract.md). joined: the replicas, where batch norm layers take their statistics over
    all shares together."""

    def __init__(
        self, module: nn.Module, group: Group, rules: Mapping[str, BufferRule], draws: CallDraws, joined: Group | None
    ) -> None:  # fmt: skip
        self._draws, self._group = draws, group
        self._statistics = RunningStatistics(module, group, rules=rules, synchronised=joined is not None)
        if joined:
            join_batch_norm(module, joined, partial(rows_weight, joined))
        has_buffers = (each for each in module.modules() if any(True for _ in each.buffers(recurse=False)))
        self._merged = list(has_buffers) if self._statistics.merges else []

    def call(self, compute: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The results."""
        merges = any(each.training for each in self._merged)
        with self._draws.of_a_call(), self._statistics.chunk() if merges else nullcontext():
            results = compute(*args, **kwargs)
        if merges:
            self._statistics.finish(alike=is_alike(self._group, (args, kwargs)))
        return results

    def of_a_copy(self) -> WrittenCalls:
        """Of a copy of the module, such as an average, whose buffers are its author's."""
        copied = copy.copy(self)
        copied._merged = []
        return copied

    def take_notes(self) -> list[str]:
        """For the user, each once."""
        return self._statistics.take_notes()
