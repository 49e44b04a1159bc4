"""A call of a module whose forward is cut into stages: its microbatches run through them here, and backward when autograd comes to the
results.

    forward of all microbatches -> results, joined, on every rank of the pipeline -> the script's loss, on each of them
    backward of the loss        -> the last stage begins with the gradients of its results; other ranks' copies of these count nothing
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshloom.comm.group import Group, Work
from meshloom.core.errors import CODE_ERRORS, CaptureError, TrainingError, first_line
from meshloom.core.plan_shares import chunk_sizes
from meshloom.loops.captured_forward import CapturedForward
from meshloom.pipeline.runtime.program_stage import ProgramStage
from meshloom.pipeline.runtime.run import empty_as, flat_memory
from meshloom.pipeline.stages.stages import Crossing, Stage
from meshloom.program.ir.leaves import leaves_of
from meshloom.program.ir.nodes import Meta, Ref
from meshloom.program.ir.program import Program
from meshloom.program.operators.collectives import refuse_second_derivative

WAY_OUT = (
    'Say which dim of which input is the batch, as in parallel(batch={"data": 1, "mask": None}), where None is for what all microbatches need whole; '
    "or use microbatches=1."
)


class Microbatch:
    """Some rows of a call's inputs, whose tensors are leaves of its graph."""

    def __init__(self, batch: Mapping[str, Any], rows: int) -> None:
        self.batch, self.leaves, self.rows = batch, leaves_of(batch), rows


def microbatches_of(
    batch: Mapping[str, Any], count: int, dims: Mapping[str, int | None]
) -> tuple[list[Microbatch], dict[str, int]]:
    """The inputs in parts, as many as there are rows for, and along which dim each tensor is cut. dims: of inputs by name, None: all
    microbatches have the whole; others are cut along dim 0.

    >>> parts, _ = microbatches_of({"x": torch.ones(5, 2), "scale": 3.0}, 2, {})
    >>> [each.rows for each in parts], parts[1].leaves.tensors["x"].shape
    ([3, 2], torch.Size([2, 2]))
    """
    leaves = leaves_of(batch)
    along: dict[str, int] = {}
    for name, each in leaves.tensors.items():
        dim = dims.get(name, dims.get(name.split(".")[0], 0))
        if dim is not None and each.ndim:
            along[name] = dim
    sizes = {name: leaves.tensors[name].size(dim) for name, dim in along.items()}
    first = next(iter(sizes), None)
    if first is None:
        return [Microbatch(leaves.rebuild(_leaves_of_a_graph(leaves.tensors.values())), 1)], {}
    other = next((name for name, size in sizes.items() if size != sizes[first]), None)
    if other is not None:
        raise CaptureError(
            f"A pipeline cuts the inputs of a call: {first} has {sizes[first]} rows along dim {along[first]} and {other} has {sizes[other]} along dim {along[other]}. "
            + WAY_OUT
        )
    rows = chunk_sizes(sizes[first], min(count, sizes[first]))
    cut = {name: leaves.tensors[name].split(rows, dim) for name, dim in along.items()}
    found: list[Microbatch] = []
    for number, size in enumerate(rows):
        parts = [
            cut[name][number].contiguous() if name in cut else each for name, each in leaves.tensors.items()
        ]
        found.append(Microbatch(leaves.rebuild(_leaves_of_a_graph(parts)), size))
    return found, along


