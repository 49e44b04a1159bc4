"""Costs of every operator of a program: work, bytes moved, and tensors saved for the backward.

The program's step runs once on fake tensors, forward and backward, and each ATen call is counted. A call in
the backward belongs to the node whose forward recorded it, which autograd's sequence numbers tell:

    node        gelu     linear   sum          autograd nodes created: numbers [7, 8), [8, 10), [10, 11)
    backward    ... <--- 9, 8 <-- 10           a call under autograd node 9 belongs to `linear`

Of identical blocks a few are run (`shortened.py`).
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from meshloom.program.cost.cost_fake import (
    Calls,
    fake_buffers,
    fake_inputs,
    fake_parameters,
    fake_tensors,
    leaves,
    loss_of,
    next_number,
    number_here,
    run_backward,
    run_nodes,
    tensors_in,
)
from meshloom.program.cost.cost_rules import bytes_read_and_written, flops
from meshloom.program.cost.shortened import node_by_node
from meshloom.program.ir.program import Program
from meshloom.program.ir.sparse_constants import memory_of, storage_of


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """Memory that autograd keeps from forward to backward.

    memory: the value that owns it: a parameter, buffer, input, constant or node, by the name of the value;
        `NODE:n` for further tensors of a node and for those created inside it (a norm's statistics,
        attention's log-sum-exp). A view's memory is its owner's.
    num_bytes: all of that memory, also if a view covers a part of it.
    """

    memory: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of one node in a step.

    flops, backward_flops: by the formulas of `torch.utils.flop_counter`: matrix products, convolutions and
        attention, two operations per multiply-add; elementwise operators are 0. Recomputation does not count:
        checkpointed blocks are captured as what they compute.
    read_bytes, written_bytes: of all operands and results of its ATen calls in the forward, each element
        once; views are 0.
    backward_read_bytes, backward_written_bytes: of its backward, including the sums of gradients.
    kept: memory that autograd keeps because of it. Memory that two nodes keep is listed at both.
    """

    flops: int = 0
    backward_flops: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    backward_read_bytes: int = 0
    backward_written_bytes: int = 0
    kept: tuple[SavedTensor, ...] = ()


def costs(program: Program) -> dict[str, Cost]:
    """Node name -> its cost, in the program's order. Allocates no tensors: the program may be of any size."""
    with fake_tensors():
        return node_by_node(
            program, _costs, lambda cost, names: replace(cost, kept=renamed_memory(cost.kept, names))
        )


def _costs(program: Program) -> dict[str, Cost]:
    forward, backward = _Meter(), _Meter()
    kept = run_metered(program, forward, backward)
    return {
        node.name: Cost(
            flops=forward.flops[index],
            backward_flops=backward.flops[index],
            read_bytes=forward.read[index],
            written_bytes=forward.written[index],
            backward_read_bytes=backward.read[index],
            backward_written_bytes=backward.written[index],
            kept=kept.get(index, ()),
        )
        for index, node in enumerate(program.nodes)
    }


def renamed_memory(kept: Iterable[SavedTensor], names: Mapping[str, str]) -> tuple[SavedTensor, ...]:
    """Of the counterpart of a node in another block. names: value -> its counterpart there."""

    def moved(each: SavedTensor) -> SavedTensor:
        value, colon, number = each.memory.partition(":")
        return replace(each, memory=names.get(value, value) + colon + number)

    return tuple(map(moved, kept))


class Meter(Calls):
    """Is told of the index of each call's node, too. now: of the node whose call this is, as far as is known."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.here: Callable[[], int | None] = lambda: None

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], value: Any) -> None:
        self.now = self.node_here()
        self.count(func, args, kwargs, value)

    def node_here(self) -> int:
        """The index of the node that runs; else that of the last one."""
        here = self.here()
        return self.now if here is None else here

    @abstractmethod
    def count(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], value: Any) -> None:
        """A call of the node `now`."""


def run_metered(program: Program, forward: Meter, backward: Meter) -> dict[int, tuple[SavedTensor, ...]]:
    """Runs the step once under the two meters, inside `fake_tensors`; what autograd keeps, by the index of the node."""
    values: dict[str, Any] = dict(
        leaves(program, fake_parameters(program), fake_buffers(program), fake_inputs(program))
    )
    owners: dict[int, str] = {}  # memory -> its name
    for name, tensor in values.items():
        owners.setdefault(memory_of(tensor), name)
    firsts = [next_number()]  # the first sequence number of each node's autograd nodes
    saved: list[weakref.ref[_Saved]] = []

    def pack(tensor: Tensor) -> _Saved:
        held = _Saved(len(firsts) - 1, tensor)
        saved.append(weakref.ref(held))
        return held

    def node_here() -> int | None:
        number = number_here()
        return None if number is None else bisect_right(firsts, number) - 1

    forward.here, backward.here = lambda: len(firsts) - 1, node_here
    with forward, saved_tensors_hooks(pack, lambda held: held.tensor):
        for node in run_nodes(program, values, keep=True):
            firsts.append(next_number())
            for number, tensor in enumerate(tensors_in(values[node.name])):
                owners.setdefault(memory_of(tensor), f"{node.name}:{number}" if number else node.name)
            tensor = None
        loss = loss_of(program, values)
    values.clear()  # also frees what autograd saved for values on which the loss does not depend
    kept = _kept(program, (held for each in saved if (held := each()) is not None), owners)
    with backward:
        run_backward(loss)
    return {
        index: tuple(SavedTensor(memory=name, num_bytes=size) for name, size in found.items())
        for index, found in kept.items()
    }


@dataclass(eq=False)
class _Saved:
    """A tensor that autograd saved while node `index` ran; it lives as long as autograd references it."""

    index: int
    tensor: Tensor


class _Meter(Meter):
    """Adds up costs by index of the node."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.read, self.written = (defaultdict[int, int](int) for _ in range(3))

    def count(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], value: Any) -> None:
        self.flops[self.now] += flops(func, args, kwargs, value)
        read, written = bytes_read_and_written(func, args, kwargs, value)
        self.read[self.now] += read
        self.written[self.now] += written


def _kept(program: Program, saved: Iterable[_Saved], owners: dict[int, str]) -> dict[int, dict[str, int]]:
    """Index of the node -> memory -> bytes. Memory without an owner is named after its first saver."""
    kept: dict[int, dict[str, int]] = defaultdict(dict)
    inside: dict[int, int] = defaultdict(int)
    for each in saved:
        memory = memory_of(each.tensor)
        if memory not in owners:
            node = program.nodes[each.index]
            inside[each.index] += 1
            owners[memory] = f"{node.name}:{max(len(node.outputs), 1) - 1 + inside[each.index]}"
        kept[each.index][owners[memory]] = storage_of(each.tensor).nbytes()
    return kept
