"""Bugs of collectives: of every group that ranks talk over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import meshloom.comm.simulated as simulated
from meshloom.comm.simulated import SimulatedGroup
from tests.planted.bugs import Patch, bug, wrap

ONE = "dp=2,microbatches=2,zero=1"


def _reduced(patch: Patch, change: Callable[[Tensor, Any, str], Tensor]) -> None:
    """Changes sums of floating-point tensors of more than a few elements: what is agreed on stays."""

    def changed(right: Any, tensors: Any, op: str) -> Tensor:
        total = right(tensors, op)
        return change(total, tensors, op) if total.is_floating_point() and total.numel() > 8 else total

    wrap(patch, simulated, "_reduce", changed)


@bug(causes="not_reduced|missing_chunk", module=None)
def a_sum_is_what_the_first_rank_has(patch: Patch) -> None:
    _reduced(patch, lambda total, tensors, op: tensors[0].clone())


@bug(causes="not_reduced", module=None)
def a_sum_is_the_largest(patch: Patch) -> None:
    _reduced(patch, lambda total, tensors, op: torch.stack(list(tensors)).amax(0))


@bug(causes="scale", module=None)
def a_sum_is_a_mean(patch: Patch) -> None:
    _reduced(patch, lambda total, tensors, op: total / len(tensors))


@bug(causes="border|unknown|not_reduced|missing_chunk", module=None)
def the_tail_of_a_sum_is_the_first_ranks(patch: Patch) -> None:
    def tail(total: Tensor, tensors: Any, op: str) -> Tensor:
        total.view(-1)[-60:-3] = tensors[0].view(-1)[-60:-3]
        return total

    _reduced(patch, tail)


@bug(causes="rounding", module=None)
def sums_are_rounded_on_the_way(patch: Patch) -> None:
    _reduced(patch, lambda total, tensors, op: total.bfloat16().to(total.dtype))


@bug(causes="unknown|exchanged|border|optimizer", plan=ONE, module=None)
def slices_of_a_sum_go_to_the_wrong_rank(patch: Patch) -> None:
    def turned(total: Tensor, tensors: Any, op: str) -> Tensor:
        half = total.numel() // 2
        return torch.cat([total.view(-1)[half:], total.view(-1)[:half]])

    _reduced(patch, turned)


@bug(causes="exchanged", plan=ONE, module=None)
def gathered_values_come_in_the_wrong_order(patch: Patch) -> None:
    def turned(right: Any, self: SimulatedGroup, output: Tensor, tensor: Tensor) -> Any:
        work = right(self, output, tensor)
        if not tensor.is_floating_point() or tensor.numel() < 9:
            return work
        wait = work.wait

        def waited() -> None:
            wait()
            rows = output.view(self.size, -1)
            rows.copy_(rows.flip(0).clone())

        work.wait = waited  # type: ignore[method-assign]
        return work

    wrap(patch, SimulatedGroup, "all_gather", turned)


@bug(plan="pp=2,microbatches=3", causes="initial_values|stages|unknown|rounding", module=None)
def messages_lose_their_last_element(patch: Patch) -> None:
    def shorter(right: Any, self: SimulatedGroup, tensor: Tensor, destination: int) -> Any:
        if tensor.is_floating_point() and tensor.numel() > 8:
            tensor = tensor.clone()
            tensor[-1] = 0
        return right(self, tensor, destination)

    wrap(patch, SimulatedGroup, "send", shorter)


@bug(plan="pp=2,microbatches=3", causes="initial_values|stages|unknown|rounding", module=None)
def messages_are_rounded(patch: Patch) -> None:
    def rounded(right: Any, self: SimulatedGroup, tensor: Tensor, destination: int) -> Any:
        low = tensor.bfloat16().to(tensor.dtype) if tensor.is_floating_point() else tensor
        return right(self, low, destination)

    wrap(patch, SimulatedGroup, "send", rounded)