def _leaves_of_a_graph(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [each.detach().requires_grad_(each.requires_grad) for each in tensors]


class PipelinedCall:
    """One call on one rank of `pp`, whose number is that of its stage.

    stages: by microbatch, all of them. parameters: leaves of a graph of its own. tp: the ranks over which stages are divided; None: one.
    """

    def __init__(
        self, microbatches: Sequence[Microbatch], stages: Sequence[Sequence[Stage]], pp: Group, tp: Group | None, device: torch.device,
        parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], around: Callable[[int], AbstractContextManager[Any]],
        bind: Callable[[Program], Program],
    ) -> None:  # fmt: skip
        self._pp, self._device, self._grad = pp, device, torch.is_grad_enabled()
        self._microbatches, self._parameters = microbatches, parameters
        last = pp.size - 1
        self._results = [results_of(each[last].program) for each in stages]
        self._stages = [_with_results(each[last]) if pp.rank == last else each[pp.rank] for each in stages]
        self._stage = ProgramStage(
            self._stages, parameters, buffers, lambda number: microbatches[number].leaves, group=tp, around=around, bind=bind
        )  # fmt: skip
        rows = [each.rows for each in microbatches]
        shapes = [[meta.shape for meta in metas] for metas in self._results]
        self._joined = [is_joined([each[at] for each in shapes], rows) for at in range(len(self._results[0]))]

    @property
    def differentiable(self) -> list[bool]:
        """Of each result, whether it has a gradient."""
        return [each.requires_grad for each in self._results[0]]

    @property
    def has_means(self) -> bool:
        """Whether a result is the mean of those of several microbatches."""
        return len(self._microbatches) > 1 and not all(self._joined)

    def forward(self) -> list[Tensor]:
        """The results of the whole batch, on every rank."""
        last, sending = self._pp.size - 1, list[tuple[Work, Tensor]]()
        produced: list[Mapping[str, Tensor]] = []
        with torch.set_grad_enabled(self._grad):
            for number, stage in enumerate(self._stages):
                self._stage.receive(
                    number, {each.value: self._recv(each.meta, each.source) for each in stage.incoming}
                )
                found = self._stage.forward(number)
                if self._pp.rank == last:
                    produced.append(found)
                else:
                    sending += [
                        self._send(found[each.value], each.meta, each.destination) for each in stage.outgoing
                    ]
        if not self._grad:
            self._stage.clear()
        for work, _ in sending:
            work.wait()
        return [self._everywhere(at, produced) for at in range(len(self._joined))]

    def backward(self, gradients: Sequence[Tensor | None]) -> None:
        """Leaves gradients in the parameters and the microbatches' tensors. gradients: of the results."""
        last, sending = self._pp.size - 1, list[tuple[Work, Tensor]]()
        for number in reversed(range(len(self._stages))):
            stage = self._stages[number]
            if self._pp.rank == last:
                given = {
                    _result(at): self._part(at, number, each)
                    for at, each in enumerate(gradients)
                    if each is not None
                }
                self._stage.receive_gradients(number, given)
            else:
                for each in _with_gradients(stage.outgoing):
                    self._stage.receive_gradients(
                        number, {each.value: self._recv(each.meta, each.destination)}
                    )
            found = self._stage.backward(number)
            sending += [
                self._send(found[each.value], each.meta, each.source)
                for each in _with_gradients(stage.incoming)
            ]
        for work, _ in sending:
            work.wait()

    def _everywhere(self, at: int, produced: Sequence[Mapping[str, Tensor]]) -> Tensor:
        metas = [each[at] for each in self._results]
        rows = [each.rows for each in self._microbatches]
        if self._joined[at]:
            shape = (sum(each.shape[0] for each in metas), *metas[0].shape[1:])
        else:
            shape = metas[0].shape
        if not produced:
            whole = torch.empty(shape, dtype=metas[0].dtype, device=self._device)
        else:
            found = joined_result([each[_result(at)] for each in produced], rows)
            assert found is not None, "the forward was compared so"
            whole = found.contiguous()
        self._pp.broadcast(whole.view(-1), self._pp.size - 1).wait()
        return whole

    def _part(self, at: int, number: int, gradient: Tensor) -> Tensor:
        """Of the gradient of a result, that of a microbatch's."""
        metas = [each[at] for each in self._results]
        if self._joined[at]:
            return gradient.split([each.shape[0] for each in metas])[number]
        rows = [each.rows for each in self._microbatches]
        return gradient * (rows[number] / sum(rows))

    def _send(self, value: Tensor, meta: Meta, rank: int) -> tuple[Work, Tensor]:
        if value.stride() != meta.stride:
            value = empty_as(meta, value.device).copy_(value)
        flat = flat_memory(value)
        return self._pp.send(flat, rank), flat

    def _recv(self, meta: Meta, rank: int) -> Tensor:
        value = empty_as(meta, self._device)
        self._pp.recv(flat_memory(value), rank).wait()
        return value


class PipelinedResults(torch.autograd.Function):
    """The results of a `PipelinedCall` of these tensors, whose gradients `leave` gives once backward has run through it."""

    @staticmethod
    def forward(
        ctx: Any,
        call: PipelinedCall,
        leave: Callable[[], Sequence[Tensor | None]],
        anchor: Tensor,
        *tensors: Tensor,
    ) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.call, ctx.leave = call, leave
        ctx.set_materialize_grads(False)
        found = call.forward()
        ctx.mark_non_differentiable(
            *(each for each, has in zip(found, call.differentiable, strict=True) if not has)
        )
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_second_derivative()
        if ctx.call is None:
            raise TrainingError(
                "A second backward through one call of a module that a pipeline computes. Call the module again, or add the losses up before."
            )
        ctx.call.backward(gradients)
        ctx.call = None
        return None, None, None, *ctx.leave()


