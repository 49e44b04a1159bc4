"""The communication of a divided program: every collective that a rank starts in a step, with the bytes that
it sends.

Derived from the operators in `collectives.py`, `linears.py` and `partial.py` as they run: shards of unequal
size are padded to the largest, an all-to-all sends exact sizes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from meshloom.comm.pieces import owned, whole
from meshloom.program.ir.nodes import Meta, Node, refs_in
from meshloom.program.ir.program import Program
from meshloom.program.operators.collectives import (
    Collective,
    Transition,
    elements_of_change,
    elements_of_gather,
    elements_of_sum,
)
from meshloom.program.operators.gathered import GatheredLayers
from meshloom.program.operators.log_softmax import LogSoftmaxOfPart
from meshloom.program.operators.partial import CrossEntropyOfPart
from meshloom.program.operators.recurrent_shards import RecurrentOfPart
from meshloom.tensor_parallel.layout.layout import metas_of
from meshloom.tensor_parallel.partition import Partition


@dataclass(frozen=True, kw_only=True)
class SentCollective:
    """One collective. num_bytes: passed in by the rank. node: the operator that starts it; '' for the sum
    of gradients at the end of a step."""

    collective: Collective
    num_bytes: int
    backward: bool = False
    node: str = ""


def sent_in_chunk(program: Program, rank: int) -> list[SentCollective]:
    """Every collective that a rank's program starts for a chunk, in program order."""
    metas = metas_of(program)
    differentiated = _differentiated(program, metas) if program.training else frozenset[str]()
    return [
        SentCollective(collective=collective, num_bytes=num_bytes, backward=backward, node=node.name)
        for node in program.nodes
        for backward in ((False, True) if node.name in differentiated else (False,))
        for collective, num_bytes in _of_node(node, metas, rank, backward=backward)
    ]


def sent_at_step_end(part: Partition, among: Collection[str] | None = None) -> list[SentCollective]:
    """The sums of the gradients of shared parameters: one all-reduce per dtype, once a step, of full shape.

    among: the parameters that count; default: all.
    """
    sizes: dict[str, int] = {}
    for name in part.summed:
        if among is None or name in among:
            dtype = part.choice.layout.program.parameters[name].meta.dtype
            num_bytes = math.prod(part.parameters[name].shape) * dtype.itemsize
            sizes[str(dtype)] = sizes.get(str(dtype), 0) + num_bytes
    return [SentCollective(collective="all_reduce", num_bytes=size, backward=True) for size in sizes.values()]


def bytes_per_step(part: Partition, *, rank: int = 0, num_chunks: int = 1) -> dict[str, int]:
    """Kind of collective -> bytes that `rank` sends along tp in one step of `num_chunks` chunks, as
    `RecordedGroup` counts them."""
    totals: dict[str, int] = {}
    chunk = sent_in_chunk(part.of(rank).program, rank)
    for all_sent, times in ((chunk, num_chunks), (sent_at_step_end(part), 1)):
        for each in all_sent:
            totals[each.collective] = totals.get(each.collective, 0) + each.num_bytes * times
    return totals


_COMMUNICATING = (Transition, GatheredLayers, CrossEntropyOfPart, LogSoftmaxOfPart, RecurrentOfPart)


def _of_node(
    node: Node, metas: Mapping[str, tuple[Meta, ...]], rank: int, *, backward: bool
) -> Iterator[tuple[Collective, int]]:
    target = node.target
    if not isinstance(target, _COMMUNICATING):
        return
    given, *others = node.operands()
    meta = metas[given.name][0]
    item = meta.dtype.itemsize
    if isinstance(target, CrossEntropyOfPart):
        if not backward:
            rows = math.prod(meta.shape[:1] + meta.shape[2:]) * node.outputs[0].dtype.itemsize
            yield "all_reduce", rows  # the largest logit
            yield "all_reduce", rows * target.num_sums
        return
    if isinstance(target, LogSoftmaxOfPart):
        rows = math.prod(meta.shape[: target.dim] + meta.shape[target.dim + 1 :]) * item
        for _ in range(1 if backward else 2):
            yield "all_reduce", rows
        return
    if isinstance(target, RecurrentOfPart):
        graded = metas[others[0].name][0].requires_grad
        for collective, count in target.sent(meta.shape, rank, backward=backward, states_graded=graded):
            yield collective, count * item
        return
    change = target if isinstance(target, Transition) else target.change
    before, after = change.before, change.after
    if isinstance(target, GatheredLayers) and backward:
        if change.source == "part":
            _, count = elements_of_gather(before, whole(before.shape, before.num_ranks), rank)
            yield "all_gather", count * item
        if meta.requires_grad:
            collective, count = elements_of_sum(owned(before) if change.source == "part" else before)
            yield collective, count * item
        return
    found = elements_of_change(change.source, change.target, before, after, rank, backward=backward)
    if found is not None and (not backward or meta.requires_grad):
        yield found[0], found[1] * item


def _differentiated(program: Program, metas: Mapping[str, tuple[Meta, ...]]) -> frozenset[str]:
    """Nodes in the backward of the loss."""
    reached = {ref.name for ref in refs_in(program.outputs)}
    differentiated: set[str] = set()
    for node in reversed(program.nodes):
        if node.name in reached and any(meta.requires_grad for meta in node.outputs):
            differentiated.add(node.name)
            operands = (ref.name for ref in node.operands())
            reached.update(name for name in operands if any(meta.requires_grad for meta in metas[name]))
    return frozenset(differentiated)
