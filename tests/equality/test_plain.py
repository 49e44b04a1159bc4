"""Twelve cells against a plain loop."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import meshloom as ml
from tests.equality.cells import EACH, cells_of
from tests.equality.models.table import MODELS
from tests.equality.plain import train_plainly
from tests.equality.settings import Case, job_of, named, plan_of

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export", "dear_memory")]
SEED, NUM_CELLS = 58, 12
PER_PARAMETER = ("adafactor",)  # an update has the norm of the whole tensor in it


def is_plain(case: Case) -> bool:
    """Whether the loop does what the cell's job does: it does not know the order of an epoch, and rounds nothing that travels."""
    return case["order"] == "given" and case["reduce"] == "own"


def drawn_cells() -> list[tuple[str, Case]]:
    """Of twelve models, each a cell."""
    drawing = random.Random(SEED)
    names = [name for name, model in MODELS.items() if not model.interacts]
    chosen = drawing.sample(names, NUM_CELLS)
    return [(name, drawing.choice([cell for cell in cells_of(name) if is_plain(cell)])) for name in chosen]


@pytest.mark.parametrize("number", [0, *(pytest.param(each, marks=pytest.mark.slow) for each in range(1, NUM_CELLS))])  # fmt: skip
@pytest.mark.every
def test_a_cell_equals_a_plain_loop(number: int, tmp_path: Path) -> None:
    name, cell = drawn_cells()[number]
    torch.manual_seed(number)
    start = MODELS[name].build()
    save_file(
        {key: each.detach().clone() for key, each in start.state_dict().items()},
        tmp_path / "start.safetensors",
    )
    job = job_of(MODELS[name], cell)
    losses, expected, clear = train_plainly(job, start.double().train())
    job = replace(job, weights=tmp_path / "start.safetensors")
    with ml.Trainer(job, plan_of(MODELS[name], cell), devices="simulated", dtype=torch.float64, out=tmp_path / "run", share=True) as trainer:  # fmt: skip
        found = [trainer.step(batch) for batch in trainer.batches()]
        state = load_file(trainer.save() / "model.safetensors")
    if cell["optimizer"] in PER_PARAMETER:  # noise in one element reaches all
        clear = {key: each & each.all() for key, each in clear.items()}
    rounded = name.startswith("hf_")  # its norms compute in float32, which the loop leaves to them
    # float64: sums in another order
    assert found == pytest.approx(losses, rel=1e-6 if rounded else 1e-12), f"{name}, {named(cell)}"
    assert sum(int(each.sum()) for each in clear.values()) > 0.5 * sum(
        each.numel() for each in clear.values()
    )
    wrong = [
        key for key, each in expected.items() if _differs(state[key], each, clear.get(key), rounded=rounded)
    ]
    assert not wrong, f"{name}, {named(cell)}: {wrong}"


def _differs(one: Tensor, other: Tensor, where: Tensor | None, *, rounded: bool) -> bool:
    near = torch.isclose(one, other, rtol=1e-5 if rounded else 1e-10, atol=1e-7 if rounded else 1e-12)
    return not bool((near if where is None else near | ~where).all())


def test_cells_are_of_twelve_models() -> None:
    assert len({name for name, _ in drawn_cells()}) == NUM_CELLS
    assert all(len(cells_of(name)) == EACH for name, _ in drawn_cells())
