"""The cells of a model: the first few have as many values as can be, the others any two that can meet.

They are found greedily among random ones, the same ones every time; other models have others.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache

from tests.covering import Values, all_meetings, meetings
from tests.equality.model import Model
from tests.equality.models.table import EARLY, MODELS
from tests.equality.settings import APART, SETTINGS, fits, refused_for

FIRST, EACH = 2, 40  # cells of a model: of `make test`, and of all
PARTS = 5  # of these, one of which `make test-all` runs
CANDIDATES = 12
SHARP = 0.75  # of cells, in which gradients travel as they are: what is rounded is compared less sharply

# Of every three cells, what one has as it is by itself, so that modules that run as written, and few ranks, are not rare.
_USUAL = (("tp", "pp", "recompute"), ("pp",), ())
_RARE = ("sync_batch_norm", "true")  # few models can have it, so these have it with everything
_RANKS = ("dp", "tp", "pp", "schedule")

Cell = dict[str, str]


@cache
def first_cells() -> Mapping[str, Sequence[Cell]]:
    """Those of `make test`, by model: together they have every value."""
    found, met = dict[str, Sequence[Cell]](), set[Values]()
    for name in EARLY:
        found[name] = _drawn(Drawing(MODELS[name]), 1, FIRST, met)
        met = met.union(*(meetings(cell, 1) for cell in found[name]))
    return found


@cache
def cells_of(name: str) -> Sequence[Cell]:
    """All of the model of this name; those of `make test` first."""
    first = first_cells().get(name, [])
    met = set[Values]().union(*(meetings(cell, 2) for cell in first))
    return [*first, *_drawn(Drawing(MODELS[name]), 2, EACH - len(first), met)]


def parts_of(name: str) -> Sequence[Sequence[Cell]]:
    """All of them, in `PARTS` parts of equal length; what `make test-all` runs comes first."""
    parts = _parts(name)
    return [parts.pop(_turns()[name]), *parts]


def _parts(name: str) -> list[Sequence[Cell]]:
    cells, length = cells_of(name), EACH // PARTS
    return [cells[start : start + length] for start in range(0, EACH, length)]


@cache
def _turns() -> Mapping[str, int]:
    """Of each model, the part in which most values meet that do not meet in those of the models before."""
    turns, met = dict[str, int](), set[Values]()
    for name in MODELS:
        meet = [set[Values]().union(*(meetings(cell, 2) for cell in part)) for part in _parts(name)]
        turns[name] = max(range(PARTS), key=lambda part: len(meet[part] - met))
        met |= meet[turns[name]]
    return turns


def _drawn(drawing: Drawing, strength: int, count: int, met: set[Values]) -> list[Cell]:
    """So many cells, in which most values meet that have not met before: in `met`, then in these cells."""
    possible, found = drawing.possible(strength), list[Cell]()
    new, missing = possible - met, possible
    while len(found) < count:
        wanted = sorted([each for each in new if _RARE in each] or new or missing or possible)
        usual = _USUAL[len(found) % len(_USUAL)]
        drawn = [drawing.completed(dict(drawing.random.choice(wanted)), usual) for _ in range(CANDIDATES)]
        found.append(max(drawn, key=lambda cell: [len(each & meetings(cell, strength)) for each in (new, missing)]))  # fmt: skip
        new, missing = (each - meetings(found[-1], strength) for each in (new, missing))
    return found


class Drawing:
    """Draws cells of `model`: random ones whose values go together."""

    def __init__(self, model: Model) -> None:
        refused = refused_for(model)
        self.model, self.random = model, random.Random(model.name)
        self.values = {name: [value for value in values if value not in refused.get(name, ())] for name, values in SETTINGS.items()}  # fmt: skip

    def possible(self, strength: int) -> set[Values]:
        """What can meet in cells of the model: ranks alone can leave no value of another setting."""
        return {
            each
            for each in all_meetings(self.values, strength)
            if self._completed(dict(each), _RANKS, self.values)
        }

    def completed(self, wanted: Mapping[str, str], usual: Sequence[str]) -> Cell:
        """A random cell that has these values. usual: settings that have their first value where they can."""
        values = {name: self.random.sample(each, len(each)) for name, each in self.values.items()}
        for name in (*usual, *(["reduce"] if self.random.random() < SHARP else [])):
            values[name] = self.values[name]
        rest = [name for name in SETTINGS if name not in _RANKS]
        found = self._completed(dict(wanted), [*_RANKS, *self.random.sample(rest, len(rest))], values)
        assert found is not None
        return {name: found[name] for name in SETTINGS}

    def _completed(self, cell: Cell, names: Sequence[str], values: Mapping[str, Sequence[str]]) -> Cell | None:  # fmt: skip
        """The first cell, in the order of names and values, that has what `cell` has; None if there is none."""
        if not all(self._goes(cell, *each) for each in cell.items()) or not fits(self.model, cell):
            return None
        return self._with(cell, names, values)

    def _with(self, cell: Cell, names: Sequence[str], values: Mapping[str, Sequence[str]]) -> Cell | None:
        if not names:
            return cell
        name, rest = names[0], names[1:]
        if name in cell:
            return self._with(cell, rest, values)
        for value in values[name]:
            if self._goes(cell, name, value):
                more = {**cell, name: value}
                if fits(self.model, more) and (found := self._with(more, rest, values)):
                    return found
        return None

    def _goes(self, cell: Cell, name: str, value: str) -> bool:
        """Whether a value goes with those of other settings."""
        return not any(cell.get(other) in refused for other, refused in _APART[name, value])


def _apart() -> Mapping[tuple[str, str], list[tuple[str, frozenset[str]]]]:
    """For each value of a setting, the values of others that do not go with it."""
    found: defaultdict[tuple[str, str], list[tuple[str, frozenset[str]]]] = defaultdict(list)
    for pair in APART:
        for (name, values), (other, refused) in (pair, pair[::-1]):
            for value in values:
                found[name, value].append((other, frozenset(refused)))
    return found


_APART = _apart()
