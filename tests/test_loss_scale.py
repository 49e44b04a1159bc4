"""precision=fp16-mixed: the loss scale is that of torch.amp.GradScaler, and an overflow on any rank skips the step on all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshloom.core.errors import CheckpointError, JobError, TrainingError
from meshloom.core.job import Job
from meshloom.core.losses.loss_scale import GROW_AFTER, LossScale
from meshloom.core.plan import Plan
from meshloom.core.random import model_seed, seed_everything
from meshloom.replica.replica_state import full_state
from meshloom.telemetry.progress import QUIET, Listener
from meshloom.train.trainer import Trainer
from tests.fitted import fitted
from tests.loss_scale_jobs import BAD, BATCH, overflowing_job
from tests.precision_jobs import job_of
from tests.processes import on_ranks

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]


def plain_loop(of: Job, num_chunks: int) -> tuple[dict[str, Tensor], Any]:
    """torch's own loop with its GradScaler, over chunks of each batch."""
    seed_everything(model_seed(of.seed))
    model: Any = of.model()
    optimizer: Any = of.optimizer(list(model.named_parameters()))
    scheduler: Any = of.scheduler(optimizer) if of.scheduler else None
    scaler, data, size = torch.amp.GradScaler("cpu"), list(of.data()), BATCH // num_chunks
    for step in range(of.steps):
        batch = [data[index % len(data)] for index in range(step * BATCH, (step + 1) * BATCH)]
        for start in range(0, BATCH, size):
            with torch.autocast("cpu", torch.float16):
                loss: Any = of.loss(model, torch.utils.data.default_collate(batch[start : start + size]))
            scaler.scale(loss * size / BATCH).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scheduler and scaler.get_scale() >= before:  # not a skipped step
            scheduler.step()
        optimizer.zero_grad()
    return {name: each.detach() for name, each in model.named_parameters()}, scaler


def states_of(
    of: Job, plan: str, devices: str = "simulated", **settings: Any
) -> tuple[list[dict[str, Tensor]], list[LossScale | None]]:
    """The state after every step, and the scales of this process's ranks at the end."""
    states: list[dict[str, Tensor]] = []
    with Trainer(
        of, f"{plan},precision=fp16-mixed", devices=devices, cache="off", listener=QUIET, **settings
    ) as trainer:
        for batch in trainer.batches():
            trainer.step(batch)
            states.append({name: each.clone() for name, each in trainer.together(full_state)[0].items()})
        return states, [each.sums.scale for each in trainer.replicas]


QUICK = ["dp=2", "dp=2,zero=3", "tp=2", "pp=2,microbatches=2"]
SLOW = [
    "dp=1", "dp=2,zero=1", "dp=2,zero=2,microbatches=2", "dp=4,zero=3,zero_within=2", "dp=2,exchange=server", "dp=2,exchange=ring",
    "dp=2,exchange=local_sgd", "dp=2,compress=bf16", "dp=2,recompute=full", "dp=2,overlap=false,zero=1", "pp=2,microbatches=2,schedule=gpipe",
    "pp=2,microbatches=2,schedule=interleaved", "pp=2,microbatches=2,schedule=zb-h1", "pp=2,microbatches=2,schedule=zb-v", "dp=2,pp=2,tp=2",
    "dp=2,pp=2,microbatches=2,zero=2", "dp=2,tp=2,zero=3", "dp=2,offload=optimizer",
]  # fmt: skip
PLANS: Sequence[Any] = [*QUICK, *(pytest.param(plan, marks=pytest.mark.slow) for plan in SLOW)]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("place", "part"),
    [pytest.param(10, "boost", id="of a logit"), pytest.param(1, "of_bias", id="of the last stage")],
)
@pytest.mark.slow
def test_an_overflow_on_one_rank_skips_the_step_on_all(plan: str, place: int, part: str):
    of = overflowing_job(place, part)
    states, scales = states_of(of, plan)
    assert set(scales) == {LossScale(scale=2.0**15, good_steps=2, skipped=1)}
    parameters, scaler = plain_loop(of, Plan.parse(plan).num_chunks)
    assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (2.0**15, 2)
    # sums of chunks in another order; along tp, and where gradients travel so, sums of values that were rounded
    tolerance = 1e-2 if "tp=2" in plan or "bf16" in plan else 1e-5
    for name in parameters:
        assert torch.equal(states[BAD][name], states[BAD - 1][name])
        assert not torch.equal(states[BAD + 1][name], states[BAD][name])
        if "local" not in plan:  # each replica clips its own gradients
            torch.testing.assert_close(states[-1][name], parameters[name], rtol=tolerance, atol=tolerance)
    # the forward did run
    assert not torch.equal(states[BAD]["norm.running_mean"], states[BAD - 1]["norm.running_mean"])


