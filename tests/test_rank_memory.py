"""A rank's peak of memory, predicted by shapes alone, is the most bytes of tensors that it had at one time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from meshloom.core.plan import Plan
from meshloom.planner.fitting import predicted_ranks
from meshloom.planner.memory.rank_memory import PHASES, RankMemory
from meshloom.planner.readings import Readings
from meshloom.planner.rehearsal.held import held_by
from meshloom.train.trainer import Trainer
from tests.live_bytes import blocks_job, is_followed_from_the_start, live_bytes

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]
# Numbers given to operators as tensors, flags, a rank's uneven share of slices, what a stage receives.
CLOSE = 0.03
# PowerSGD: factors of matrices. Gradients of units on their way.
ROUGH = 0.1


def predicted(text: str, *, one_copy: bool = False) -> tuple[RankMemory, ...]:
    return predicted_ranks(Readings(blocks_job()), Plan.parse(text), one_copy=one_copy)


@pytest.mark.parametrize(
    ("text", "tolerance"),
    [
        ("dp=2,zero=1", CLOSE),
        ("dp=2,zero=3,microbatches=2", CLOSE),
        ("pp=2,microbatches=4", CLOSE),
        ("dp=2,tp=2,zero=1", CLOSE),
        ("dp=1", CLOSE),
        ("dp=2", CLOSE),
        ("dp=2,zero=2", CLOSE),
        ("dp=2,zero=2,microbatches=2,bucket_bytes=100000", CLOSE),
        ("dp=2,zero=3", CLOSE),
        ("tp=2", CLOSE),
        ("pp=2,tp=2,microbatches=2", CLOSE),
        ("dp=2,compress=bf16", CLOSE),
        ("dp=2,reduce=bf16", CLOSE),
        ("dp=2,zero=1,reduce=bf16", CLOSE),
        ("dp=2,zero=2,reduce=bf16", ROUGH),
        ("dp=2,zero=3,reduce=bf16", CLOSE),
        ("dp=2,compress=topk:0.1", ROUGH),
        ("dp=2,compress=powersgd:2", ROUGH),
        ("dp=2,exchange=diloco", ROUGH),
        ("dp=2,exchange=local_sgd", CLOSE),
        ("dp=1,recompute=full", CLOSE),
        ("dp=2,recompute=selective", CLOSE),
        ("pp=2,microbatches=4,recompute=full", CLOSE),
        ("tp=2,recompute=full", CLOSE),
        ("pp=2,microbatches=4,schedule=gpipe", CLOSE),
        ("pp=2,microbatches=4,schedule=interleaved", CLOSE),
        ("pp=2,microbatches=4,schedule=zb-h1", CLOSE),
        ("pp=2,microbatches=4,schedule=zb-v", CLOSE),
        ("dp=2,pp=2,tp=2,microbatches=2,recompute=selective", CLOSE),
        ("dp=2,pp=2,tp=2,microbatches=2", CLOSE),
        ("dp=2,pp=2,microbatches=4,zero=1", CLOSE),
        ("dp=2,tp=2,microbatches=2,zero=2", CLOSE),
        ("dp=2,tp=2,microbatches=2,zero=3", ROUGH),
    ],
)
@pytest.mark.slow
def test_the_peak_of_a_step_is_what_each_rank_had(text: str, tolerance: float):
    plan, found = Plan.parse(text), predicted(text)
    for rank, live in enumerate(live_bytes(blocks_job(), plan)):
        mine = found[plan.mesh.place(rank).pp]
        assert mine.phases["step"] == pytest.approx(live["step"], rel=tolerance), f"rank {rank}"
        if is_followed_from_the_start(plan):
            # an upper bound: old tensors are freed one by one while flat ones are filled
            assert 0.95 * live["start-up"] <= mine.phases["start-up"] <= 1.3 * live["start-up"], (
                f"rank {rank}"
            )
        if plan.zero == 3:  # slices of gradients have gone with the update
            stays = mine.parameters + mine.buffers + mine.optimizer
            assert live["between"] <= (1 + tolerance) * stays, f"rank {rank}"


class Unknown(torch.optim.AdamW):
    """Not on the lists."""


@pytest.mark.parametrize("text", ["tp=2", "dp=2,zero=3", "dp=2,zero=1", "dp=2,zero=2", "dp=2,tp=2"])
@pytest.mark.slow
def test_what_an_unknown_optimizer_gathers_is_on_every_rank(text: str):
    """Whole parameters and gradients beside the rank's parts, and all of the state: for AdamW's the guess is right. What it
    computes with in an update is not known."""
    plan, job = (
        Plan.parse(text),
        replace(blocks_job(), optimizer=lambda named: Unknown([each for _, each in named])),
    )
    (mine,), (alone,) = (predicted_ranks(Readings(job), each, one_copy=False) for each in (plan, Plan()))
    (known,) = predicted(text)
    whole = alone.parameters
    assert mine.parameters == known.parameters + (whole if plan.tp > 1 or plan.zero == 3 else 0)
    assert mine.gradients == known.gradients + (whole if plan.tp > 1 or plan.zero > 1 else 0)
    assert mine.optimizer == pytest.approx(2 * whole, rel=CLOSE)
    live = max(each["step"] for each in live_bytes(job, plan))
    assert 0.75 * live < mine.phases["step"] < 1.01 * live
    with Trainer(job, plan, devices="simulated") as trainer:
        trainer.fit()
        held = held_by(trainer.replicas[0], 0, 2.0)
    assert (held.parameters, held.gradients, held.optimizer) == pytest.approx(
        (mine.parameters, mine.gradients, mine.optimizer), rel=CLOSE
    )


@pytest.mark.parametrize("text", ["dp=1", "dp=2", "dp=2,zero=1", "dp=2,zero=3"])
def test_a_copy_for_checkpoints_in_the_background_lies_beside_a_step(text: str):
    """Of parameters and state, which replicas divide, and of buffers. On other devices it is in the host's memory."""
    plan, readings = Plan.parse(text), Readings(replace(blocks_job(), checkpoint="background"))
    (mine,), (alone,) = (predicted_ranks(readings, each) for each in (plan, Plan()))
    copied = mine.phases["checkpoint"] - mine.phases["step"]
    assert copied == pytest.approx((alone.parameters + alone.optimizer) / plan.dp + alone.buffers, rel=CLOSE)


