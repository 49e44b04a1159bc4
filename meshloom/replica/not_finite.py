"""Finds where a step's loss became no number: in which chunk, and at which module or operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.comm.group import Group
from meshloom.comm.objects import collect
from meshloom.data.chunks import Chunk
from meshloom.pipeline.runtime.held_parameters import HeldParameters
from meshloom.pipeline.runtime.microbatches import Microbatches
from meshloom.pipeline.stages.program_store import ReadyBatch
from meshloom.program.ir.nodes import Node
from meshloom.replica.chunk_scope import ChunkScope


def find_not_finite(
    model: nn.Module,
    parameters: Iterable[tuple[str, Tensor]],
    chunks: Sequence[Chunk],
    loss_of: Callable[[Chunk], Tensor],
) -> list[Any] | None:
    """As `Stages.locate`. parameters: what this rank keeps of them. loss_of: runs a chunk once more, from the
    same draws; a scalar."""
    for name, parameter in parameters:
        if not bool(torch.isfinite(parameter).all()):
            return _in_parameter(name)
    for chunk in chunks:
        with torch.no_grad(), _watched(model) as first:
            loss = loss_of(chunk)
        if first:
            return [0, f"chunk {chunk.index}; the first module whose output is not finite is {first[0]}"]
        if not bool(torch.isfinite(loss)):
            return [
                0,
                f"chunk {chunk.index}; every module's output is finite, so the loss function made it",
            ]
    return None


def _in_parameter(name: str) -> list[Any]:
    # before all stages: other ranks may keep other slices of it, and see only what it does
    return [-1, f"whose parameter {name} was not finite before the step"]


def locate_nan(
    parameters: HeldParameters,
    team: Group,
    chunks: Sequence[Chunk],
    batches: Sequence[ReadyBatch],
    scope: ChunkScope,
    microbatches: Microbatches,
) -> list[Any] | None:
    """The first operator of this rank's stages that gives NaN, as `Stages.locate`. team: all ranks of the replica.
    batches: of the chunks."""
    kept = parameters.kept().items()
    bad = next((name for name, each in kept if not bool(torch.isfinite(each).all())), None)
    everyone = collect(team, bad)
    if any(everyone):
        with parameters.computing("rerun", idle=True):
            pass  # other replicas may look
        return _in_parameter(bad) if bad else None
    found: list[Any] | None = None

    def look(number: int, stage: int, node: Node, value: Any) -> None:
        nonlocal found
        if (
            found is None
            and isinstance(value, Tensor)
            and value.is_floating_point()
            and bool(value.isnan().any())
        ):
            where = " at ".join(filter(None, (node.path, str(node.line or ""))))
            found = [
                stage,
                f"microbatch {number}; the first operator that gives NaN is {node.operator}{f' in {where}' if where else ''}",
            ]

    with parameters.computing("rerun", idle=not chunks):
        for number, chunk in enumerate(chunks):
            microbatches.look(
                [batches[number]],
                lambda stage, microbatch: scope.draws(chunk),  # noqa: B023
                partial(look, number),
            )
    return found


@contextmanager
def _watched(model: nn.Module) -> Iterator[list[str]]:
    """Around a forward: the list receives the name of the first module, in order of execution, whose output
    is not finite."""
    first: list[str] = []
    with ExitStack() as around:
        for name, module in model.named_modules():
            around.callback(module.register_forward_hook(_hook(name or "the model", first)).remove)
        yield first


def _hook(name: str, first: list[str]) -> Any:
    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        tensors = [
            each
            for each in (output if isinstance(output, tuple | list) else [output])
            if isinstance(each, Tensor)
        ]
        if not first and any(
            each.is_floating_point() and not bool(torch.isfinite(each).all()) for each in tensors
        ):
            first.append(name)

    return look
