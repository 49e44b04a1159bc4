"""What forwards have left in attributes, in a checkpoint's files: against one device, and against what another plan has made of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshloom.checkpoint.checkpoint import Checkpoint
from meshloom.checkpoint.format import CARRIED
from meshloom.checkpoint.json_values import from_json
from meshloom.verify.between_steps.checks import TensorError, compared_with, same_bits
from meshloom.verify.reference.buffer_merging import plain_numbers
from meshloom.verify.reference.reference import Reference


@dataclass(frozen=True, kw_only=True)
class AttributeDifferences:
    """same_chunks: whether both checkpoints are of the same chunks, so that their tensors have the same keys. facts: what is wrong, a
    sentence each. differing: the attributes that are. begun_without: attributes of which the other one may have nothing, and has nothing."""

    same_chunks: bool
    facts: Sequence[str]
    differing: Sequence[str] = ()
    begun_without: Sequence[str] = ()


def check_attributes(
    saved: Checkpoint, reference: Reference, tolerance: float
) -> tuple[list[TensorError], list[str]]:
    """What the checkpoint has, against one device. What it lacks shows in the steps after it is resumed, if it is ever read."""
    values = _values(saved)
    errors: list[TensorError] = []
    facts: list[str] = []
    numbers = {f"{path}.{name}" if path else name: value for (path, name), value in plain_numbers(reference.model).items()}  # fmt: skip
    for name, encoded in values["numbers"].items():
        value = from_json(encoded)
        same = math.isclose(value, numbers.get(name, math.nan), rel_tol=tolerance, abs_tol=0.0)
        if not same and not (math.isnan(value) and math.isnan(numbers.get(name, 0.0))):
            facts.append(f"{name} is {value:g} in the checkpoint and {numbers.get(name)} on one device.")
    left = reference.chunk_run.left.by_name()
    for name, records in values["tensors"].items():
        for forward in reference.forwards():
            ours = [(records.get(str(chunk)), _leaves_of(saved, name, chunk)) for chunk, _ in forward.members]
            expected = left.get(name, {}).get(forward.key)
            right = list(_tensors(expected))
            if any(
                record is None or len(leaves) != len(right) or _kinds(record["value"]) != _kinds_of(expected)
                for record, leaves in ours
            ):
                facts.append(f"{name} of chunk {forward.key} is another value than on one device.")
                continue
            for number, tensor in enumerate(right):
                parts = [leaves[number] for _, leaves in ours]
                what = f"{name} of chunk {forward.key}"
                errors.append(_nearest(what, parts, tensor, reference.step, tolerance))
    return errors, facts


def differing_attributes(one: Checkpoint, two: Checkpoint) -> AttributeDifferences:
    """What `two`, which goes on from `one` without a step, perhaps under another plan, has made of it."""
    a, b = _values(one), _values(two)
    differing = [name for name, value in a["numbers"].items() if b["numbers"].get(name) != value]
    facts = [f"{name} is {b['numbers'].get(name)} instead of {a['numbers'][name]}." for name in differing]
    rows, rows_after = a["rows"], b["rows"]
    if rows == rows_after:
        others = [name for name, each in a["tensors"].items() if b["tensors"].get(name) != each]
        facts += [f"{name} is another value." for name in others]
        return AttributeDifferences(same_chunks=True, facts=facts, differing=[*differing, *others])
    if sum(rows) != sum(rows_after):
        facts.append(f"Its chunks have {rows_after} rows, and were saved with {rows}.")
    begun_without: list[str] = []
    for name, records in a["tensors"].items():
        dims = _certain_dims(one, name, records, rows)
        if dims is None:
            begun_without.append(name)
            if name in b["tensors"]:
                facts.append(f"{name} goes on, and which of its dimensions is the batch's is in doubt.")
                differing.append(name)
            continue
        before = _whole(one, name, rows, dims)
        after = _whole(two, name, rows_after, dims) if name in b["tensors"] else []
        kinds = {
            repr(_kinds(each["value"])) for each in [*records.values(), *b["tensors"].get(name, {}).values()]
        }
        if len(kinds) > 1 or len(before) != len(after) or not all(map(same_bits, before, after)):
            facts.append(f"{name} has other rows.")
            differing.append(name)
    return AttributeDifferences(
        same_chunks=False, facts=facts, differing=differing, begun_without=begun_without
    )


def _values(saved: Checkpoint) -> Mapping[str, Any]:
    return saved.values.get("attributes", {"rows": [], "tensors": {}, "numbers": {}, "left_out": {}})


def _leaves_of(saved: Checkpoint, name: str, chunk: int) -> list[Tensor]:
    """The tensors of an attribute that chunk `chunk` has left."""
    found: list[Tensor] = []
    keys = set(saved.keys())
    while (key := f"{CARRIED}{name}/{chunk}/{len(found)}") in keys:
        shape = saved.shape(key)
        found.append(saved.read(key, 0, math.prod(shape)).view(shape))
    return found


def _certain_dims(
    saved: Checkpoint, name: str, records: Mapping[str, Any], rows: Sequence[int]
) -> list[int] | None:
    """Of each tensor the dim that is the batch's: as large as the chunk in every chunk, and no other is."""
    filled = {chunk: size for chunk, size in enumerate(rows) if size}
    if any(records.get(str(chunk), {}).get("step") != saved.step - 1 for chunk in filled):
        return None
    tensors = {chunk: _leaves_of(saved, name, chunk) for chunk in filled}
    if len({repr(_kinds(records[str(chunk)]["value"])) for chunk in filled}) > 1:
        return None
    dims: list[int] = []
    for number in range(len(tensors[min(filled)])):
        shapes = [(tensors[chunk][number].shape, size) for chunk, size in filled.items()]
        fitting = [{dim for dim, length in enumerate(shape) if length == size} for shape, size in shapes]
        if any(each != fitting[0] for each in fitting) or len(fitting[0]) != 1:
            return None
        dim = fitting[0].pop()
        if len({(*shape[:dim], *shape[dim + 1 :]) for shape, _ in shapes}) > 1:
            return None
        dims.append(dim)
    return dims


