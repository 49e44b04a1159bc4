"""The cells cover the settings, and the matrix can fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

import meshloom.tensor_parallel.division
from meshloom.comm.group import ReduceOp, Work
from meshloom.comm.recording import RecordedGroup
from meshloom.core.errors import MeshloomError
from meshloom.program.cost.rates import Rates
from meshloom.replica.loss_sums import LossSums
from tests.covering import all_meetings, meetings
from tests.equality.cells import (
    EACH,
    FIRST,
    PARTS,
    Drawing,
    cells_of,
    first_cells,
    parts_of,
)
from tests.equality.models.table import EARLY, MODELS
from tests.equality.running import wrong_in
from tests.equality.settings import REFUSED, SETTINGS, SKIPPED, is_skipped, plan_of

USUAL = {name: values[0] for name, values in SETTINGS.items()}


def test_there_are_as_many_models_and_cells_as_are_said() -> None:
    assert len(EARLY) == len(set(EARLY)) == 20
    assert len(MODELS) >= 60 and 2_900 <= len(MODELS) * EACH <= 3_100
    assert len(SKIPPED) <= 10 and EACH % PARTS == 0
    skipped = sum(is_skipped(MODELS[name], cell) for name, cells in first_cells().items() for cell in cells)
    assert skipped < 0.25 * sum(map(len, first_cells().values()))


def test_the_first_cells_of_all_have_every_value() -> None:
    met = set().union(*(meetings(cell, 1) for cells in first_cells().values() for cell in cells))
    assert met == all_meetings(SETTINGS, 1)
    assert {name: len(cells) for name, cells in first_cells().items()} == dict.fromkeys(EARLY, FIRST)


@pytest.mark.slow
def test_any_two_values_that_go_together_meet() -> None:
    in_all, in_parts, possible = set[Any](), set[Any](), set[Any]()
    for name, model in MODELS.items():
        possible |= Drawing(model).possible(2)
        in_all |= set().union(*(meetings(cell, 2) for cell in cells_of(name)))
        in_parts |= set().union(*(meetings(cell, 2) for cell in parts_of(name)[0]))
        alone = set().union(*(meetings(cell, 1) for cell in cells_of(name)))
        assert alone == Drawing(model).possible(1), name
    assert in_all == possible
    assert len(possible - in_parts) < 0.005 * len(possible)
    apart = all_meetings(SETTINGS, 2) - possible
    assert len(apart) < 0.1 * len(possible)


@pytest.mark.long
@pytest.mark.parametrize("name", ["mlp", "batch_normed", "skip_gram"])
def test_every_cell_is_a_plan(name: str) -> None:
    for cell in cells_of(name):
        plan_of(MODELS[name], cell)


def test_what_does_not_go_together_is_refused() -> None:
    for (one, values), (other, refused) in REFUSED:
        ranks = {"dp": "2", "pp": "2" if "schedule" in (one, other) else "1"}
        for value in values:
            for another in refused:
                with pytest.raises(MeshloomError):
                    plan_of(MODELS["mlp"], {**USUAL, **ranks, one: value, other: another})


def lose_sums(axis: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Ranks along the axis keep what they have where it should be added up."""
    real = RecordedGroup.all_reduce

    def all_reduce(group: RecordedGroup, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        return real(group, tensor.clone() if group.axis == axis else tensor, op)

    return lambda patch: patch.setattr(RecordedGroup, "all_reduce", all_reduce)


def weigh_wrongly(patch: pytest.MonkeyPatch) -> None:
    """The mean is over a millionth more than there is."""
    real: Any = LossSums.divisor
    patch.setattr(LossSums, "divisor", lambda sums, batch: real(sums, batch) * (1 + 1e-6))


def count_twice(patch: pytest.MonkeyPatch) -> None:
    """What is sent is counted again."""
    real: Any = RecordedGroup._start

    def start(group: RecordedGroup, name: str, num_bytes: int, *arguments: Any) -> Any:
        return real(group, name, 2 * num_bytes, *arguments)

    patch.setattr(RecordedGroup, "_start", start)


def divide_nothing(patch: pytest.MonkeyPatch) -> None:
    """A collective takes a year."""
    rates = Rates(start_seconds=1e-6, latency_seconds=3e7, memory_price=0.0)
    patch.setattr(meshloom.tensor_parallel.division, "rates_for", lambda *_: rates)


MISTAKES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], dict[str, str], str]] = {
    "no sum along dp": (lose_sums("dp"), {"dp": "2"}, "DIFFERS"),
    "no sum along tp": (lose_sums("tp"), {"tp": "2"}, "DIFFERS"),
    "a wrong weight": (weigh_wrongly, {"microbatches": "2"}, "DIFFERS"),
    "bytes counted twice": (count_twice, {"dp": "2"}, "was predicted"),
    "nothing divided": (divide_nothing, {"tp": "2"}, "no parameter is divided along tp"),
}


@pytest.mark.long
@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.usefixtures("silent_export", "dear_memory")
def test_a_mistake_makes_a_cell_fail(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, settings, said = MISTAKES[mistake]
    plant(monkeypatch)
    assert said in wrong_in(MODELS["mlp"], {**USUAL, **settings}, monkeypatch)
