"""A program: what the loss of a batch computes on one device, as a flat list of operators.

It holds no state. Parameters, buffers and the batch are given to `run`; gradients come from ordinary autograd.
Its values are named; a node is an operator with the names of its operands.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten

from meshloom.comm.group import Group
from meshloom.core.errors import CaptureError
from meshloom.program.capture.batch_values import fits, tensor_of
from meshloom.program.ir.leaves import Leaves, leaves_of
from meshloom.program.ir.nodes import Input, Node, Ref, Variable, operator_name
from meshloom.program.ir.sparse_constants import dense_parts, strides_of
from meshloom.program.recompute.segment_runner import RunnerAgain
from meshloom.program.run.runner import Runner, Shared, compile_program


@dataclass(frozen=True, kw_only=True)
class Program:
    """The loss of one batch. Equal programs compute the same.

    parameters: name -> variable, in the module's order, each once however often it is tied. Also those that the loss does not use.
    buffers: name -> variable.
    constants: value -> the tensor that it always is.
    inputs: the batch's tensors, in order, and then numbers in it.
    others: what else the batch holds, and what it has to be for this program (`batch_values.py`).
    nodes: operators, in eager's order.
    outputs: what the loss returned, flat: `Ref`s and plain numbers; `out_spec` arranges them.
    updates: buffer name -> value it is given when the program has run.
    in_place: buffers that operators update as they run (running statistics).
    device: that on which it was captured. training: whether the module was in training mode.
    precision: to which model and batch were converted for it; None: the job's own.
    by_shapes: whether it was read without values. Then its constants have none, and it can be looked at but not run.
    shared: what programs that are this one but for integers compile together, if there are such.
    kept: nodes that do not run again in a backward that computes what was not kept; None: all that a backward needs is kept. It changes no value.
    """

    parameters: Mapping[str, Variable]
    buffers: Mapping[str, Variable]
    constants: Mapping[str, Tensor]
    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Any, ...]
    out_spec: TreeSpec
    updates: Mapping[str, Ref]
    in_place: frozenset[str]
    device: torch.device
    training: bool
    precision: torch.dtype | None = None
    by_shapes: bool = False
    kept: frozenset[str] | None = None
    others: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    shared: Shared | None = field(default=None, repr=False, compare=False)
    _runners: dict[Any, Runner | RunnerAgain] = field(default_factory=dict, repr=False, compare=False)

    def run(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        batch: Any,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        visit: Callable[[Node, Any], None] | None = None,
        group: Group | None = None,
    ) -> Any:
        """What the loss returns for `batch`, and buffers updated as the module would update its own.

        parameters, buffers: by the user's names, on `device`.
        device: where to compute; default: where it was captured.
        dtype: compute everything of floating-point in this precision: constants, inner casts and autocast regions are lifted to it,
            and `parameters` and `buffers` are expected in it.
        visit: called with every node and its value; slower.
        group: the ranks among which it is divided, if it is one rank's program.
        """
        if self.by_shapes:
            raise CaptureError(
                f"This program of {len(self.nodes)} operators was read by shapes alone, so it cannot be run. Read it from batches: capture(job, batches)."
            )
        leaves = leaves_of(batch)
        self._check_batch(leaves)
        flat = [tensor_of(leaves, each, dtype) for each in self.inputs]
        return tree_unflatten(self._runner(device, dtype, visiting=visit is not None).run(parameters, buffers, flat, visit, group), self.out_spec)

    def run_flat(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        *,
        visit: Callable[[Node, Any], None] | None = None,
        group: Group | None = None,
    ) -> list[Any]:
        """As `run` where it was captured, for the tensors of `inputs` in order: what it returns, flat. Shapes are not looked at."""
        return self._runner(None, None, visiting=visit is not None).run(parameters, buffers, inputs, visit, group)

    def _runner(self, device: torch.device | str | None, dtype: torch.dtype | None, *, visiting: bool) -> Runner | RunnerAgain:
        where = torch.device(device) if device is not None else self.device
        runner = self._runners.get((where, dtype, visiting))
        if runner is None:
            if self.kept is not None and not visiting:
                made = RunnerAgain(self, self.kept, where, dtype)
            else:
                made = compile_program(self, where, dtype, visiting=visiting, shared=self.shared)
            runner = self._runners.setdefault((where, dtype, visiting), made)
        return runner

    def digest(self) -> str:
        """A short hash of all that it computes: equal for programs that are the same, in any process. The user's lines do not count."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        facts: list[Any] = [dict(self.parameters), dict(self.buffers), self.inputs, self.outputs, self.out_spec, dict(self.updates)]
        facts += [sorted(self.in_place), self.device, self.training, self.precision, self.by_shapes, dict(self.others)]
        for node in self.nodes:
            facts += [node.name, node.operator, node.args, dict(node.kwargs), node.context, node.path, node.draw, node.num_draws, node.outputs]
        digest = hashlib.sha256("\n".join(map(repr, facts)).encode())
        for name, constant in self.constants.items():
            digest.update(f"\n{name}: {constant.dtype} {tuple(constant.shape)} {strides_of(constant)}\n".encode())
            for part in dense_parts(constant):
                if not self.by_shapes and part.numel():
                    digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def describe(self) -> str:
        """The program as text: its variables, and one line per node."""
        lines = [f"parameter {name}: {each.meta}{_also(each.aliases)}" for name, each in self.parameters.items()]
        lines += [f"buffer {name}: {each.meta}{_also(each.aliases)}" for name, each in self.buffers.items()]
        lines += [f"constant {name}: {str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for name, each in self.constants.items()]
        lines += [f"input {each.name}: {each.meta}" for each in self.inputs]
        names = {each.value: name for name, each in (*self.parameters.items(), *self.buffers.items())}
        names |= {each.value: each.name for each in self.inputs}
        for node in self.nodes:
            operands = ", ".join([*(_text(each, names) for each in node.args), *(f"{key}={_text(each, names)}" for key, each in node.kwargs.items())])
            outputs = ", ".join(map(str, node.outputs)) or "number"
            notes = [node.path, str(node.context), f"draw {node.draw}" if node.draw is not None else ""]
            lines.append(f"{node.name} = {node.operator}({operands}) -> {outputs}  # {'; '.join(note for note in notes if note)}".rstrip("# "))
        lines += [f"update {name} = {each}" for name, each in self.updates.items()]
        lines += [f"updated as it runs: {name}" for name in sorted(self.in_place)]
        return "\n".join([*lines, f"return {', '.join(_text(each, names) for each in self.outputs)}"])

    def _check_batch(self, leaves: Leaves) -> None:
        found = {name: tuple(leaf.shape) for name, leaf in leaves.tensors.items()} | dict.fromkeys(leaves.values, ())
        for each in self.inputs:
            if found.get(each.name) != each.meta.shape:
                shape = found.get(each.name)
                given = f"has shape {list(shape)}" if shape is not None else "is missing"
                raise CaptureError(
                    f"{each.name} of the batch {given}, and the program is for {list(each.meta.shape)}. Capture a program for batches of this shape."
                )
        if not fits(self.others, leaves.values):
            wanted = ", ".join(f"{name} is {each}" for name, each in self.others.items() if each)
            raise CaptureError(f"The program is for batches in which {wanted or 'there is nothing besides tensors'}. Capture one for this batch.")


def _also(aliases: tuple[str, ...]) -> str:
    return f", also {', '.join(aliases)}" if aliases else ""


def _text(value: Any, names: Mapping[str, str]) -> str:
    if isinstance(value, Ref):
        return names.get(value.name, value.name)
    if isinstance(value, tuple | list):
        return f"[{', '.join(_text(each, names) for each in value)}]"
    return operator_name(value) if hasattr(value, "_schema") else str(value)
