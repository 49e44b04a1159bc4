"""A loss that cannot be read, as a program of one operator: to describe it and to price it, not to run it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten

from meshloom.core.job import Job
from meshloom.core.moments.branches import branches_as_written
from meshloom.core.moments.current_step import at_step
from meshloom.core.random import preserved_draws
from meshloom.program.capture.opaque_runs import WorkMeter, is_plain, kept_by_autograd
from meshloom.program.ir.contexts import Context
from meshloom.program.ir.leaves import leaves_of
from meshloom.program.ir.nodes import Input, Meta, Node, Ref, Variable, contiguous_strides
from meshloom.program.ir.program import Program
from meshloom.program.opaque.call import OpaqueCall, OpaqueCost, state_of
from meshloom.program.opaque.loss_code import METHOD, WHOLE
from meshloom.program.opaque.operator import OPAQUE
from meshloom.program.trace.precision import build_model


def whole_program(job: Job, batch: Any) -> Program:
    """The training loss of a batch. Its work, and what autograd keeps, are counted while it runs once, forward and backward; errors of the job's
    code are raised."""
    with preserved_draws(), at_step(0), branches_as_written():
        model = build_model(job, None, training=True, beside=batch)
        leaves = leaves_of(batch)
        inputs = {name: each for name, each in leaves.tensors.items() if is_plain(each)}
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        forward, backward = WorkMeter(), WorkMeter()
        with saved_tensors_hooks(pack, lambda each: each), forward:
            returned = job.loss(model, batch)
        names, state = state_of(model)  # lazy modules have them now
        kept = kept_by_autograd(saved, list(inputs.values()), state)
        saved.clear()
        with backward:
            (returned[0] if isinstance(returned, tuple) else returned).sum().backward()
    once, back = forward.cost(), backward.cost()
    cost = OpaqueCost(
        flops=once.flops, read_bytes=once.read_bytes, written_bytes=once.written_bytes, backward_flops=back.flops, backward_read_bytes=back.read_bytes,
        backward_written_bytes=back.written_bytes, **kept,
    )  # fmt: skip
    variables = [
        Variable(value=f"state_{number}", name=own[0], meta=_meta(tensor), aliases=own[1:])
        for number, (own, tensor) in enumerate(zip(names, state, strict=True))
    ]
    is_parameter = [isinstance(each, nn.Parameter) for each in state]
    batch_inputs = tuple(
        Input(value=f"input_{number}", name=name, meta=_meta(each))
        for number, (name, each) in enumerate(inputs.items())
    )
    root = Meta(shape=(), dtype=torch.get_default_dtype(), stride=(), requires_grad=True)
    return Program(
        parameters={each.name: each for each, own in zip(variables, is_parameter, strict=True) if own},
        buffers={each.name: each for each, own in zip(variables, is_parameter, strict=True) if not own},
        constants={},
        inputs=batch_inputs,
        nodes=_nodes(variables, batch_inputs, root, cost, names),
        outputs=(Ref("loss"),),
        out_spec=tree_flatten(0)[1],
        updates={},
        in_place=frozenset(),
        device=leaves.device or torch.device("cpu"),
        training=True,
        by_shapes=True,
    )


def _nodes(
    variables: list[Variable], inputs: tuple[Input, ...], root: Meta, cost: OpaqueCost, names: tuple[tuple[str, ...], ...]
) -> tuple[Node, Node]:  # fmt: skip
    call = OpaqueCall(
        method=METHOD, spec="", leaves=(), state=names, modes=(), written=(), results=(root,), places=(0,), num_leaves=1, attributes=(), num_draws=0,
        cost=cost, modules=(WHOLE,),
    )  # fmt: skip
    given = tuple(Ref(each.value) for each in inputs), tuple(Ref(each.value) for each in variables)
    common: Any = {
        "kwargs": {}, "context": Context(), "path": "", "line": None, "draw": None, "num_draws": 0, "outputs": (root,),
    }  # fmt: skip
    return (
        Node(name="whole", target=OPAQUE, args=(*given, WHOLE, call.text()), **common),
        Node(name="loss", target=operator.getitem, args=(Ref("whole"), 0), **common),
    )


def _meta(tensor: Tensor) -> Meta:
    """Its layout, as that of a row-major one."""
    shape = tuple(tensor.shape)
    return Meta(
        shape=shape,
        dtype=tensor.dtype,
        stride=contiguous_strides(shape),
        requires_grad=tensor.requires_grad,
    )