def _whole(saved: Checkpoint, name: str, rows: Sequence[int], dims: Sequence[int]) -> list[Tensor]:
    """The tensors of an attribute for the whole batch."""
    chunks = [_leaves_of(saved, name, chunk) for chunk, size in enumerate(rows) if size]
    if any(len(each) != len(dims) for each in chunks):
        return []
    return [torch.cat([each[number] for each in chunks], dim) for number, dim in enumerate(dims)]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)


def _kinds(tree: Any) -> Any:
    """How the tensors of a saved value lie in tuples and lists."""
    if not isinstance(tree, Mapping):
        return None
    if "shape" in tree:
        return "tensor"
    return [[kind, [_kinds(each) for each in items]] for kind, items in tree.items()]


def _kinds_of(value: Any) -> Any:
    """The same of a value itself."""
    if isinstance(value, Tensor):
        return "tensor"
    return None if value is None else [[type(value).__name__, [_kinds_of(each) for each in value]]]


def _nearest(name: str, parts: Sequence[Tensor], right: Tensor, step: int, tolerance: float) -> TensorError:
    """The comparison of chunks that are one on one device, joined along the dim that agrees best."""
    if len(parts) == 1:
        return compared_with(name, parts[0], right, step, tolerance)
    fitting = [
        dim
        for dim in range(right.ndim)
        if all(part.ndim == right.ndim and part.movedim(dim, 0)[:0].shape == right.movedim(dim, 0)[:0].shape for part in parts)
    ]  # fmt: skip
    found = [compared_with(name, torch.cat(list(parts), dim), right, step, tolerance) for dim in fitting] or [
        compared_with(name, None, right, step, tolerance)
    ]
    return min(found, key=lambda each: each.error)
