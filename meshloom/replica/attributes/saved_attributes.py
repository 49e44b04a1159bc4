"""What forwards have left in attributes, in checkpoints: tensors are state of the run, by attribute and chunk; how they lie in
tuples and lists, and numbers, are among its values.

    keys     carried/ATTRIBUTE/CHUNK/NUMBER of a tensor in the value
    values   {"rows": [8], "tensors": {ATTRIBUTE: {CHUNK: {"rows": 8, "step": 3, "value": {"tuple": [{"shape": [1, 8, 9], ...}, ...]}}}},
              "numbers": {ATTRIBUTE: number}, "left_out": {ATTRIBUTE: why}}

A rank whose forwards have left something since the run began says what it is; ranks that only resumed the same, because
the module is in another stage, do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshloom.checkpoint.checkpoint import Checkpoint
from meshloom.checkpoint.format import CARRIED, Piece
from meshloom.checkpoint.json_values import from_json, to_json
from meshloom.checkpoint.tensor_file import DTYPES
from meshloom.comm.group import Group
from meshloom.comm.objects import collect
from meshloom.comm.steps import Steps
from meshloom.core.modules.carried_attributes import carried_tensors
from meshloom.core.plan import Plan
from meshloom.core.units import format_count
from meshloom.replica.attributes.carried_tensors import (
    ABSENT,
    CarriedTensors,
    LeftValue,
)
from meshloom.replica.attributes.plain_numbers import PlainNumbers
from meshloom.replica.attributes.rows_anew import SavedRows, batch_dims, rows_anew
from meshloom.replica.attributes.unsaved_buffers import UnsavedBuffers

ATTRIBUTES = "attributes"  # among a checkpoint's values, if forwards may leave something
_MOST_NAMES = 3  # in a sentence
_NOT_PERSISTENT = "a buffer that is not persistent"
_KINDS: Mapping[str, type] = {"tuple": tuple, "list": list}


class SavedAttributes:
    """Saves and resumes what the forwards of a rank of replica `number` leave. device: where they run."""

    def __init__(
        self, plan: Plan, number: int, device: torch.device, carried: CarriedTensors, numbers: PlainNumbers, unsaved: UnsavedBuffers,
    ) -> None:  # fmt: skip
        self._plan, self._number, self._device = plan, number, device
        self._carried, self._numbers, self._unsaved = carried, numbers, unsaved
        self._notes: list[str] = []
        self._told: set[str] = set()  # left out of checkpoints

    @property
    def names(self) -> list[str]:
        """Of the attributes that may hold something, equal on all ranks."""
        return [*self._carried.names, *self._numbers.names]

    def save(self, world: Group) -> Steps[tuple[list[Piece], dict[str, Any]]]:
        """This rank's tensors, and what a checkpoint's values say, equal on all ranks. Every rank of `world` calls it."""
        if not self.names and not self._unsaved.any:
            return [], {}
        left = list(self._carried.left())
        mine = {
            "rows": {str(chunk): rows for chunk, rows in self._carried.rows().items()},
            "tensors": [[name, str(chunk), _record(each, self._device), each.resumed] for name, chunk, each in left],
            "numbers": [[name, "", to_json(value), resumed] for name, value, resumed in self._numbers.changed()],
            "left_out": {name: why for name, _, each in left if (why := _why_left_out(each.value))} | dict.fromkeys(self._unsaved.changed(), _NOT_PERSISTENT),
        }  # fmt: skip
        everyone = yield from collect(world, mine)
        left_out = {name: why for each in everyone for name, why in each["left_out"].items()}
        by_chunk = {number: rows for each in everyone for number, rows in each["rows"].items()}
        tensors = _by_name(each for of_rank in everyone for each in of_rank["tensors"] if each[0] not in left_out)  # fmt: skip
        numbers = _by_name(each for of_rank in everyone for each in of_rank["numbers"])
        values = {
            "rows": [by_chunk.get(str(chunk), 0) for chunk in range(self._plan.num_chunks)],
            "tensors": {name: {chunk: record for chunk, (record, _) in of.items()} for name, of in tensors.items()},
            "numbers": {name: of[""][0] for name, of in numbers.items()},
            "left_out": left_out,
        }  # fmt: skip
        pieces = [
            Piece(_key(name, chunk, number), _flat(leaf), 0, leaf.numel(), tuple(leaf.shape))
            for name, chunk, each in left
            if name in tensors and each.resumed == tensors[name][str(chunk)][1]
            for number, leaf in enumerate(carried_tensors(each.value))
        ]
        self._note_left_out(left_out)
        return pieces, {ATTRIBUTES: values} if self.names or left_out else {}

    def take_notes(self) -> list[str]:
        """For the user, on what a resumed run begins without; equal on all ranks. Clears them."""
        notes, self._notes = self._notes, []
        return notes

    def loading(
        self, checkpoint: Checkpoint
    ) -> tuple[Callable[[str, Sequence[int], Callable[[int, int], Tensor]], None], Callable[[], None]]:
        """What takes the tensors of a checkpoint, each with its key, its shape and what reads it, and what is to be called after the
        last one."""
        saved = checkpoint.values.get(ATTRIBUTES)
        if saved is None:
            return (lambda key, shape, read: None), (lambda: self._note_none(checkpoint, self.names))
        wanted = self._wanted(saved, checkpoint)
        needed = {_key(name, part.chunk, number) for (name, _), (parts, _) in wanted.items() for part in parts
                  for number in range(_num_leaves(saved["tensors"][name][str(part.chunk)]["value"]))}  # fmt: skip
        tensors: dict[str, Tensor] = {}

        def take(key: str, shape: Sequence[int], read: Callable[[int, int], Tensor]) -> None:
            if key in needed:
                tensors[key] = read(0, math.prod(shape)).view(tuple(shape)).clone()

        def finish() -> None:
            self._numbers.resume({name: from_json(value) for name, value in saved["numbers"].items()})
            missing = needed - tensors.keys()
            if missing:  # as exports leave them out
                self._note_none(checkpoint, sorted({name for name, _ in wanted}))
            found = {} if missing else {
                place: self._joined(saved["tensors"][place[0]], place[0], parts, dims, tensors, checkpoint.step - 1)
                for place, (parts, dims) in wanted.items()
            }  # fmt: skip
            sizes = _sizes_of(self._plan, saved["rows"], checkpoint)
            self._carried.resume({chunk: sizes[chunk] for chunk in self._chunks if sizes[chunk]}, found)

        return take, finish

    @property
    def _chunks(self) -> range:
        """Those of this replica."""
        m = self._plan.microbatches
        return range(self._number * m, (self._number + 1) * m)

    def _wanted(
        self, saved: Mapping[str, Any], checkpoint: Checkpoint
    ) -> dict[tuple[str, int], tuple[list[SavedRows], list[int] | None]]:
        """Attribute and chunk of this replica -> the saved rows that it goes on with, and the dims of them; None: the saved chunk of
        its number. Notes what begins with nothing."""
        rows, found = saved["rows"], dict[tuple[str, int], tuple[list[SavedRows], list[int] | None]]()
        sizes = _sizes_of(self._plan, rows, checkpoint)
        in_doubt: list[str] = []
        for name, records in saved["tensors"].items():
            if sizes == rows:
                for chunk in self._chunks:
                    if str(chunk) in records:
                        found[name, chunk] = (
                            [SavedRows(chunk=chunk, start=0, stop=records[str(chunk)]["rows"])],
                            None,
                        )
            elif (dims := batch_dims(records, rows, checkpoint.step - 1)) is None:
                in_doubt.append(name)
            else:
                anew = rows_anew(rows, sizes)
                found |= {(name, chunk): (anew[chunk], dims) for chunk in self._chunks if anew[chunk]}
        if in_doubt:
            self._notes.append(
                f"A step has {_sizes_text(sizes)} now and had {_sizes_text(rows)} when {checkpoint.path} was saved. {shown_names(in_doubt)} begin without what "
                "forwards had left there, as no dimension is certainly that of the batch. Resume with as many chunks of the same sizes to go on with it."
            )
        return found

    def _joined(
        self, records: Mapping[str, Any], name: str, parts: Sequence[SavedRows], dims: Sequence[int] | None,
        tensors: Mapping[str, Tensor], step: int,
    ) -> LeftValue:  # fmt: skip
        first = records[str(parts[0].chunk)]
        leaves: list[Tensor] = []
        for number in range(_num_leaves(first["value"])):
            found = [tensors[_key(name, part.chunk, number)] for part in parts]
            if dims is not None:
                dim = dims[number]
                found = [each.narrow(dim, part.start, part.stop - part.start) for each, part in zip(found, parts, strict=True)]  # fmt: skip
                leaves.append(torch.cat(found, dim))
            else:
                leaves += found
        rows, step = (
            (first["rows"], first["step"])
            if dims is None
            else (sum(part.stop - part.start for part in parts), step)
        )
        value = _value(first["value"], iter(leaves), self._device)
        return LeftValue(value=value, rows=rows, step=step, resumed=True)

    def _note_left_out(self, left_out: Mapping[str, str]) -> None:
        new = sorted(left_out.keys() - self._told)
        self._told |= left_out.keys()
        if new:
            why = left_out[new[0]]
            instead = "Register it without persistent=False" if why == _NOT_PERSISTENT else "Keep dense tensors, and tuples and lists of them"  # fmt: skip
            self._notes.append(
                f"Checkpoints leave out what forwards keep in {shown_names(new)}: {why}. A resumed run begins there as the model is built. {instead}."
            )

    def _note_none(self, checkpoint: Checkpoint, names: Sequence[str]) -> None:
        if names:
            self._notes.append(
                f"{checkpoint.path} does not hold what forwards leave in attributes ({shown_names(names)}): they begin as the model is built."
            )


def _by_name(entries: Iterator[Any]) -> dict[str, dict[str, tuple[Any, bool]]]:
    """Of [name, chunk, what, resumed] of all ranks: by name and chunk, that of a rank which has not only resumed it, if any."""
    found: dict[str, dict[str, tuple[Any, bool]]] = {}
    for name, chunk, what, resumed in entries:
        known = found.setdefault(name, {}).get(chunk)
        if known is None or (known[1] and not resumed):
            found[name][chunk] = what, resumed
    return found


def _key(name: str, chunk: int, number: int) -> str:
    return f"{CARRIED}{name}/{chunk}/{number}"


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1)


def _record(left: LeftValue, device: torch.device) -> dict[str, Any]:
    value = None if _why_left_out(left.value) else _tree(left.value, device)
    return {"rows": left.rows, "step": left.step, "value": value}


def _tree(value: Any, device: torch.device) -> Any:
    if value is ABSENT:
        return {"absent": []}
    if isinstance(value, Tensor):
        return {"shape": list(value.shape), "on": "device" if value.device == device else "host"}
    if value is None:
        return None
    return {type(value).__name__: [_tree(each, device) for each in value]}


def _value(tree: Any, leaves: Iterator[Tensor], device: torch.device) -> Any:
    if tree is None:
        return None
    if "shape" in tree:
        return next(leaves).to(device if tree["on"] == "device" else "cpu")
    kind, items = next(iter(tree.items()))
    return ABSENT if kind == "absent" else _KINDS[kind](_value(each, leaves, device) for each in items)


def _num_leaves(tree: Any) -> int:
    if not isinstance(tree, Mapping):
        return 0
    return 1 if "shape" in tree else sum(_num_leaves(each) for items in tree.values() for each in items)


def _why_left_out(value: Any) -> str:
    """What a checkpoint cannot hold in a value, if anything."""
    if isinstance(value, tuple | list):
        if type(value) not in _KINDS.values():
            return f"a {type(value).__name__}"
        return next((why for each in value if (why := _why_left_out(each))), "")
    if not isinstance(value, Tensor):
        return ""
    if type(value) is not Tensor or value.layout != torch.strided or value.is_nested:
        return f"a {type(value).__name__} of layout {value.layout}".removesuffix(" of layout torch.strided")
    return "" if value.dtype in DTYPES else f"a tensor of {value.dtype}"


def _sizes_of(plan: Plan, rows: Sequence[int], checkpoint: Checkpoint) -> list[int]:
    """Rows of each chunk of this plan, of a batch that has as many as the newest before the checkpoint."""
    record = checkpoint.values.get("shares", ()) if plan.shares == "measured" else ()
    shares = [each for first, each in record if first < checkpoint.step and len(each) == plan.dp]
    return plan.sizes(sum(rows), tuple(shares[-1]) if shares else ())


def _sizes_text(sizes: Sequence[int]) -> str:
    """
    >>> _sizes_text([8]), _sizes_text([3, 3, 2])
    ('1 chunk of 8 rows', '3 chunks of 2 to 3 rows')
    """
    least, most = min(sizes), max(sizes)
    return f"{format_count(len(sizes), 'chunk')} of {'' if least == most else f'{least} to '}{format_count(most, 'row')}"


def shown_names(names: Sequence[str]) -> str:
    """The first few of them, for a sentence."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
