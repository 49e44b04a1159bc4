"""zero=3: a replica keeps a dp-th of every unit, and computes what one device does."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from meshloom.checkpoint.checkpoint import Checkpoint, find
from meshloom.core.errors import CaptureError, JobError, TrainingError
from meshloom.core.job import Evaluate
from meshloom.core.modules.casts import cast_of
from meshloom.core.moments.gather import gather
from meshloom.core.plan import Plan
from meshloom.exchange.units.find_units import find_units
from meshloom.exchange.units.unit_access import UnitAccess
from meshloom.planner.memory.unit_bytes import unit_bytes
from meshloom.program.ir.nodes import Meta
from meshloom.replica.replica_state import full_state
from meshloom.train.trainer import Trainer
from meshloom.verify.run import verify
from tests.jobs import make_job, vectors
from tests.processes import on_ranks
from tests.verified import equals_one_device
from tests.zero_three_jobs import KINDS, Blocks, Part, Shuffled, unit_job


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.slow
def test_ranks_without_a_chunk_keep_pace_where_values_decide_what_runs(microbatches: int) -> None:
    job = make_job("branch", "sgd", batch_size=2, data=partial(vectors, 5))
    plan = Plan(dp=3, microbatches=microbatches, zero=3, bucket_bytes=600)
    equals_one_device(job, plan, transport="gloo", steps=3)


QUICK = ("decayed", "saved")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_parameters_are_there_wherever_a_loss_uses_them(kind: str) -> None:
    for plan in ("dp=2,zero=3,microbatches=2",) + (
        ("dp=3,zero=3,bucket_bytes=200",) if kind not in QUICK else ()
    ):
        equals_one_device(unit_job(kind), plan, transport="gloo")


def trained(plan: str, kind: str = "blocks", **settings: Any) -> tuple[Any, dict[str, Tensor]]:
    """Summary of the run and parameters at its end."""
    overrides = {name: settings.pop(name) for name in ("steps", "evaluate", "units") if name in settings}
    job = unit_job(kind, settings.pop("optimizer", "adamw"), **overrides)
    with Trainer(job, plan, **{"devices": "simulated", "dtype": torch.float64, **settings}) as trainer:
        summary = trainer.fit()
        return summary, trainer.together(full_state)[0]


class Normalised(Shuffled):
    """Blocks that the samples choose, then statistics of all replicas' samples, in forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 5))  # type: ignore[assignment]


def apart(model: Any, batch: Any) -> Tensor:
    """Pushes all replicas' rows apart: they are gathered after blocks that the samples choose."""
    rows = gather(model(batch["x"]))
    return (-torch.cdist(rows, rows).square()).exp().mean()


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({"batch_size": 1}, ""),
        ({"model": Shuffled}, ""),
        ({"model": Shuffled, "loss": apart}, ""),
        ({"model": Normalised}, ",sync_batch_norm=true"),
    ],
    ids=("no samples", "the end of a forward", "gathered rows", "batch statistics"),
)
@pytest.mark.long
def test_replicas_gather_units_until_all_exchange_something_else(
    changes: dict[str, Any], settings: str
) -> None:
    """One was in the exchange that ends the first forward while another, or one without samples, was in a round."""
    # in the first batch one replica's samples choose a block more than the other's
    job = replace(unit_job("blocks", steps=2, batch_size=11), **changes)
    states: list[dict[str, Tensor]] = []
    for plan in ("dp=2,zero=3", "dp=2"):
        with Trainer(
            job, plan + settings, devices="simulated", transport="gloo", dtype=torch.float64
        ) as trainer:
            trainer.fit()
            states.append(trainer.together(full_state)[0])
    for name, value in states[0].items():  # two replicas' gradients have one sum
        assert torch.equal(value, states[1][name]), name


