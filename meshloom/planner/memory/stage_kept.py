"""What autograd saves of one rank's part of a stage from forward to backward, by shapes alone.

The forward is run on fake tensors with all that a rank's part has in it: gathered inputs that are not kept,
partial sums that are reduced, draws of a shard. Nothing is sent to other ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from meshloom.core.modules.casts import FrozenCasts, cast_of
from meshloom.pipeline.stages.stages import Stage
from meshloom.program.cost.cost_fake import (
    fake_buffers,
    fake_inputs,
    fake_parameters,
    fake_tensors,
    leaves,
    run_nodes,
)
from meshloom.program.cost.one_rank import Unheard, alone
from meshloom.program.cost.shortened import node_by_node
from meshloom.program.ir.program import Program
from meshloom.program.ir.sparse_constants import memory_of, storage_of


def kept_bytes_of(stage: Stage, num_ranks: int, rank: int = 0, *, in_units: bool = False) -> int:
    """Of a microbatch, each memory once: what backward needs, and what came from other stages. rank: whose program the stage is of,
    among `num_ranks` along tp. in_units: parameters are there for a unit at a time (zero=3), and so are their casts.

    Parameters, buffers, constants and the batch are there anyway. Where data decides how many rows a rank
    has, they are as many on all.
    """
    received = {each.value for each in stage.incoming}
    with fake_tensors():
        kept = node_by_node(
            _of_what_is_used(stage.program),
            lambda program: _kept_bytes(
                alone(program, Unheard(num_ranks, rank)), received, in_units=in_units
            ),
        )
        inputs = zip(stage.program.inputs, fake_inputs(stage.program), strict=True)
        return sum(kept.values()) + sum(
            int(storage_of(tensor).nbytes()) for each, tensor in inputs if each.value in received
        )


def _of_what_is_used(program: Program) -> Program:
    """Without the parameters of other stages."""
    used = {ref.name for node in program.nodes for ref in node.operands()}
    return replace(
        program, parameters={name: each for name, each in program.parameters.items() if each.value in used}
    )


def _kept_bytes(program: Program, received: Collection[str], *, in_units: bool) -> dict[str, int]:
    """Node -> bytes that autograd saves first for it."""
    inputs = fake_inputs(program)
    values: dict[str, Any] = dict(leaves(program, fake_parameters(program), fake_buffers(program), inputs))
    for each, tensor in zip(program.inputs, inputs, strict=True):
        tensor.requires_grad_(each.meta.requires_grad)
    counted = {memory_of(tensor) for tensor in values.values()}
    saved: list[tuple[int, weakref.ref[_Saved]]] = []
    number = 0  # of the node that runs

    parameters = {id(values[each.value]) for each in program.parameters.values()} if in_units else ()
    frozen = FrozenCasts()

    def pack(tensor: Tensor) -> _Saved:
        held = _Saved(tensor)
        trained = cast_of(tensor)
        if id(frozen.cast_of(tensor) if trained is None else trained) not in parameters:
            saved.append((number, weakref.ref(held)))
        return held

    with (
        saved_tensors_hooks(pack, lambda held: held.tensor),
        frozen.watching() if in_units else nullcontext(),
    ):
        for _ in run_nodes(program, values, keep=False):
            number += 1
    kept = dict.fromkeys((node.name for node in program.nodes), 0)
    for number, each in saved:
        held = each()
        if held is not None and (memory := memory_of(held.tensor)) not in counted:
            counted.add(memory)
            kept[program.nodes[number].name] += int(storage_of(held.tensor).nbytes())
    return kept


class _Saved:
    """A tensor that autograd saved; it lives as long as autograd references it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
