"""Families trained under pp=2 or under dp=2,pp=2,tp=2 equal one device: two steps in float64, dropout on.

One family runs in the covering subset (and a mixture of experts under a plan with pp in
tests/test_pipeline_plans.py). A third of the families under each of the two plans is `slow`, and the rest is
trained under dp=2,tp=2 (tests/test_divided_families.py).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from meshloom.core.plan import Plan
from meshloom.verify.run import verify
from tests.families import FAMILIES, Family
from tests.reports import largest_error
from tests.test_divided_families import PLAN_OF, TOLERANCE, drawn, lifted, pins_of

COVERING: dict[str, set[str]] = {"pp=2": set(), "grid": {"llama"}}
# where the cheapest cut of a model this small leaves a rank without parameters
CUTS = {"conv3d": "9", "conv1d": "8", "lstm": "head", "gru": "head"}
PLANS = {"pp=2": Plan(pp=2, microbatches=2), "grid": Plan(dp=2, pp=2, tp=2)}

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        pytest.param(
            each, plan, marks=[] if name in COVERING[kind] else [pytest.mark.slow], id=f"{name}-{kind}"
        )
        for name, each in FAMILIES.items()
        for kind, plan in PLANS.items()
        if name in COVERING[kind] or PLAN_OF.get(name) == kind
    ],
)
def test_a_family_equals_one_device(family: Family, plan: Plan):
    job = replace(family.make_job(True), batch_size=3)
    # models this small are left whole by the choice, so that a division drawn at random is asked for
    if plan.tp > 1:
        plan = replace(plan, tp_placements=pins_of(drawn(job, chunk_size=2, num_ranks=plan.tp)))
    elif family.name in CUTS:
        plan = replace(plan, cuts=(CUTS[family.name],))
    report = verify(
        lifted(job),
        plan,
        devices="simulated",
        steps=2,
        dtype=torch.float64,
    )
    assert report is not None
    assert report.passed, report.causes
    assert largest_error(report) <= TOLERANCE
    assert max(report.owned) < 1
