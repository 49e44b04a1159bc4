"""What ranks hold and send by shapes alone is what they held and sent when the plan was rehearsed."""

from __future__ import annotations

import pytest

from meshloom.core.errors import PlanError
from meshloom.core.plan import Plan
from meshloom.data.samples import first_batches
from meshloom.pipeline.stages.choose_cuts import CutChoice
from meshloom.pipeline.stages.plan_cuts import choose_stages
from meshloom.planner.divided import divided
from meshloom.planner.ranks import rank_shares
from meshloom.planner.readings import Reading, Readings
from meshloom.planner.rehearsal.rehearse import rehearse
from meshloom.program.cost.rates import rates_here
from tests.jobs import make_job

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]


@pytest.mark.parametrize(
    "text",
    [
        # a tied head: its gradient goes to the first stage, its value comes back
        "pp=2,tp=2,microbatches=4,tp_placements=*:column",
        "dp=2,tp=2,zero=1,tp_placements=*:row",
        "pp=2,microbatches=2,schedule=interleaved,virtual_stages=2",
        "dp=2,pp=2,microbatches=3,zero=2,bucket_bytes=2000",
    ],
)
@pytest.mark.slow
def test_what_a_rank_holds_and_sends_is_what_it_held_and_sent(text: str):
    plan, job = Plan.parse(text), make_job("gpt", "adamw")
    readings, sizes = Readings(job), plan.largest_share(job.batch_size)
    found = rank_shares(
        readings.of(sizes[0]).program, plan, len(sizes),
        part=divided(readings, plan).part if plan.tp > 1 else None, choice=cut(readings.of(sizes[0]), plan, sizes) if plan.pp > 1 else None,
    )  # fmt: skip
    rehearsed = rehearse(job, plan, threads=1, common_memory=False)
    (batch,) = first_batches(job, 1, sizes[0])
    batch_bytes = sum(each.nbytes for each in batch.values()) * len(sizes)
    for rank, (place, held) in enumerate(zip(rehearsed.places, rehearsed.held, strict=True)):
        if place.dp or place.tp:
            continue
        mine, sent = found[place.pp], rehearsed.steps[-1][rank].num_bytes
        for kind in ("parameters", "gradients", "buffers", "on_the_way", "full", "trained"):
            assert getattr(mine.held, kind) == getattr(held, kind), kind
        # buckets are padded to a multiple of dp
        assert mine.held.optimizer == pytest.approx(held.optimizer, abs=64)
        # A rehearsal counts what is saved of the batch, and not what was received and is not saved.
        received = sum(each.num_bytes.get("pp", 0) for each in found)
        assert held.kept - batch_bytes <= mine.held.kept <= held.kept + received
        rates = 8 if plan.tp > 1 else 0  # a sum by which learning rates are compared
        assert mine.num_bytes.get("tp", 0) + rates == sent.get("tp", 0)
        for axis in ("dp", "pp"):  # besides: flags of who has gradients, and sums of the loss
            assert mine.num_bytes.get(axis, 0) == pytest.approx(sent.get(axis, 0), abs=256), axis


def cut(reading: Reading, plan: Plan, sizes: list[int]) -> CutChoice:
    return choose_stages(reading.program, reading.costs, plan, rates_here("cpu", plan.pp), sizes)


def test_what_shapes_do_not_tell_is_refused():
    readings = Readings(make_job("gpt", "adamw"))
    with pytest.raises(PlanError, match="What ranks of exchange=async hold is not known by shapes alone"):
        rank_shares(readings.of(4).program, Plan.parse("dp=2,exchange=async"), 1)
