"""What a step enters may only become less: the numbers of `traced.json`."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from tests.traced import PLANS, VERSIONS, counts_of, entered, written

pytestmark = pytest.mark.processes


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
    assert found == known[plan], f"{plan} enters less than before. Write it: python -m tests.traced --write"
