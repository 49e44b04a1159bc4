"""A stage that runs programs: forwards and backwards of microbatches, and their activations."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshloom.comm.group import Group
from meshloom.pipeline.runtime.stage import StageRun
from meshloom.pipeline.stages.stages import Stage
from meshloom.program.ir.batch_values import tensor_of
from meshloom.program.ir.leaves import Leaves
from meshloom.program.ir.nodes import Node
from meshloom.program.ir.program import Program
from meshloom.program.operators.fused_grad_accumulation import DirectAccumulator, GradAccumulator
from meshloom.program.recompute.saved_frame import Elsewhere
from meshloom.program.run.compiler import Compiler
from meshloom.program.run.execute import run_flat
from meshloom.program.run.with_fused_accumulation import MIN_ELEMENTS, with_fused_accumulation

# microbatch, flat result of the loss -> the tensor where backward starts
Finish = Callable[[int, Sequence[Any]], Tensor | None]
_autograd: Any = torch.autograd


class _Activations:
    """A microbatch until its backward has ended. Of outputs only the gradient edges are kept."""

    def __init__(self) -> None:
        self.inputs: dict[str, Tensor] = {}  # values of other stages, as leaves of the local graph
        self.edges: dict[str, Any] = {}  # output -> its gradient edge
        self.gradients: dict[str, Tensor] = {}  # sum of those received so far
        self.root: Tensor | None = None
        self.weights: Sequence[Callable[[], None]] = ()  # computations of gradients that are left


class ProgramStage(StageRun):
    """A stage with its parameters on this rank.

    stages: [microbatch], the stage for that microbatch's shapes. parameters, buffers: this rank's, by name.
    batch: microbatch -> its tensors by their names in the batch. finish: on the last stage.
    group: the ranks along tp, if sharded. around: microbatch -> a context for its forward.
    split: weight gradients are computed apart from those of inputs. accumulator: accumulates weight
        gradients; default: `.grad`, by autograd where possible.
    visit: called with every node and its value; slower. elsewhere: as for `run_flat`.
    bind: gives a program's opaque calls their modules. compiler: compiles what its programs compute.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        batch: Callable[[int], Leaves],
        *,
        finish: Finish | None = None,
        group: Group | None = None,
        split: bool = False,
        around: Callable[[int], AbstractContextManager[Any]] | None = None,
        accumulator: GradAccumulator | None = None,
        elsewhere: Elsewhere | None = None,
        bind: Callable[[Program], Program] | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        self._visit: Callable[[Node, Any], None] | None = None
        self._elsewhere = elsewhere
        self._deferred = DeferredWeightGradients(accumulator or DirectAccumulator())
        self._compiler = compiler
        programs = {
            id(each): self._fused(bind(each.program) if bind else each.program, accumulator, split)
            for each in stages
        }
        self._programs = [programs[id(each)] for each in stages]
        self._stages = stages
        self._sent, self._changing = [each.sent for each in stages], [each.changing for each in stages]
        self._parameters, self._buffers = parameters, buffers
        self._batch, self._finish, self._group, self._around = batch, finish, group, around
        self._live: dict[int, _Activations] = {}

    def receive(self, microbatch: int, values: Mapping[str, Tensor]) -> None:
        stage, live = self._stages[microbatch], self._live.setdefault(microbatch, _Activations())
        requires_grad = {each.value: each.meta.requires_grad for each in stage.incoming}
        for name, value in values.items():
            live.inputs[name] = value.detach().requires_grad_(requires_grad[name])

    def forward(self, microbatch: int) -> dict[str, Tensor]:
        live = self._live.setdefault(microbatch, _Activations())
        with self._around(microbatch) if self._around else nullcontext():
            values = self.rerun(microbatch)
        outputs: dict[str, Tensor] = dict(zip(self._sent[microbatch], values, strict=False))
        # without gradients, as in evaluations, a parameter that is sent is a leaf
        live.edges = {
            name: _autograd.graph.get_gradient_edge(value)
            for name, value in outputs.items()
            if value.requires_grad and torch.is_grad_enabled()
        }
        if self._finish:
            live.root = self._finish(microbatch, values[len(outputs) :])
        return {name: value.detach() for name, value in outputs.items()}

    def rerun(self, microbatch: int) -> list[Any]:
        """Runs only the program of a microbatch, on its inputs; returns its flat outputs."""
        program, inputs = self._programs[microbatch], self._live[microbatch].inputs
        batch = self._batch(microbatch)
        leaves = [
            inputs[each.value] if each.value in inputs else tensor_of(batch, each) for each in program.inputs
        ]
        # The backward may need a buffer as this forward saw it, and other forwards come in between.
        changed = {name: self._buffers[name].clone() for name in self._changing[microbatch]}
        live: Any = self._buffers  # a `ChainMap` only reads its second mapping
        buffers = ChainMap(changed, live) if changed else live
        values = run_flat(
            program,
            self._parameters,
            buffers,
            leaves,
            visit=self._visit,
            group=self._group,
            elsewhere=self._elsewhere,
        )
        with torch.no_grad():
            for name, value in changed.items():
                self._buffers[name].copy_(value)
        return values

    @contextmanager
    def watched(self, visit: Callable[[Node, Any], None], buffers: Mapping[str, Tensor]) -> Iterator[None]:
        """A context of forwards that are only looked at. buffers: in place of this rank's."""
        kept = self._visit, self._buffers
        self._visit, self._buffers = visit, buffers
        try:
            yield
        finally:
            self._visit, self._buffers = kept
            self.clear()

    def clear(self) -> None:
        self._live.clear()

    def receive_gradients(self, microbatch: int, gradients: Mapping[str, Tensor]) -> None:
        known = self._live[microbatch].gradients
        for name, gradient in gradients.items():
            known[name] = known[name] + gradient if name in known else gradient

    def backward(self, microbatch: int) -> dict[str, Tensor]:
        gradients = self._backward(microbatch)
        del self._live[microbatch]
        return gradients

    def input_gradients(self, microbatch: int) -> dict[str, Tensor]:
        self._deferred.collecting = True
        try:
            gradients = self._backward(microbatch)
        finally:
            self._deferred.collecting = False
        left = self._live[microbatch] = _Activations()
        left.weights = self._deferred.take()
        return gradients

    def weight_gradients(self, microbatch: int) -> dict[str, Tensor]:
        for compute in self._live.pop(microbatch).weights:
            compute()
        return {}

    def _fused(self, program: Program, accumulator: GradAccumulator | None, split: bool) -> Program:
        if self._compiler is not None:
            program = replace(program, compiler=self._compiler)
        if split:
            return with_fused_accumulation(program, self._deferred, min_elements=0)
        # What accumulates its gradient itself is not compiled with its neighbours.
        least = None if self._compiler else MIN_ELEMENTS
        return with_fused_accumulation(program, accumulator, min_elements=least) if accumulator else program

    def _backward(self, microbatch: int) -> dict[str, Tensor]:
        live = self._live[microbatch]
        # A value that had a gradient at the capture may have none in this microbatch.
        arrived = {name: gradient for name, gradient in live.gradients.items() if name in live.edges}
        edges, gradients = [live.edges[name] for name in arrived], list(arrived.values())
        if live.root is not None:
            edges.append(live.root)
            gradients.append(torch.ones_like(live.root))
        if edges:
            torch.autograd.backward(edges, gradients)
        return {
            name: value.grad if value.grad is not None else torch.zeros_like(value) for name, value in live.inputs.items() if value.requires_grad
        }  # fmt: skip


class DeferredWeightGradients(GradAccumulator):
    """Weight gradients computed later than input gradients, so that other ranks need not wait for them.

    I   dX = dY W; (X, dY) is stored        W   W.grad += dY^T X, b.grad += sum of dY

    collecting: whether backwards defer; otherwise they compute all gradients immediately.
    """

    def __init__(self, accumulator: GradAccumulator) -> None:
        self.collecting = False
        self._accumulator = accumulator
        self._pending: list[Callable[[], None]] = []

    @property
    def now(self) -> GradAccumulator:
        return self._accumulator.now

    def add(self, weight: Tensor | None, bias: Tensor | None, rows: Tensor, inputs: Tensor) -> None:
        if self.collecting:
            self._pending.append(lambda: self._accumulator.add(weight, bias, rows, inputs))
        else:
            self._accumulator.add(weight, bias, rows, inputs)

    def take(self) -> list[Callable[[], None]]:
        """The deferred computations, in order."""
        pending, self._pending = self._pending, []
        return pending
