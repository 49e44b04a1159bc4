"""Every cell of the matrix equals one device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.equality.cells import PARTS, first_cells, parts_of
from tests.equality.models.table import EARLY, MODELS
from tests.equality.running import wrong_in
from tests.equality.settings import Case, named

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export", "dear_memory")]


@pytest.mark.covering("")  # all of them
@pytest.mark.parametrize("name", EARLY)
def test_the_first_cells_of_a_model_equal_one_device(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    check(name, first_cells()[name], tmp_path, monkeypatch)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("name", "part"),
    [
        pytest.param(name, part, marks=pytest.mark.campaign if part else pytest.mark.slow)
        for name in MODELS
        for part in range(PARTS)
    ],
)
@pytest.mark.every
def test_a_part_of_a_model_s_cells_equals_one_device(name: str, part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    first = first_cells().get(name, [])
    check(name, [cell for cell in parts_of(name)[part] if cell not in first], tmp_path, monkeypatch)


def check(name: str, cells: Sequence[Case], directory: Path, patch: pytest.MonkeyPatch) -> None:
    """Runs cells of a model, which keep what they capture; all that is wrong is said at the end."""
    patch.setenv("MESHLOOM_CACHE", str(directory / "cache"))
    wrong = {named(cell): found for cell in cells if (found := wrong_in(MODELS[name], cell, patch))}
    assert not wrong, "\n\n".join(f"{name}, {cell}:\n{found}" for cell, found in wrong.items())
