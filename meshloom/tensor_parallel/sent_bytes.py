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
from meshloom.program.ir.sparse_constants import strides_of
from meshloom.program.operators.collectives import Transition
from meshloom.program.operators.gathered import GatheredLayers
from meshloom.program.operators.log_softmax import LogSoftmaxOfPart
from meshloom.program.operators.partial import CrossEntropyOfPart
from meshloom.program.operators.payload import (
    Collective,
    elements_of_change,
    elements_of_gather,
    elements_of_sum,
)
from meshloom.program.operators.recurrent_shards import RecurrentOfPart
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
    metas = _metas(program)
    differentiated = _differentiated(program, metas) if program.training else frozenset[str]()
    found: list[SentCollective] = []
    for node in program.nodes:
        for backward in (False, True) if node.name in differentiated else (False,):
            for collective, num_bytes in _of_node(node, metas, rank, backward=backward):
                found.append(
                    SentCollective(
                        collective=collective, num_bytes=num_bytes, backward=backward, node=node.name
                    )
                )
    return found


def sent_at_step_end(
    part: Partition, rank: int, among: Collection[str] | None = None
) -> list[SentCollective]:
    """The sums of the gradients of shared parameters: one all-reduce per dtype, once a step, of full shape.

    among: the parameters that count; default: all.
    """
    sizes: dict[str, int] = {}
    for name in part.summed:
        if among is None or name in among:
            dtype = part.choice.layout.program.parameters[name].meta.dtype
            sizes[str(dtype)] = (
                sizes.get(str(dtype), 0) + math.prod(part.parameters[name].shape) * dtype.itemsize
            )
    return [SentCollective(collective="all_reduce", num_bytes=size, backward=True) for size in sizes.values()]


def bytes_per_step(part: Partition, *, rank: int = 0, num_chunks: int = 1) -> dict[str, int]:
    """Kind of collective -> bytes that `rank` sends along tp in one step of `num_chunks` chunks, as
    `RecordedGroup` counts them."""
    totals: dict[str, int] = {}
    chunk = sent_in_chunk(part.of(rank).program, rank)
    for each, times in [
        *((each, num_chunks) for each in chunk),
        *((each, 1) for each in sent_at_step_end(part, rank)),
    ]:
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
            rows = math.prod(meta.shape[:1] + meta.shape[2:]) * item
            yield "all_reduce", rows  # the largest logit
            yield "all_reduce", rows * target.num_sums
        return
    if isinstance(target, LogSoftmaxOfPart):
        rows = math.prod(meta.shape[: target.dim] + meta.shape[target.dim + 1 :]) * item
        for _ in range(1 if backward else 2):
            yield "all_reduce", rows
        return
    if isinstance(target, RecurrentOfPart):
        differentiated = metas[others[0].name][0].requires_grad
        for collective, count in target.sent(
            meta.shape, rank, backward=backward, states_graded=differentiated
        ):
            yield collective, count * item
        return
    change = target if isinstance(target, Transition) else target.change
    if isinstance(target, GatheredLayers) and backward:
        if change.source == "part":
            yield (
                "all_gather",
                elements_of_gather(change.before, whole(change.before.shape, change.before.num_ranks), rank)[
                    1
                ]
                * item,
            )
        if meta.requires_grad:
            collective, count = elements_of_sum(
                owned(change.before) if change.source == "part" else change.before
            )
            yield collective, count * item
        return
    found = elements_of_change(
        change.source, change.target, change.before, change.after, rank, backward=backward
    )
    if found is not None and (not backward or meta.requires_grad):
        yield found[0], found[1] * item


def _differentiated(program: Program, metas: Mapping[str, tuple[Meta, ...]]) -> frozenset[str]:
    """Nodes in the backward of the loss."""
    reached = {ref.name for ref in refs_in(program.outputs)}
    differentiated: set[str] = set()
    for node in reversed(program.nodes):
        if node.name in reached and any(meta.requires_grad for meta in node.outputs):
            differentiated.add(node.name)
            reached.update(
                ref.name for ref in node.operands() if any(meta.requires_grad for meta in metas[ref.name])
            )
    return frozenset(differentiated)


def _metas(program: Program) -> dict[str, tuple[Meta, ...]]:
    found = {
        each.value: (each.meta,)
        for each in (*program.parameters.values(), *program.buffers.values(), *program.inputs)
    }
    for name, constant in program.constants.items():
        found[name] = (
            Meta(
                shape=tuple(constant.shape),
                dtype=constant.dtype,
                stride=strides_of(constant),
                requires_grad=False,
            ),
        )
    return found | {node.name: node.outputs for node in program.nodes}
