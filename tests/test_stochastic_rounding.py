"""precision=bf16-stochastic: updates in float32 that are rounded by chance, without bias and alike under every plan."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshloom.comm.pieces import Pieces
from meshloom.comm.simulated import simulated_groups
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.exchange.exchange import Slice
from meshloom.optimizer.bfloat16 import stochastic
from meshloom.optimizer.bfloat16.lowered import lowered
from meshloom.optimizer.bfloat16.masters import Masters, masters_of
from meshloom.optimizer.bfloat16.stochastic import StochasticRounding, draws, rounded
from meshloom.parameters.shards import Shards
from meshloom.planner.memory.memory import predict_memory
from meshloom.program.capture.capture import capture
from meshloom.replica.replica_state import full_state
from meshloom.train.trainer import Trainer
from meshloom.verify.reference.masters import rounded_by_chance
from meshloom.verify.run import verify
from tests.precision_jobs import job_of
from tests.test_memory import job_and_batches

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def by_chance(plan: str) -> Plan:
    return Plan.parse(f"{plan},precision=bf16-stochastic")


def neighbours(value: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 values around each float32, the one nearer to 0 first, in float64."""
    near = (value.view(torch.int32) & ~0xFFFF).view(torch.float32)
    far = (near.view(torch.int32) + 2**16).view(torch.float32)
    return near.double(), far.double()


@pytest.mark.long
def test_the_mean_of_many_roundings_is_the_value():
    generator = torch.Generator().manual_seed(3)
    scale = 10.0 ** torch.randint(-20, 20, (257,), generator=generator)
    values = torch.randn(257, generator=generator) * scale
    times, index = 4000, torch.arange(257)
    total = torch.zeros(257, dtype=torch.float64)
    for key in range(times):
        found = rounded(values, 1000003 * key, index).double()
        near, far = neighbours(values)
        assert bool(((found == near) | (found == far)).all())
        total += found
    near, far = neighbours(values)
    chance = (values.double() - near) / (far - near)
    standard = (far - near).abs() * (chance * (1 - chance)).sqrt() / math.sqrt(times)
    away = (total / times - values.double()).abs() / standard.clamp_min(1e-300)
    assert float(away.max()) < 4.5 and 0.8 < float((away**2).mean()) < 1.2  # of 257 normal numbers


def test_draws_are_even_and_unrelated():
    found = torch.stack([draws(key, torch.arange(4096)) for key in (0, 1, 2**62)]).double() / 2**16
    assert abs(float(found.mean()) - 0.5) < 0.01 and abs(float(found.var()) - 1 / 12) < 0.002
    related = torch.corrcoef(torch.cat([found, found[:1].roll(1, 1)]))
    assert float((related - torch.eye(4)).abs().max()) < 0.08


def test_values_that_bfloat16_has_stay_and_others_are_no_numbers():
    exact = torch.randn(500).to(torch.bfloat16)
    assert torch.equal(rounded(exact.float(), 5, torch.arange(500)), exact)
    odd = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-42, -3e38])
    found = rounded(odd, 5, torch.arange(7))
    assert found[:2].tolist() == [math.inf, -math.inf] and bool(found[2].isnan())
    assert found[3:5].tolist() == [0.0, 0.0] and bool(torch.signbit(found[4]))


def test_both_implementations_round_alike():
    values = torch.randn(1000) * 10.0 ** torch.randint(-30, 30, (1000,))
    rounding = StochasticRounding(11, lambda: 3)
    for update in range(2):
        rounding.begin()
        whole = Slice("layer.weight", nn.Parameter(values), 0, 1000)
        found = rounding.rounded(values, whole, Shards({}, None))
        assert torch.equal(found, rounded_by_chance(values, 11, 3, update, "layer.weight"))


def test_slices_and_shards_round_as_the_whole_does():
    values = torch.randn(6, 10)
    rounding = StochasticRounding(2, lambda: 0)
    rounding.begin()

    def of(value: Tensor, start: int, stop: int, shards: Shards) -> Tensor:
        return rounding.rounded(
            value.reshape(-1)[start:stop], Slice("w", nn.Parameter(value), start, stop), shards
        )

    whole = of(values, 0, 60, Shards({}, None))
    assert torch.equal(of(values, 13, 41, Shards({}, None)), whole[13:41])
    pieces = Pieces((6, 10), ((None, ((0, 4),)), (None, ((4, 10),))))
    for rank, group in enumerate(simulated_groups(2)):
        shards = Shards({"w": pieces}, group)
        part = shards.take("w", values)
        expected = shards.take("w", whole.view(6, 10)).reshape(-1)
        assert torch.equal(of(part, 0, part.numel(), shards), expected), rank
        assert torch.equal(of(part, 3, 9, shards), expected[3:9])


