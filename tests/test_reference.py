"""The reference is checked against loops still plainer than itself, and against what torch does in one go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, default_collate

from meshloom.core.errors import DataError
from meshloom.core.plan import Plan
from meshloom.core.random import model_seed, sample_order, sample_seed, seed_everything
from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference.reruns import chunk_by_chunk
from tests.held import step_of
from tests.jobs import Samples, make_job, vectors


def whole_loop(job: Any, steps: int) -> tuple[nn.Module, list[float]]:
    """The job as anyone would write it: whole batches, no chunks, no draws."""
    seed_everything(model_seed(job.seed))
    model = job.model()
    optimizer = job.optimizer([(name, each) for name, each in model.named_parameters() if each.requires_grad])
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    data, losses = job.data(), list[float]()
    order = sample_order(job.seed, 0, len(data), True)
    for step in range(steps):
        batch = default_collate([data[index] for index in order[step * 12 : step * 12 + 12]])
        optimizer.zero_grad()
        loss = job.loss(model, batch)
        loss.backward()
        if job.clip_grad_norm:
            nn.utils.clip_grad_norm_(model.parameters(), job.clip_grad_norm)
        optimizer.step()
        if scheduler:
            scheduler.step()
        losses.append(float(loss.detach()))
    return model, losses


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_one_chunk_is_an_ordinary_training_loop(optimizer):
    job = make_job("mlp", optimizer)
    model, losses = whole_loop(job, 3)
    reference = Reference(job, Plan())
    records = [step_of(reference) for _ in range(3)]
    assert [record.loss for record in records] == pytest.approx(losses, rel=1e-6)
    for name, parameter in model.named_parameters():
        # clipped in float64 here
        torch.testing.assert_close(records[-1].parameters[name], parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch_size", [12, 13, 3])
def test_uneven_and_empty_chunks_keep_the_mean(batch_size):
    job = make_job("mlp", "sgd", batch_size=batch_size)
    whole = step_of(Reference(job, Plan(), torch.float64))
    cut = step_of(Reference(job, Plan(dp=2, microbatches=3), torch.float64))
    assert len(cut.chunks) == min(6, batch_size)
    assert sum(chunk.samples for chunk in cut.chunks) == batch_size
    for name, gradient in whole.gradients.items():
        torch.testing.assert_close(cut.gradients[name], gradient, rtol=1e-12, atol=1e-14)


def test_an_epoch_ends_with_a_short_batch_or_without_it():
    def sizes(**settings: Any) -> list[int]:
        reference = Reference(make_job("mlp", "sgd", **settings), Plan())
        return [sum(chunk.samples for chunk in step_of(reference).chunks) for _ in range(4)]

    assert sizes() == [12, 12, 6, 12]
    assert sizes(drop_last=True) == [12, 12, 12, 12]


class Stream(IterableDataset[Any]):
    def __init__(self, epochs_told: list[int]) -> None:
        self.epochs_told = epochs_told

    def set_epoch(self, epoch: int) -> None:
        self.epochs_told.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        for sample in (vectors()[index] for index in range(30)):
            yield {**sample, "x": sample["x"] + torch.rand(1)}


def test_iterable_data_is_read_in_batches_and_begins_anew_with_its_own_draws():
    told: list[int] = []
    reference = Reference(make_job("mlp", "sgd", data=lambda: Stream(told), batch_size=15), Plan())
    digests = [step_of(reference).chunks[0].data for _ in range(4)]
    assert told == [0, 1]
    assert len(set(digests)) == 4  # draws of an epoch are its own
    again = Reference(make_job("mlp", "sgd", data=lambda: Stream(told), batch_size=15), Plan())
    assert [step_of(again).chunks[0].data for _ in range(4)] == digests


def test_iterable_data_without_a_batch_is_an_error():
    reference = Reference(
        make_job("mlp", "sgd", data=lambda: Stream([]), batch_size=31, drop_last=True), Plan()
    )
    with pytest.raises(DataError, match="less than one batch of 31"):
        step_of(reference)


def test_what_a_sample_draws_belongs_to_seed_epoch_and_index():
    class Noisy(Samples):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            seen.append((index, float(torch.rand(()))))
            return super().__getitem__(index)

    seen: list[tuple[int, float]] = []
    step_of(Reference(make_job("mlp", "sgd", data=lambda: Noisy(**vectors().fields)), Plan(dp=2)))
    assert len(seen) == 12
    for index, drawn in seen:
        seed_everything(sample_seed(0, 0, index))
        assert drawn == float(torch.rand(()))


@pytest.mark.long
def test_chunks_draw_their_own_masks_and_the_same_ones_whichever_replica_runs_them():
    job = make_job("gpt", "sgd")
    sample = job.data()[0]
    job = replace(job, data=lambda: [sample] * 4, batch_size=4)
    by_replicas, by_microbatches = (
        step_of(Reference(job, plan))
        for plan in (Plan(dp=4, keyed_draws=True), Plan(microbatches=4, keyed_draws=True))
    )
    losses = [chunk.loss_sum for chunk in by_replicas.chunks]
    assert len(set(losses)) == 4 and losses == [chunk.loss_sum for chunk in by_microbatches.chunks]


@pytest.mark.parametrize("keyed", [False, True])
def test_a_chunk_says_whether_it_draws(keyed: bool):
    for name, draws in (("gpt", True), ("mlp", False)):
        chunks = step_of(Reference(make_job(name, "sgd"), Plan(dp=4, keyed_draws=keyed))).chunks
        assert [chunk.draws for chunk in chunks] == [draws] * 4


def test_synchronised_statistics_make_microbatch_j_of_all_replicas_one_chunk():
    job = make_job(
        "cnn",
        "sgd",
        data=lambda: Samples(
            x=torch.randn(12, 1, 6, 6, generator=torch.Generator().manual_seed(0)), y=torch.arange(12) % 5
        ),
    )
    reference = Reference(job, Plan(dp=2, microbatches=2, sync_batch_norm=True))
    record = step_of(reference)
    assert [(chunk.index, chunk.samples, chunk.weight) for chunk in record.chunks] == [
        (0, 3, 6),
        (2, 3, 0),
        (1, 3, 6),
        (3, 3, 0),
    ]
    one_replica = step_of(Reference(job, Plan(microbatches=1)))
    assert record.loss != one_replica.loss
    order = sample_order(0, 0, 12, True)
    seed_everything(model_seed(0))
    model = job.model()
    batch = default_collate([job.data()[index] for index in [*order[0:3], *order[6:9]]])
    conv = model.conv(batch["x"]).mean((0, 2, 3))
    second = default_collate([job.data()[index] for index in [*order[3:6], *order[9:12]]])
    expected = 0.9 * 0.1 * conv + 0.1 * model.conv(second["x"]).mean((0, 2, 3))
    torch.testing.assert_close(record.buffers["norm.running_mean"], expected.detach())


def test_module_outputs_come_in_order_of_execution():
    record = step_of(Reference(make_job("unused_twice", "sgd"), Plan()))
    assert [(output.name, output.call) for output in record.chunks[0].modules] == [
        ("first", 0), ("shared", 0), ("shared", 1), ("frozen", 0), ("head", 0), ("", 0),
    ]  # fmt: skip


def test_unused_parameters_have_no_gradient_and_frozen_ones_are_not_listed():
    record = step_of(Reference(make_job("unused_twice", "adamw"), Plan(dp=2)))
    assert record.gradients["unused.weight"] is None
    assert "frozen.weight" not in record.gradients
    assert torch.equal(
        record.parameters["unused.weight"],
        Reference(make_job("unused_twice", "adamw"), Plan()).parameters["unused.weight"],
    )


def test_tied_parameters_are_listed_once():
    reference = Reference(make_job("gpt", "sgd"), Plan())
    assert "head.weight" not in step_of(reference).gradients


@pytest.mark.slow
def test_looking_back_changes_nothing():
    job, plan = make_job("cnn", "adamw"), Plan(dp=2, microbatches=2)
    plain, looked = Reference(job, plan), Reference(job, plan)
    for _ in range(3):
        a, b = step_of(plain), step_of(looked, look=True)
        assert a.loss == b.loss
        for name in a.parameters:
            assert torch.equal(a.parameters[name], b.parameters[name])
        for name in a.buffers:
            assert torch.equal(a.buffers[name], b.buffers[name])


@pytest.mark.long
def test_the_chunks_one_by_one_add_up_to_the_gradient():
    reference = Reference(make_job("gpt", "sgd"), Plan(dp=2, microbatches=2), torch.float64)
    step_of(reference)
    reference.run()  # a later step: parameters and buffers must be those before it
    found = chunk_by_chunk(reference)
    second = reference.update()
    for name, gradient in second.gradients.items():
        total = sum(chunk.gradients[name] for chunk in found) / second.weight
        torch.testing.assert_close(total, gradient.reshape(-1)[:4096], rtol=1e-9, atol=1e-14)


def test_a_cast_inside_the_model_is_seen_with_its_module():
    class Low(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x.float()).to(x.dtype)

    job = replace(make_job("mlp", "sgd"), model=lambda: nn.Sequential(nn.Linear(7, 5), Low()))
    assert [(cast.place, cast.dtype) for cast in step_of(Reference(job, Plan(), torch.float64)).casts][
        :1
    ] == [("1", "float32")]
    assert not step_of(Reference(job, Plan())).casts  # float32 is the parameters' own


def test_a_cast_inside_the_optimizer_is_seen_with_its_name():
    casts = step_of(Reference(make_job("mlp", "muon"), Plan(), torch.float64)).casts
    assert [(cast.place, cast.dtype, cast.in_optimizer) for cast in casts] == [("Muon", "bfloat16", True)]


def test_float64_reaches_parameters_batches_and_new_tensors():
    dtypes: set[torch.dtype] = set()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        dtypes.update({batch["x"].dtype, torch.zeros(1).dtype, next(model.parameters()).dtype})
        return F.cross_entropy(model(batch["x"]), batch["y"])

    record = step_of(Reference(make_job("mlp", "adamw", loss=loss), Plan(), torch.float64))
    assert dtypes == {torch.float64}
    assert torch.get_default_dtype() == torch.float32
    assert all(parameter.dtype == torch.float64 for parameter in record.parameters.values())


def test_the_callers_generators_are_left_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    reference = Reference(make_job("gpt", "sgd"), Plan(dp=2))
    step_of(reference, look=True)
    assert torch.equal(torch.get_rng_state(), before)
