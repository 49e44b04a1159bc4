"""Published models at the sizes that people train are described under every plan, and what docs/published.md
says of them is so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.published import PUBLISHED
from tests.published.__main__ import FILE, lines_of
from tests.published.row import Rows, plans_of

pytestmark = pytest.mark.usefixtures("silent_export", "_alone")
FAST = ("recommender",)
TEXT = FILE.read_text() if FILE.exists() else ""
WRITTEN = [name for name in PUBLISHED if f"| {name} | " in TEXT]


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No machine was measured in this home."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)


@pytest.mark.timeout(1200)  # Mamba's loop is long
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long if name in FAST else pytest.mark.slow) for name in WRITTEN],
)
@pytest.mark.slow
def test_a_model_is_described_as_the_table_says(name: str):
    model = PUBLISHED[name]
    rows = Rows(model)
    for plan in plans_of(model):
        line, whole = lines_of(model, rows.num_operators, rows.row(plan))
        assert f"{line} " in TEXT, f"{line}: run python -m tests.published '{name}'"
        assert all(each in TEXT for each in whole)


def test_dense_transformers_are_divided_but_for_one_percent():
    """Of parameters and of FLOPs, under every plan with tp."""
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in TEXT.splitlines()
        if line.startswith("| ") and "tp=" in line
    ]
    dense = [row for row in rows if row[0] in PUBLISHED and PUBLISHED[row[0]].dense and len(row) > 6]
    assert dense
    for name, _, _, plan, parameters, flops, *_ in dense:
        assert min(float(share.rstrip("%")) for share in (parameters, flops)) >= 99.0, (name, plan)


def test_a_hundred_and_thirty_thousand_tokens_are_the_same_program():
    """LLaMA 1B: as many operators as for 4,096 tokens, so that reading and dividing it takes as long."""
    short, long = (
        [line.split(" | ")[2] for line in TEXT.splitlines() if line.startswith(f"| {name} | 1 x")]
        for name in ("llama-1b", "llama-1b, long")
    )
    assert short == long != []