def test_the_last_stage_alone_overflows():
    of = overflowing_job(1, "of_bias")
    states, scales = states_of(of, "pp=2,microbatches=2")
    assert set(scales) == {LossScale(scale=2.0**15, good_steps=2, skipped=1)}
    assert all(
        torch.equal(states[BAD][name], states[BAD - 1][name]) for name in ("first.weight", "head.bias")
    )


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=2,zero=1", "dp=2,zero=3", "tp=2", "dp=2,pp=2,zero=1"])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_optimizers_of_whole_parameters_and_their_state_are_left_alone(plan: str, optimizer: str):
    makers: dict[str, Any] = {
        "muon": lambda named: torch.optim.Muon([each for _, each in named if each.dim() == 2], lr=0.02),
        "adamw": lambda named: torch.optim.AdamW([each for _, each in named], lr=2e-3),
    }
    of = overflowing_job(10, optimizer=makers[optimizer], scheduler=None, clip_grad_norm=None, steps=BAD + 1)
    with Trainer(
        of, f"{plan},precision=fp16-mixed", devices="simulated", cache="off", listener=QUIET
    ) as trainer:
        kept: list[list[Tensor]] = []
        for batch in trainer.batches():
            trainer.step(batch)
            kept.append(
                [
                    value.clone()
                    for replica in trainer.replicas
                    for each in replica.updater._optimizers  # pyright: ignore[reportPrivateUsage]
                    for state in each.state.values()
                    for value in state.values()
                ]
                + [each.clone() for each in trainer.together(full_state)[0].values() if each.requires_grad]
            )
    assert kept[0] and all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