def check_rows(
    model: nn.Module, forward: CapturedForward, batch: Mapping[str, Any], microbatches: Sequence[Microbatch]
) -> None:
    """Raises `CaptureError` where the model's results for the batch are not those for its parts, joined: rows depend on each other, or what is
    cut is not the batch. Compares in evaluation mode, in which nothing draws."""
    rows, forward = [each.rows for each in microbatches], replace(forward, graded=None)
    modes = [(each, each.training) for each in model.modules()]
    try:
        for each, _ in modes:
            each.training = False
        whole = tree_leaves(forward(model, batch))
        try:
            parts = [tree_leaves(forward(model, each.batch)) for each in microbatches]
        except CODE_ERRORS as error:
            raise CaptureError(
                f"A pipeline cuts the inputs of a call, and the forward fails for {rows[0]} of its {sum(rows)} rows ({first_line(error)}). {WAY_OUT}"
            ) from error
    finally:
        for each, mode in modes:
            each.training = mode
    for at, result in enumerate(whole):
        of_parts = [each[at] for each in parts]
        joined = joined_result(of_parts, rows)
        if joined is None or joined.shape != result.shape:
            found = "cannot be joined" if joined is None else f"have shape {list(joined.shape)}, joined"
            raise CaptureError(
                f"A pipeline cuts the inputs of a call. Result {at} of the forward has shape {list(result.shape)}, and those of {len(rows)} microbatches {found}. "
                + WAY_OUT
            )
        if is_joined([each.shape for each in of_parts], rows) and _differ(joined, result):
            raise CaptureError(
                f"A pipeline cuts the inputs of a call, and their rows depend on each other: result {at} is another one for {len(rows)} microbatches, joined. "
                + WAY_OUT
            )


def _differ(one: Tensor, other: Tensor) -> bool:
    """By far more than rounding."""
    if not one.numel():
        return False
    a, b = (each.double().nan_to_num() for each in (one, other))
    return float((a - b).abs().max()) > 1e-2 * float(b.abs().max())


def joined_result(parts: Sequence[Tensor], rows: Sequence[int]) -> Tensor | None:
    """One result of all microbatches, of those of each: their rows, or their mean by rows; None: there is neither."""
    if is_joined([each.shape for each in parts], rows):
        return torch.cat(list(parts))
    if len(parts) == 1:
        return parts[0].clone()
    if any(each.shape != parts[0].shape for each in parts) or not parts[0].is_floating_point():
        return None
    return torch.stack([part * (size / sum(rows)) for part, size in zip(parts, rows, strict=True)]).sum(0)


def results_of(program: Program) -> list[Meta]:
    """The shapes of what the last stage's program returns."""
    known = {
        each.value: each.meta
        for each in (*program.parameters.values(), *program.buffers.values(), *program.inputs)
    }
    known |= {node.name: node.outputs[0] for node in program.nodes if node.outputs}
    known |= {
        name: Meta(shape=tuple(each.shape), dtype=each.dtype, stride=each.stride(), requires_grad=False)
        for name, each in program.constants.items()
    }
    return [known[each.name] for each in program.outputs if isinstance(each, Ref)]


def _with_results(last: Stage) -> Stage:
    """The last stage, which hands its results on as others their values: their gradients arrive as those do."""
    results = (
        Crossing(value=_result(at), source=last.number, destination=last.number + 1, meta=meta) for at, meta in enumerate(results_of(last.program))
    )  # fmt: skip
    return replace(last, outgoing=tuple(results))


def _result(at: int) -> str:
    return f"result {at}"


def _with_gradients(crossings: Sequence[Crossing]) -> Iterator[Crossing]:
    return (each for each in crossings if each.meta.requires_grad)


def is_joined(shapes: Sequence[tuple[int, ...]], rows: Sequence[int]) -> bool:
    """Whether a result has so many rows for each row of the inputs, in all microbatches: else it is a mean over them."""
    return all(
        shape and shape[0] and shape[0] * rows[0] == shapes[0][0] * size and shape[0] % size == 0
        for shape, size in zip(shapes, rows, strict=True)
    )
