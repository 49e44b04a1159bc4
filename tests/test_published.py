"""Published models at the sizes that people train are described under every plan, by shapes alone."""

from __future__ import annotations

import pytest

from tests.published import PUBLISHED
from tests.published.row import Rows, plans_of

pytestmark = pytest.mark.usefixtures("silent_export", "unmeasured")
FAST = ("recommender",)


@pytest.mark.timeout(1200)  # Mamba's loop is long
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in PUBLISHED],
)
@pytest.mark.long
def test_published_models_are_described(name: str):
    """Dense transformers but for one percent of parameters and FLOPs, under every plan with tp."""
    model = PUBLISHED[name]
    rows = Rows(model)
    alone = rows.row("dp=1").memory
    for plan in plans_of(model):
        row = rows.row(plan)
        axes = {axis for axis in ("dp", "pp", "tp") if f"{axis}=" in plan}
        assert row.num_bytes.keys() == axes - ({"tp"} if row.parameters == 0 else set()), plan
        assert all(row.num_bytes.values())
        if model.dense and "tp=" in plan:
            assert min(row.parameters, row.flops) >= 0.99, (plan, row.whole)
            assert row.memory < alone, plan


@pytest.mark.slow
def test_a_hundred_and_thirty_thousand_tokens_are_the_same_program():
    """LLaMA 1B: as many operators as for 4,096 tokens but for the mask, which is made once, so that reading and
    dividing it takes as long."""
    short, long = (Rows(PUBLISHED[name]).num_operators for name in ("llama-1b", "llama-1b, long"))
    assert short <= long < short + 64