class _Exact(nn.Module):
    """Its gradients are sums of small whole numbers, so that their order does not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.rand(33)), nn.Parameter(torch.rand(7, 5))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.second).sum(1) + self.first.sum()


def _exact_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    out = model(batch["x"].sign())
    return out.float().sum(), torch.ones_like(out).float().sum()


def state_after(job: Job, plan: str, **settings: Any) -> dict[str, Tensor]:
    with Trainer(job, by_chance(plan), devices="simulated", cache="off", **settings) as trainer:
        trainer.fit()
        return {name: each.clone() for name, each in trainer.together(full_state)[0].items()}


@pytest.mark.parametrize(
    "plans",
    [
        ["dp=1", "dp=2", "dp=2,zero=1"],
        slow(["dp=1", "dp=2,zero=2,microbatches=2", "dp=3,zero=3", "pp=2,microbatches=2", "tp=2", "tp=2,dp=2,zero=3"]),
    ],
)  # fmt: skip
@pytest.mark.long
def test_equal_gradients_lead_to_equal_bits_under_every_plan(plans: list[str]):
    job = job_of(
        "mlp", clip_grad_norm=None, optimizer=lambda named: torch.optim.SGD(named, lr=1e-4, momentum=0.5)
    )
    job = replace(job, model=_Exact, loss=_exact_loss)
    found = [state_after(job, plan) for plan in plans]
    for other in found[1:]:
        assert all(torch.equal(other[name], each) for name, each in found[0].items())
    assert {each.dtype for each in found[0].values()} == {torch.bfloat16}


@pytest.mark.long
def test_verify_compares_with_one_device_that_rounds_by_the_same_draws():
    report = verify(job_of("mlp"), by_chance("dp=2,zero=1,microbatches=2"), devices="simulated", steps=2)
    assert report and report.passed and "rounded by the same draws" in report.autocast


@pytest.mark.parametrize("plan", ["dp=2,zero=1", slow("dp=2,zero=3"), slow("pp=2,microbatches=2")])
@pytest.mark.long
def test_rounding_to_nearest_is_found(plan: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stochastic, "rounded", lambda value, key, index: value.to(torch.bfloat16))
    report = verify(job_of("mlp"), by_chance(plan), devices="simulated", steps=1)
    assert report and not report.passed
    assert all(step.failed("parameter") or step.failed("update") for step in report.steps)


@pytest.mark.parametrize(("saved", "resumed"), [("dp=2,zero=1", "dp=2"), slow("dp=2,zero=3", "dp=2,zero=1")])
@pytest.mark.long
def test_a_resumed_run_goes_on_with_the_same_bits(saved: str, resumed: str, tmp_path: Path):
    job = job_of("mlp", steps=4, checkpoint_every=2)
    whole = state_after(job, saved, out=tmp_path)
    again = state_after(job, resumed, resume=tmp_path / "step-00000002")
    assert all(torch.equal(again[name], whole[name]) for name in whole)


@pytest.mark.long
def test_nothing_is_kept_between_updates_but_state_in_float32():
    with Trainer(job_of("mlp"), by_chance("dp=2,zero=1"), devices="simulated") as trainer:
        trainer.step(next(iter(trainer.batches())))
        for replica in trainer.replicas:
            masters = masters_of(replica.exchange)
            assert isinstance(masters, Masters) and masters.rounding and not masters.held
            assert sum(one.data().untyped_storage().nbytes() for one, _ in masters.copies()) == 0
    job, batches = job_and_batches("mlp", "adamw")
    kinds = {
        precision: predict_memory(capture(each, (batches[0], batches[1])), each.optimizer)
        for precision in ("bf16", "bf16-stochastic")
        for each in [lowered(job, Plan(precision=precision))]
    }
    saved = kinds["bf16"].optimizer - kinds["bf16-stochastic"].optimizer
    assert saved == 2 * kinds["bf16"].parameters  # 4 bytes of an element
    assert kinds["bf16"].peaks["update"] == kinds["bf16-stochastic"].peaks["update"]