def test_small_gradients_survive_only_with_the_scale():
    """Whole layers of gradients are below float16's smallest number, 6e-8."""

    def tiny(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"]) * (batch["y"][:, None] + 1)).float().mean() * 1e-7

    of = replace(job_of("mlp", clip_grad_norm=None), loss=tiny)

    def gradients(precision: str) -> list[Tensor | None]:
        with Trainer(
            of, f"dp=1,precision={precision}", devices="simulated", cache="off", listener=QUIET
        ) as trainer:
            for batch in trainer.batches():
                return trainer.together(lambda each: each.gradients(0, batch.shares[0]))[0].of_owned  # noqa: B023
        return []

    for exact, ours in zip(gradients("float32"), gradients("fp16-mixed"), strict=True):
        assert exact is not None and ours is not None
        assert float((exact - ours).norm()) < 1e-2 * float(exact.norm())


@pytest.mark.parametrize("plan", ["dp=2,zero=1", pytest.param("pp=2,microbatches=2", marks=pytest.mark.slow)])
def test_a_run_goes_on_with_its_scale_under_another_plan(plan: str, tmp_path: Path):
    of = overflowing_job(10, checkpoint_every=3, keep_checkpoints=9)
    whole, scales = states_of(of, "dp=2")
    fitted(of, "dp=2,precision=fp16-mixed", out=tmp_path, listener=QUIET)
    states, resumed = states_of(of, plan, resume=tmp_path / "step-00000003")
    assert resumed[0] == scales[0] == LossScale(scale=2.0**15, good_steps=2, skipped=1)
    for name, each in whole[-1].items():
        torch.testing.assert_close(states[-1][name], each, rtol=1e-5, atol=1e-6)  # sums in another order


@pytest.mark.parametrize(
    "values", [{}, {"scale": "high", "good_steps": 1, "skipped": 0}, {"scale": 4.0, "good_steps": 1}]
)
def test_a_scale_that_is_none_is_refused(values: dict[str, Any]):
    with pytest.raises(CheckpointError, match="loss scale is"):
        LossScale.from_dict(values)


def test_it_grows_and_shrinks_as_torchs():
    """Against torch's scaler, from some steps before it grows, with overflows in two of the steps, saved and resumed before each."""
    ours, scaler = LossScale(good_steps=GROW_AFTER - 5), torch.amp.GradScaler("cpu")
    scaler.load_state_dict(scaler.state_dict() | {"_growth_tracker": GROW_AFTER - 5})
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for step in range(12):
        bad = step in (7, 8)
        scaler.scale((parameter * (math.inf if bad else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        ours = LossScale.from_dict(ours.to_dict()).after(overflowed=bad)
        assert (ours.scale, ours.good_steps) == (
            scaler.get_scale(), scaler.state_dict()["_growth_tracker"],
        )  # fmt: skip
    assert ours.skipped == 2 and ours.scale == 2.0**15


def test_skipped_steps_are_told(tmp_path: Path):
    notes: list[str] = []
    listener = Listener(started=lambda text: None, note=notes.append)
    of = overflowing_job(10)
    summary = fitted(of, "dp=2,precision=fp16-mixed", cache="off", listener=listener)
    assert [note for note in notes if "skipped" in note] == [
        "Step 2 was skipped: gradients overflowed float16. The loss is now scaled by 32768."
    ]
    assert summary.scale == LossScale(scale=2.0**15, good_steps=2, skipped=1)
    assert summary.predicted == summary.counted


@pytest.mark.parametrize("plan", ["dp=2", pytest.param("pp=2,microbatches=2", marks=pytest.mark.slow)])
def test_what_overflows_at_any_scale_is_an_error(plan: str):
    """A loss that is not finite is one once the scale is 1; a gradient that is not, once the scale is float16's smallest number."""

    def broken(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"]).float().abs().mean() * math.inf

    def steep(model: Any, batch: dict[str, Tensor]) -> Tensor:
        zero = model(batch["x"]).float().abs().mean() * 0
        return zero.sqrt()  # 0, with an infinite slope

    def trained(loss: Any) -> None:
        of = job_of("mlp", steps=60, loss=loss)
        fitted(of, f"{plan},precision=fp16-mixed", cache="off", listener=QUIET)

    with pytest.raises(TrainingError, match=r"The loss of step 16 is (inf|nan): rank"):
        trained(broken)
    with pytest.raises(TrainingError, match=r"The gradients of step 40 overflow float16 .* after 40 skipped"):
        trained(steep)


def test_an_optimizer_that_evaluates_is_refused():
    of = job_of("mlp", optimizer=lambda named: torch.optim.LBFGS([each for _, each in named]))
    with pytest.raises(JobError, match="LBFGS evaluates the loss several times in an update"):
        Trainer(of, "dp=1,precision=fp16-mixed", devices="simulated", listener=QUIET)


@pytest.mark.parametrize("plan", ["dp=2", pytest.param("pp=2,microbatches=2", marks=pytest.mark.slow)])
def test_an_operator_without_a_kernel_is_named(plan: str):
    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        returned = model(batch["x"])
        return torch.linalg.det(returned.T @ returned).float()

    with pytest.raises(JobError, match=r"no float16 kernel on cpu \("):
        states_of(job_of("mlp", loss=loss), plan)


def _on_processes(plan: str) -> list[Any]:
    states, scales = states_of(overflowing_job(10), plan, devices="cpu", share=True)
    return [None if scale is None else scale.to_dict() for scale in scales] + [
        torch.equal(states[BAD][name], states[BAD - 1][name]) for name in states[0] if "running" not in name and "num" not in name
    ]  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize("plan", ["dp=2", "pp=2,microbatches=2"])
def test_on_processes(plan: str):
    for scale, *equal in on_ranks(_on_processes, 2, plan, timeout_seconds=200.0):
        assert scale == {"scale": 2.0**15, "good_steps": 2, "skipped": 1}
        assert all(equal)
