"""A program: the captured loss of a batch on one device, as a flat list of operators.

It has no state and does not run itself: `run_program` (`program/run/execute.py`) takes parameters, buffers
and the batch; gradients come from ordinary autograd. A node is an operator with the names of its operands.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from meshloom.program.ir.contexts import Context
from meshloom.program.ir.nodes import Input, Node, Ref, Variable
from meshloom.program.ir.sparse_constants import bits_of, dense_parts, strides_of
from meshloom.program.ir.step_input import STEP


@dataclass(frozen=True, kw_only=True)
class Program:
    """The loss of one batch. Equal programs compute the same.

    parameters, buffers: name -> variable, in the module's order, tied ones once, unused ones included.
    constants: value -> its tensor.
    inputs: the batch's tensors, in order, then numbers in the batch, then the number of the step where it is used.
    others: what else the batch holds, and what it must be for this program (`batch_values.py`).
    nodes: operators, in eager order.
    outputs: what the loss returns, flat: `Ref`s and plain numbers; `out_spec` is their structure.
    updates: buffer name -> its value after the program.
    in_place: buffers that operators update while they run (running statistics).
    device: of the capture. training: whether the module was in training mode.
    precision: dtype to which model and batch were converted; None: the job's own.
    opaque: module -> why it is one operator: its calls are nodes that run the user's own code.
    by_shapes: captured without values: constants have none, and the program can be analysed but not run.
    kept: nodes that are not recomputed in the backward; None: nothing is recomputed. Values stay the same.
    shared: cache of functions, shared by programs that are equal up to integers. compiled: its own. compiler: compiles
        regions of its operators (`program/run/compiler.py`); None: they run one by one.
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
    opaque: Mapping[str, str] = field(default_factory=dict[str, str])
    by_shapes: bool = False
    kept: frozenset[str] | None = None
    others: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    shared: dict[Any, Callable[..., Any]] | None = field(default=None, repr=False, compare=False)
    compiler: Any = field(default=None, repr=False, compare=False)
    compiled: dict[Any, Any] = field(default_factory=dict[Any, Any], init=False, repr=False, compare=False)

    @property
    def changing(self) -> frozenset[str]:
        """Names of the buffers that it updates, at its end or while it runs."""
        return self.in_place.union(self.updates)

    @property
    def tensor_inputs(self) -> tuple[Input, ...]:
        """The inputs that are tensors in the batch."""
        return tuple(each for each in self.inputs if each.name not in self.others and each.name != STEP)

    @property
    def contexts(self) -> tuple[Context, ...]:
        """The distinct contexts of its nodes."""
        return tuple(dict.fromkeys(node.context for node in self.nodes))

    def digest(self) -> str:
        """A short hash of all that it computes, but for source lines: equal for equal programs everywhere."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        facts: list[Any] = [
            dict(self.parameters),
            dict(self.buffers),
            self.inputs,
            self.outputs,
            self.out_spec,
        ]
        facts += [dict(self.updates), sorted(self.in_place), self.device, self.training, self.precision]
        facts += [self.by_shapes, dict(self.others), sorted(self.opaque)]
        for node in self.nodes:
            facts += [node.name, node.operator, node.args, dict(node.kwargs), node.context, node.path]
            facts += [node.draw, node.num_draws, node.outputs]
        digest = hashlib.sha256("\n".join(map(repr, facts)).encode())
        for name, constant in self.constants.items():
            layout = f"{constant.dtype} {tuple(constant.shape)} {strides_of(constant)}"
            digest.update(f"\n{name}: {layout}\n".encode())
            for part in () if self.by_shapes else dense_parts(constant):
                digest.update(bits_of(part).numpy().tobytes())
        return digest.hexdigest()[:16]