def test_what_is_offloaded_is_saved_in_the_foreground():
    readings = Readings(replace(blocks_job(), checkpoint="background"))
    (mine,) = predicted_ranks(readings, Plan.parse("dp=2,zero=1,offload=optimizer"))
    assert mine.phases["checkpoint"] < mine.phases["step"]


@pytest.mark.slow
def test_offloaded_state_is_in_no_phase_but_for_a_window():
    """What is followed here counts mapped memory, too."""
    plan = "dp=2,zero=1,offload=optimizer"
    (mine,), (own,) = predicted(plan), predicted("dp=2,zero=1")
    assert mine.optimizer == 0 and mine.offloaded == own.optimizer
    assert mine.phases["evaluation"] == own.phases["evaluation"] - own.optimizer
    live = live_bytes(blocks_job(), Plan.parse(plan))[0]
    assert mine.phases["step"] + mine.offloaded == pytest.approx(live["step"], rel=CLOSE)


@pytest.mark.slow
def test_phases_and_kinds_of_a_rank():
    alone, three = predicted("dp=1")[0], predicted("dp=2,zero=3")[0]
    assert tuple(alone.phases) == tuple(three.phases) == PHASES
    # what is saved is held in a step alone
    assert alone.phases["step"] > alone.phases["evaluation"] > alone.phases["checkpoint"]
    assert alone.peak == alone.phases["step"] and alone.phase == "step"
    # rank 0 of a verification runs one device's steps beside its own
    assert alone.phases["verification"] > 2 * alone.phases["checkpoint"]
    for kind in ("parameters", "optimizer", "gradients"):
        assert getattr(three, kind) == pytest.approx(
            getattr(alone, kind) / 2, abs=16
        )  # a count for each parameter
    assert three.exchange > 0 == alone.exchange


@pytest.mark.slow
def test_ranks_of_a_host_are_counted_their_share_of_the_one_copy():
    each, own = predicted("dp=2", one_copy=True)[0], predicted("dp=2")[0]
    assert (each.parameters, each.optimizer) == (-(-own.parameters // 2), -(-own.optimizer // 2))
    assert each.gradients + each.exchange == own.gradients + own.exchange
    assert each.phases["step"] < own.phases["step"]
