"""Tensors that a forward leaves in plain attributes for the next one: the hidden state of a recurrent layer that is trained
over consecutive parts of long sequences, a memory of earlier segments.

    out, hidden = self.rnn(x, self.hidden)
    self.hidden = hidden.detach()

Chunk k of a step finds what chunk k of the step before has left (docs/buffers.md), so that rows of a batch go on with
their own state, under every plan. Where a forward writes to the tensor or the list itself (`self.count += 1`), chunks get copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from meshloom.core.losses.turns import LossTurn
from meshloom.core.modules.carried_attributes import carried_tensors, carrying_places, is_carried, writes_to
from meshloom.data.chunks import Chunk

ABSENT: Any = object()  # in place of the value of an attribute that a module does not have
_Mark = tuple[Any, list[tuple[Tensor, int]]]


@dataclass(frozen=True, kw_only=True)
class LeftValue:
    """What the forward of a chunk of `rows` samples in step `step` has left in an attribute. resumed: it comes from a checkpoint."""

    value: Any
    rows: int
    step: int
    resumed: bool = False


class CarriedTensors:
    """Those of `model`. names: of their attributes, with the paths of their modules."""

    def __init__(self, model: nn.Module) -> None:
        places = carrying_places(model)
        self._places = [(module, name) for _, module, name in places]
        self.names = [f"{path}.{name}" if path else name for path, _, name in places]
        self._initial = self._now()
        # copies of these until the first turn is over: by then forwards have shown to which attributes they write in place
        self._untouched = [_copied(value) for value in self._initial]
        self._written: set[int] = set()  # their numbers
        self._moment: tuple[int, LossTurn] | None = None  # of the newest chunk: its step and turn
        # chunk -> number of an attribute -> what it finds in this turn; what it has left in it
        self._found: dict[int, dict[int, LeftValue]] = {}
        self._left: dict[int, dict[int, LeftValue]] = {}
        self._rows: dict[int, int] = {}  # of the chunks of this step

    @contextmanager
    def chunk(self, chunk: Chunk, turn: LossTurn) -> Iterator[None]:
        """Around a forward of a chunk, or of some of its stages. The first one in a turn counts: others only ask."""
        if not self._places:
            yield
            return
        if (chunk.step, turn) != self._moment:
            self._begin(chunk.step, turn)
        self._rows[chunk.index] = chunk.samples
        self.put_back(chunk.index)
        before = [_mark(value) for value in self._now()]
        yield
        self._note_written(before)
        left = self._left.setdefault(chunk.index, {})
        for number, (was, now) in enumerate(zip(before, self._now(), strict=True)):
            if number not in left and _is_kept(now) and not _is_same(was, _mark(now)):
                left[number] = LeftValue(value=now, rows=chunk.samples, step=chunk.step)

    def put_back(self, index: int) -> None:
        """As the chunk found them in this turn."""
        found = self._found.get(index, {})
        self._put({number: each.value for number, each in found.items()})

    def clear(self) -> None:
        """As before the first step, for what is not a chunk of a step and may write to what it finds."""
        self._put({}, copies=True)

    def rows(self) -> Mapping[int, int]:
        """Samples of each chunk of the newest step that ran here."""
        return self._rows

    def left(self) -> Iterator[tuple[str, int, LeftValue]]:
        """What chunks have left so far, between steps: the name of an attribute, the chunk, the newest value."""
        for index in sorted({*self._found, *self._left}):
            values = {**self._found.get(index, {}), **self._left.get(index, {})}
            for number, value in sorted(values.items()):
                yield self.names[number], index, value

    def resume(self, rows: Mapping[int, int], values: Mapping[tuple[str, int], LeftValue]) -> None:
        """Before the first step: what each chunk finds in it, by attribute and chunk. rows: as `rows` gives them."""
        self._rows = dict(rows)
        for (name, index), value in values.items():
            if name in self.names:
                self._found.setdefault(index, {})[self.names.index(name)] = value

    def _begin(self, step: int, turn: LossTurn) -> None:
        if self._moment is None or self._moment[0] != step:
            self._rows = {}
        if self._moment is not None:
            self._untouched = []
        self._moment = step, turn
        for index, left in self._left.items():
            self._found.setdefault(index, {}).update(left)
        self._left = {}

    def _now(self) -> list[Any]:
        return [vars(module).get(name, ABSENT) for module, name in self._places]

    def _note_written(self, marks: Sequence[_Mark]) -> None:
        """Whose values have been written to since they were marked; they may be what all chunks find at first."""
        for number, was in enumerate(marks):
            if not _is_same(was, _mark(was[0])):
                if number not in self._written and self._untouched:
                    self._initial[number] = self._untouched[number]
                self._written.add(number)

    def _put(self, values: Mapping[int, Any], *, copies: bool = False) -> None:
        """values: by number of an attribute, in place of those before the first step. copies: of all, not only of those that are
        known to be written to."""
        for number, ((module, name), now) in enumerate(zip(self._places, self._now(), strict=True)):
            value = values.get(number, self._initial[number])
            if now is value or not _is_kept(now):
                continue  # numbers, texts and others are not carried
            if value is ABSENT:
                del vars(module)[name]
            else:
                vars(module)[name] = _copied(value) if copies or number in self._written else value


def _is_kept(value: Any) -> bool:
    return value is ABSENT or is_carried(value)


def _mark(value: Any) -> _Mark:
    """What tells whether a value is another one later, or has been written to."""
    return value, [(each, writes_to(each)) for each in carried_tensors(value)]


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return type(value)(map(_copied, value)) if type(value) in (tuple, list) else value


def _is_same(one: _Mark, other: _Mark) -> bool:
    return (
        one[0] is other[0]
        and len(one[1]) == len(other[1])
        and all(a is b and before == after for (a, before), (b, after) in zip(one[1], other[1], strict=True))
    )