def assert_goes_on_and_back(kind: str, optimizer: str, ours: str, other: str, tmp_path: Path) -> None:
    """A checkpoint of one plan resumes under another and its checkpoint under the first, with the same bits."""
    settings: dict[str, Any] = {"devices": "simulated", "dtype": torch.float64}
    job = unit_job(kind, optimizer, steps=4)
    _, before = trained(ours, kind, optimizer=optimizer, steps=2, out=tmp_path / "a")
    states: list[dict[str, Tensor]] = []
    for at, directory, under in (("a", "b", other), ("b", "c", ours)):
        with Trainer(job, under, resume=tmp_path / at, out=tmp_path / directory, **settings) as trainer:
            there = trainer.together(full_state)[0]
            assert list(there) == list(before)
            assert all(torch.equal(there[name], before[name]) for name in before)
            trainer.save()
        checkpoint = Checkpoint.open(find(tmp_path / directory))
        sizes = {key: math.prod(checkpoint.shape(key)) for key in checkpoint.keys()}  # noqa: SIM118
        states.append({key: checkpoint.read(key, 0, size) for key, size in sizes.items()})
    assert states[0].keys() == states[1].keys() and states[0]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def loss(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


EVALUATE = Evaluate(data=partial(vectors, 11), metrics={"loss": loss}, every=2)


@pytest.mark.long
def test_bytes_are_as_predicted_and_evaluation_is_one_devices() -> None:
    summary, ours = trained("dp=2,zero=3,microbatches=2", steps=4, evaluate=EVALUATE)
    one, theirs = trained("dp=1", steps=4, evaluate=EVALUATE)
    assert summary.predicted == summary.counted
    assert summary.evaluation == pytest.approx(one.evaluation, rel=1e-12)
    assert all(torch.allclose(ours[name], theirs[name], rtol=1e-10, atol=1e-12) for name in theirs)
    # each of 2 chunks adds up every gradient; units are padded to the number of ranks
    num_bytes = 8 * sum(each.numel() for each in theirs.values())
    in_steps = summary.counted.bytes["dp"]["reduce_scatter"]
    assert 4 * 2 * num_bytes <= in_steps <= 4 * 2 * 1.01 * num_bytes


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
@pytest.mark.slow
def test_casts_of_a_unit_do_not_outlive_its_forward(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What autograd saves of a linear layer under autocast is a cast of its weight, which was kept until backward: half of all
    parameters on every rank."""
    casts: dict[int, list[tuple[int, StorageWeakRef]]] = {0: [], 1: []}
    pack = UnitAccess.pack

    def packed(access: UnitAccess, tensor: Tensor) -> Any:
        kept = pack(access, tensor)
        cast = access._gathering.place_of(cast_of(tensor))
        if cast is not None:
            assert kept is not tensor
            unit, part, _ = cast
            found = casts[part._rank]
            found.append((unit.number, StorageWeakRef(tensor.untyped_storage())))
            alive = {number for number, each in found if num_bytes(each)}
            assert len(alive - {0}) <= 1, alive  # 0: the rest, which stays
        return kept

    def num_bytes(memory: StorageWeakRef) -> int:
        storage = torch.UntypedStorage._new_with_weak_ptr(memory.cdata)  # type: ignore[attr-defined]
        return 0 if storage is None else storage.nbytes()

    monkeypatch.setattr(UnitAccess, "pack", packed)
    job = replace(unit_job("blocks"), steps=2)
    equals_one_device(job, f"dp=2,zero=3,precision={precision}", transport="gloo", dtype=None)
    assert min(len(each) for each in casts.values()) >= 2 * 2 * 4  # steps, layers of a block, blocks


@pytest.mark.parametrize("plan", ["dp=2,zero=3,microbatches=2", "dp=2,pp=2,zero=3", "dp=2,tp=2,zero=3"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_casts_are_those_of_one_device_wherever_parameters_are_used(kind: str, plan: str) -> None:
    """A cast that lost its memory with its unit has it back for the next use, and stays one tensor for all uses of a loss."""
    mixed = Plan.parse(f"{plan},precision=bf16-mixed")
    if mixed.divides_loss and kind in ("saved", "shuffled"):  # their own lines are of the model itself
        with pytest.raises(CaptureError, match="outside of all modules but the model"):
            verify(unit_job(kind), mixed, devices="simulated", transport="gloo", steps=2)
        return
    equals_one_device(unit_job(kind), mixed, transport="gloo", dtype=None)


@pytest.mark.slow
def test_casts_of_a_frozen_base_do_not_outlive_the_operator_that_makes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The story: under adapters of low rank the base, nearly the whole model, was kept once more in bfloat16 until backward. Such casts
    have no graph."""
    kept: list[StorageWeakRef] = []
    pack = UnitAccess.pack

    def packed(access: UnitAccess, tensor: Tensor) -> Any:
        found = pack(access, tensor)
        if (
            tensor.dtype == torch.bfloat16 and not tensor.requires_grad and tensor.numel() == 6 * 11
        ):  # of the base
            assert found is not tensor
            assert not [each for each in kept if not each.expired()]
            kept.append(StorageWeakRef(tensor.untyped_storage()))
        return found

    monkeypatch.setattr(UnitAccess, "pack", packed)
    job = replace(unit_job("adapted"), steps=2)
    equals_one_device(job, "dp=2,zero=3,precision=bf16-mixed", transport="gloo", dtype=None)
    # ranks, steps, layers; what the first one is given needs no gradient, so its weight is not saved
    assert len(kept) >= 2 * 2 * (2 * 4 - 1)


@pytest.mark.parametrize(
    ("optimizer", "plan"),
    [
        ("adamw", "dp=3,zero=3"),
        ("adamw", "dp=1"),
        ("muon", "dp=2,zero=1"),
        ("adafactor", "dp=4,zero=3"),
        ("sgd", "dp=2,pp=2,microbatches=2"),
    ],
)
@pytest.mark.slow
def test_a_checkpoint_goes_on_under_another_plan_and_back(optimizer: str, plan: str, tmp_path: Path) -> None:
    assert_goes_on_and_back("frozen", optimizer, "dp=2,zero=3,microbatches=2", plan, tmp_path)


def test_blocks_that_repeat_large_parts_and_the_rest_are_units() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 4)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
            self.odd = nn.ModuleList([nn.Linear(4, 3), nn.Linear(3, 4)])
            self.blocks[2][0].bias = self.odd[0].bias = nn.Parameter(torch.zeros(4))

    model = Model()
    units = {unit.name: [name for name, _ in unit.named] for unit in find_units(model, large_bytes=500)}
    assert units == {
        "the rest": ["blocks.2.0.bias", "odd.0.weight", "odd.1.weight", "odd.1.bias"],  # one of them is tied
        "blocks.0": ["blocks.0.0.weight", "blocks.0.0.bias"],
        "blocks.1": ["blocks.1.0.weight", "blocks.1.0.bias"],
        "blocks.2": ["blocks.2.0.weight"],
        "embed": ["embed.weight"],
    }
    chosen = find_units(model, chosen=[nn.Embedding, "odd.1"], large_bytes=1)
    assert [unit.name for unit in chosen] == ["the rest", "embed", "odd.1"]
    assert [unit.name for unit in find_units(model, chosen=(), large_bytes=1)] == ["the rest"]
    with pytest.raises(
        JobError, match=r"Job\(units=...\) names module 'even', and the model has none. It has embed, blocks"
    ):
        find_units(model, chosen=["even"], large_bytes=1)


@pytest.mark.long
def test_what_is_not_there_is_an_error() -> None:
    job = unit_job("blocks")
    with Trainer(job, "dp=2,zero=3", devices="simulated", transport="gloo") as trainer:
        model = trainer.replicas[0].model
        with pytest.raises(TrainingError, match="blocks.0 was called between steps"):
            model(torch.ones(1, 7, device=model.get_parameter("blocks.0.up.weight").device))
        assert model.get_parameter("blocks.0.up.weight").isnan().all()
    compiled: Any = lambda: torch.compile(Blocks(), backend="eager")  # noqa: E731
    with pytest.raises(JobError, match="is compiled"):
        Trainer(replace(job, model=compiled), "dp=2,zero=3", devices="simulated", transport="gloo").close()


@pytest.mark.long
def test_where_a_loss_became_nan_is_found() -> None:
    class Overflowing(Part):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float("inf")

    class Bad(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[2].__class__ = Overflowing

    there = pytest.raises(TrainingError, match=r"the first module whose output is not finite is blocks\.2")
    job = replace(unit_job("blocks"), model=Bad)
    with there, Trainer(job, "dp=2,zero=3", devices="simulated", transport="gloo") as trainer:
        trainer.fit()


def runs(plans: list[str], kinds: list[str], **where: Any) -> list[list[float]]:
    """Losses of each on this rank; bytes are as predicted."""
    found: list[list[float]] = []
    for plan, kind in zip(plans, kinds, strict=True):
        with Trainer(unit_job(kind, evaluate=EVALUATE), plan, dtype=torch.float64, **where) as trainer:
            found.append([trainer.step(batch) for batch in trainer.batches()])
            found[-1] += trainer.evaluate().values()
            summary = trainer.summary(0.0, {}, None)
            if kind != "shuffled":
                assert summary.predicted == summary.counted, plan
    return found


def on_gloo(plans: list[str], kinds: list[str]) -> list[list[float]]:
    return runs(plans, kinds, devices="cpu", transport="gloo")


@pytest.mark.processes
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_processes_that_share_nothing_compute_what_simulated_ranks_do(size: int) -> None:
    plans = [
        f"dp={size},zero=3,microbatches=2",
        f"dp={size},zero=3",
        f"dp={size},zero=3,sync_batch_norm=true",
    ]
    kinds = ["shuffled", "recomputed", "tied"]
    found = on_ranks(on_gloo, size, plans, kinds, timeout_seconds=120.0)
    for ours, theirs in zip(found[0], runs(plans, kinds, devices="simulated", transport="gloo"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)  # float64; sums over ranks have no order


def test_units_are_found_in_the_names_of_parameters_too() -> None:
    model = Blocks()
    (rest, *units) = find_units(model, large_bytes=2**20)
    metas = {
        name: Meta(shape=tuple(each.shape), dtype=each.dtype, stride=each.stride(), requires_grad=True)
        for name, each in model.named_parameters()
    }
    found = unit_bytes(metas, 2**20)
    sizes = [sum(each.nbytes for _, each in unit.named) for unit in (rest, *units)]
    assert (found.parameters, found.rest, found.full) == (sum(sizes), sizes[0], sizes[0] + 2 * sizes[1])
    # all gradients once, the blocks' values twice and the rest's once, from each of 2 ranks, in a chunk
    assert found.sent(2, 1) == sum(sizes) + (sizes[0] + 2 * sum(sizes[1:])) / 2
