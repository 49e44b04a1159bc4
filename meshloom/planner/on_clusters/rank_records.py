"""What a rank's program does in a chunk, operator by operator, found on fake tensors: calls, collectives, and what is kept.

    node        linear                      attention                  linear
    forward     product                     attention                  product, all-reduce along tp
    backward    product (inputs),           attention                  product, product
                product (weights)

Of identical blocks only a few are run. Attention is what a GPU's kernels do, whatever a CPU would.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor

from meshloom.clusters.work import OperatorWork, Sent
from meshloom.program.cost.cost import Meter, SavedTensor, renamed_memory, run_metered
from meshloom.program.cost.cost_fake import fake_tensors, tensors_in
from meshloom.program.cost.cost_rules import bytes_read_and_written, flops
from meshloom.program.cost.one_rank import Unheard, alone
from meshloom.program.cost.shortened import node_by_node
from meshloom.program.ir.nodes import Meta, Node, Ref
from meshloom.program.ir.program import Program
from meshloom.tensor_parallel.layout.layout import metas_of

_ATTENTION = "scaled_dot_product_attention"
Did = OperatorWork | Sent


@dataclass(frozen=True, kw_only=True)
class NodeRecord:
    """Of one node. kept: memory that autograd keeps because of it, as in `Cost`."""

    forward: tuple[Did, ...] = ()
    backward: tuple[Did, ...] = ()
    kept: tuple[SavedTensor, ...] = ()


def records_of(program: Program, *, tp: int = 1, rank: int = 0) -> dict[str, NodeRecord]:
    """Node -> its record. program: that of `rank` among `tp` ranks, or of one device."""

    def analyse(part: Program) -> dict[str, NodeRecord]:
        return _records(part, tp, rank)

    with fake_tensors():
        return node_by_node(
            program, analyse, lambda found, names: replace(found, kept=renamed_memory(found.kept, names))
        )


def _records(program: Program, tp: int, rank: int) -> dict[str, NodeRecord]:
    attention = {index: calls for index, calls in enumerate(_attentions(program)) if calls is not None}
    forward, backward = _Recorder(attention), _Recorder(attention)

    def told(collective: Any, num_bytes: int) -> None:
        recorder = backward if backward.is_open else forward
        recorder.did[recorder.node_here()].append(Sent(collective=collective, num_bytes=num_bytes, axis="tp"))

    kept = run_metered(alone(program, Unheard(tp, rank, told)), forward, backward)
    found: dict[str, NodeRecord] = {}
    for index, node in enumerate(program.nodes):
        held = kept.get(index, ())
        there, back = forward.did[index], backward.did[index]
        if index in attention:
            held = (*_of_others(node, held), attention[index][2])
            there, back = [*there, attention[index][0]], [*back, attention[index][1]]
        found[node.name] = NodeRecord(forward=tuple(there), backward=tuple(back), kept=held)
    return found


class _Recorder(Meter):
    """did: by the index of the node. others: of what these do inside, nothing is noted."""

    def __init__(self, others: Iterable[int]) -> None:
        super().__init__()
        self.did: dict[int, list[Did]] = defaultdict(list)
        self.is_open = False
        self._others = frozenset(others)

    def __enter__(self) -> Self:
        self.is_open = True
        return super().__enter__()

    def __exit__(self, *ended: Any) -> None:
        self.is_open = False
        super().__exit__(*ended)

    def count(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], value: Any) -> None:
        if self.now in self._others:
            return
        moved = sum(bytes_read_and_written(func, args, kwargs, value))
        multiplied = flops(func, args, kwargs, value)
        if moved or multiplied:
            self.did[self.now].append(_work(func, args, value, multiplied, moved))


def _work(func: Any, args: Sequence[Any], value: Any, multiplied: int, moved: int) -> OperatorWork:
    result = next(iter(tensors_in(value)))
    dtype = str(result.dtype).removeprefix("torch.")
    if not multiplied:
        return OperatorWork(kind="other", flops=0, num_bytes=moved, dtype=dtype)
    given = [each for each in args if isinstance(each, Tensor)]
    name = func.overloadpacket.__name__
    if "convolution" in name:
        rows = result.numel() // max(result.shape[1], 1) if result.dim() > 1 else result.numel()
        columns = result.shape[1] if result.dim() > 1 else 1
        inner = multiplied // (2 * max(rows * columns, 1))
        return OperatorWork(
            kind="convolution", flops=multiplied, num_bytes=moved, dtype=dtype, sizes=(rows, columns, inner)
        )
    if name in ("mm", "bmm", "addmm", "baddbmm"):
        one, other = given[-2:]
        batch = one.shape[0] if one.dim() == 3 else 1
        sizes = (batch, one.shape[-2], other.shape[-1], one.shape[-1])
        return OperatorWork(kind="product", flops=multiplied, num_bytes=moved, dtype=dtype, sizes=sizes)
    side = max(1, round((multiplied / 2) ** (1 / 3)))  # as a cube
    return OperatorWork(
        kind="product", flops=multiplied, num_bytes=moved, dtype=dtype, sizes=(1, side, side, side)
    )


def _attentions(program: Program) -> Iterable[tuple[OperatorWork, OperatorWork, SavedTensor] | None]:
    """Of each node, forward, backward and statistics of attention; None: it is none."""
    metas = metas_of(program)
    for node in program.nodes:
        yield _attention(node, metas) if _ATTENTION in node.operator else None


def _attention(
    node: Node, metas: Mapping[str, tuple[Meta, ...]]
) -> tuple[OperatorWork, OperatorWork, SavedTensor] | None:
    """Products of blocks of scores, which are nowhere whole: two there; back, where they are computed again, five. Half of
    them where later keys count for nothing."""
    given = [meta for each in node.args[:3] if isinstance(each, Ref) for meta in metas[each.name][:1]]
    if len(given) != 3 or len(given[0].shape) < 3:
        return None
    q, k, v = given
    heads = math.prod(q.shape[:-2])
    sizes = (heads, q.shape[-2], k.shape[-2], q.shape[-1])
    is_causal = bool(node.kwargs.get("is_causal", node.args[5] if len(node.args) > 5 else False))
    product = heads * q.shape[-2] * k.shape[-2] * (q.shape[-1] + v.shape[-1]) // (2 if is_causal else 1)
    dtype = str(q.dtype).removeprefix("torch.")
    moved = sum(each.num_bytes for each in (*given, node.outputs[0]))
    there = OperatorWork(kind="attention", flops=2 * product, num_bytes=moved, dtype=dtype, sizes=sizes)
    back = replace(there, flops=5 * product, num_bytes=2 * moved)
    statistics = SavedTensor(memory=f"{node.name}:1", num_bytes=4 * heads * q.shape[-2])
    return there, back, statistics


def _of_others(node: Node, kept: Iterable[SavedTensor]) -> list[SavedTensor]:
    """Without what is made inside of it."""
    return [each for each in kept if not each.memory.startswith(f"{node.name}:")]
