"""What a step enters may only become less: the numbers of `traced.json`, which `python -m tests.traced --write` takes down."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.traced import PLANS, VERSIONS, counts_of, entered, written

pytestmark = pytest.mark.processes
PATH = re.compile(r"^\d\. `([a-z_0-9/]+\.py)` `([\w.]+)`", re.MULTILINE)
TEXT = (Path(__file__).parents[1] / "docs/architecture.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("plan", PLANS)
def test_a_step_enters_no_more_than_is_written(plan: str) -> None:
    known = written()
    if known["counted with"] != VERSIONS:
        pytest.skip(
            f"traced.json was counted with {known['counted with']}; python -m tests.traced --write counts with {VERSIONS}"
        )
    found = asdict(counts_of(entered(plan)))
    more = [
        f"{name}: {count}, and {known[plan][name]} are written"
        for name, count in found.items()
        if count > known[plan][name]
    ]
    assert not more, f"{plan} enters more than before; python -m tests.traced --list {plan} lists it: {more}"


@pytest.mark.parametrize("plan", PLANS)
def test_a_step_enters_what_the_architecture_says(plan: str) -> None:
    entered_now = {
        (each.file.removeprefix("meshloom/"), each.name) for rank in entered(plan) for each in rank["step"]
    }
    sections = {part.split("\n", 1)[0]: part for part in TEXT.split("\n### ")[1:]}
    said = [*PATH.findall(sections["Chunks"]), *PATH.findall(sections[f"Under {plan.removesuffix('=2')}"])]
    assert len(said) >= 8
    assert not [each for each in said if each not in entered_now]
