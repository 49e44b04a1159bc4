"""The program for batches of other sizes, when one was read and compared with eager: by shapes alone, so that no model is built in mid-run.

What is read has to be that program but for sizes. Else the caller builds a model, and compares, as it did the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch._subclasses import FakeTensor

from meshloom.errors import CaptureError
from meshloom.graph.frozen import equal_bits
from meshloom.graph.leaves import leaves_of
from meshloom.graph.nodes import Meta, Node
from meshloom.graph.program import Program
from meshloom.graph.reading import reading
from meshloom.graph.shapes import fake_of, model_by_shapes, moved_to, on_cpu
from meshloom.job import Job

Capture = Callable[[nn.Module, tuple[Any, Any]], Program]


def resized(known: Program, job: Job, batches: tuple[Any, Any], capture: Capture) -> Program | None:
    """The program for batches like these two, with `known`'s constants; None where it is another one but for sizes, or takes values to read.

    known: a program of the same loss and mode, compared with eager. capture: reads a program from a model and two batches.
    """
    try:
        with reading(known.precision), on_cpu(known.device):
            model, mode = model_by_shapes(job, known.precision, training=known.training)
            first, second = (leaves.rebuild([fake_of(each, mode) for each in leaves.tensors.values()]) for leaves in map(leaves_of, batches))
            found = capture(model, (first, second))
    except CaptureError:
        return None
    found = moved_to(found, known.device)
    if not _alike(found, known):
        return None
    return replace(found, constants=dict(known.constants), _runners={})


def _alike(one: Program, other: Program) -> bool:
    return list(_facts(one)) == list(_facts(other)) and _same_constants(one.constants, other.constants)


def _facts(program: Program) -> Iterator[Any]:
    """All that a program computes, without its integers."""
    yield from (dict(program.parameters), dict(program.buffers), [(each.value, each.name, _kind(each.meta)) for each in program.inputs])
    yield from (program.outputs, program.out_spec, dict(program.updates), program.in_place, program.training, program.precision, list(program.others))
    yield from map(_fact, program.nodes)


def _fact(node: Node) -> Any:
    given = _without_integers(node.args), {name: _without_integers(each) for name, each in node.kwargs.items()}
    outputs = [_kind(each) for each in node.outputs]
    return node.name, node.target, given, node.context, node.path, node.draw, node.num_draws, outputs


def _without_integers(value: Any) -> Any:
    """Sizes, and what is counted from them; a bool is none."""
    if isinstance(value, tuple):
        return tuple(map(_without_integers, value))
    return int if type(value) is int else value


def _kind(meta: Meta) -> Any:
    return len(meta.shape), meta.dtype, meta.requires_grad


def _same_constants(found: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> bool:
    """Constants may follow the sizes, or be values that nobody has here: draws of a constructor, or tensors that are too large to be kept."""
    return list(found) == list(known) and all(
        not isinstance(each, FakeTensor) and (each.dtype, each.shape) == (known[name].dtype, known[name].shape) and equal_bits(each, known[name])
        for name, each in found.items()
    )
