"""Memory of a step: predicted from the program, against real tensors that are followed, and those against the
allocator's own record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from jobs import make_job
from torch import Tensor, nn
from torch.utils.data import default_collate

from meshloom.comm.simulated import simulated_groups
from meshloom.core.errors import PlanError
from meshloom.core.job import Job
from meshloom.exchange.buckets.buckets import GradientBuckets
from meshloom.exchange.buckets.gradient_bytes import gradient_bytes
from meshloom.exchange.buckets.rounds import pool_extents
from meshloom.exchange.buckets.scattered import ScatteredBuckets
from meshloom.planner.memory.measured import measure_memory
from meshloom.planner.memory.memory import Memory, predict_memory
from meshloom.program.capture.capture import capture
from meshloom.program.ir.program import Program
from meshloom.program.run.execute import run_program
from tests.memory_jobs import CASES, OPTIMIZERS, SETTINGS, case_of

COVERING = {("vit", "adamw", "float32"), ("u_net", "sgd", "float32"), ("lstm", "adamw", "bfloat16 autocast")}

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]


def all_cases() -> list[Any]:
    cases = [(name, *setting) for name in CASES for setting in SETTINGS]
    return [
        pytest.param(*case, marks=() if case in COVERING else pytest.mark.slow, id="-".join(case))
        for case in cases
    ]


def job_and_batches(
    model: str, optimizer: str, count: int = 2, size: int = 6, **overrides: Any
) -> tuple[Job, list[Any]]:
    job = make_job(model, optimizer, **overrides)
    data = job.data()
    return job, [
        default_collate([data[(number * size + each) % 30] for each in range(size)])
        for number in range(count)
    ]


def wide(width: int = 64, depth: int = 3) -> Job:
    """Layers of linear and GELU whose operators need no memory inside of themselves."""
    build = lambda: nn.Sequential(  # noqa: E731
        *(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU()))
    )
    loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
    return Job(model=build, loss=loss, optimizer=OPTIMIZERS["adamw"], data=lambda: [0], batch_size=1, steps=1)


def read(job: Job, batches: list[Any]) -> Program:
    return capture(job, (batches[0], batches[1]))


def predicted_and_measured(name: str, optimizer: str, precision: str) -> tuple[Memory, Memory, Memory, int]:
    """Memory of one step of a case: predicted; measured while the program runs; measured while the module
    runs. And bytes of the buffers that it changes, of which a stage keeps a copy as its forward saw them."""
    case = case_of(name, precision)
    job = case.job(optimizer)
    generator = torch.Generator().manual_seed(0)
    batch, other = case.batch(generator), case.batch(generator)
    program = capture(job, (batch, other))
    by_program = replace(
        job,
        loss=lambda model, chunk: run_program(
            program, dict(model.named_parameters()), dict(model.named_buffers()), chunk
        ),
    )
    return (
        predict_memory(program, job.optimizer),
        measure_memory(by_program, [batch]),
        measure_memory(job, [batch]),
        sum(program.buffers[name].meta.num_bytes for name in program.changing),
    )


@pytest.mark.covering("u_net", "lstm")
@pytest.mark.parametrize(("name", "optimizer", "precision"), all_cases())
def test_predicted_peak_is_the_measured_one(name: str, optimizer: str, precision: str):
    if (name, precision) == (
        "lstm",
        "bfloat16 autocast",
    ) and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("torch fails: it has no recurrent layers in bfloat16 for this processor")
    predicted, by_program, measured, copied = predicted_and_measured(name, optimizer, precision)
    # Numbers that operators are given as tensors have 4 or 8 bytes each; in mixed precision torch's fakes
    # halve the statistics of norms.
    close = 1e-4 if precision == "float32" else 2e-3
    assert predicted.peak == pytest.approx(by_program.peak + copied, rel=close)
    # The promise; docs/memory.md has the reason of the one beyond it.
    assert predicted.peak == pytest.approx(
        measured.peak, rel=0.2 if (name, precision) == ("mixtral", "bfloat16 autocast") else 0.1
    )
    assert predicted.phase == measured.phase or predicted.peak == pytest.approx(
        max(predicted.peaks[measured.phase], 1), rel=0.1
    )
    for kind in ("parameters", "gradients", "optimizer", "buffers", "batch"):
        assert getattr(predicted, kind) == getattr(measured, kind), kind
    assert predicted.kept == pytest.approx(measured.kept, rel=0.1)


def test_a_copy_for_checkpoints_in_the_background_is_counted():
    job = wide()
    program = read(job, [torch.randn(50, 64), torch.randn(50, 64)])
    alone = predict_memory(program, job.optimizer)
    copied = alone.parameters + alone.optimizer + alone.buffers
    with_copy = predict_memory(program, job.optimizer, copies=True)
    assert alone.copied == 0 < copied == with_copy.copied
    assert with_copy.peak == alone.peak + copied


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_gradients_of_earlier_chunks_are_there_while_later_ones_run(microbatches: int):
    job = wide()
    batches = [torch.randn(50, 64) for _ in range(4)]
    predicted = predict_memory(read(job, batches), job.optimizer, microbatches=microbatches)
    measured = measure_memory(job, batches[:microbatches])
    assert (predicted.gradients, predicted.batch, predicted.kept) == (
        measured.gradients,
        measured.batch,
        measured.kept,
    )
    assert predicted.peaks["update"] == measured.peaks["update"]
    assert predicted.peak == pytest.approx(measured.peak, abs=16)  # scalars of the loss
    if microbatches > 1:
        alone = predict_memory(read(job, batches), job.optimizer)
        more = predicted.peaks["forward"] - alone.peaks["forward"] - (microbatches - 1) * alone.batch
        assert more == predicted.gradients


@pytest.mark.parametrize(
    ("model", "optimizer"), [("mlp", "sgd"), ("gpt", "muon"), ("mlp", "adafactor"), ("unused_twice", "adamw")]
)
def test_optimizer_state_is_what_the_users_optimizer_makes(model: str, optimizer: str):
    job, batches = job_and_batches(model, optimizer)
    predicted, measured = predict_memory(read(job, batches), job.optimizer), measure_memory(job, batches[:1])
    # what is not used has neither
    assert (predicted.optimizer, predicted.gradients) == (measured.optimizer, measured.gradients)
    assert predicted.peaks["update"] == pytest.approx(measured.peaks["update"], abs=64)  # scalars


def test_what_is_followed_is_what_the_allocator_records():
    job = wide()
    batch = torch.randn(50, 64)
    measured = measure_memory(job, [batch])
    standing = measured.parameters + measured.optimizer + measured.buffers + measured.batch
    # numbers that operators are given as tensors
    assert measured.peak - standing == pytest.approx(allocator_peak(job, batch), abs=16)


def allocator_peak(job: Job, batch: Tensor) -> int:
    """Most bytes that torch's CPU allocator has handed out during a second step, beyond what was there before
    it."""
    model = job.model()
    optimizer = job.optimizer(list(model.named_parameters()))

    def step() -> None:
        job.loss(model, batch).sum().backward()
        optimizer.step()

    step()
    optimizer.zero_grad()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    found: Any = profile.profiler
    now = most = 0
    for event in sorted(
        (each for each in found.kineto_results.events() if each.name() == "[memory]"),
        key=lambda each: each.start_ns(),
    ):
        now += event.nbytes()
        most = max(most, now)
    return most


def test_kinds_at_the_peak_add_up_to_it():
    job = wide()
    memory = predict_memory(read(job, [torch.randn(50, 64), torch.randn(50, 64)]), job.optimizer)
    assert memory.phase == "backward"
    assert memory.peak == max(memory.peaks.values())
    assert 0 < memory.temporaries < memory.kept
    assert (
        memory.peak
        <= memory.parameters
        + memory.optimizer
        + memory.batch
        + memory.buffers
        + memory.gradients
        + memory.kept
        + memory.temporaries
    )


@pytest.mark.parametrize("zero", [0, 1])
def test_buckets_of_a_data_parallel_plan(zero: int):
    job, _ = job_and_batches("gpt", "adamw")
    named, dp = [*job.model().named_parameters()], 3
    buckets = GradientBuckets(named, bucket_bytes=2**12, start=lambda bucket: None, multiple=dp)
    flat = sum(each.flat.nbytes for each in buckets.buckets)
    padding = 4 * dp * len(buckets.buckets)
    sizes = [each.nbytes for _, each in named]
    found = gradient_bytes(sizes, dp=dp, zero=zero, bucket_bytes=2**12)
    assert found == pytest.approx(flat * (1 + 1 / dp if zero else 1), abs=padding)
    assert gradient_bytes(sizes, dp=dp, zero=zero, bucket_bytes=2**12, one_copy=True) == sum(sizes)


def test_slices_of_gradients_and_buckets_on_their_way():
    job, _ = job_and_batches("gpt", "adamw")
    named = list(job.model().named_parameters())
    buckets = ScatteredBuckets(named, simulated_groups(3)[0], rounds=1, bucket_bytes=2**10, overlap=True)
    (pool,) = pool_extents([each.extent for each in buckets.buckets], 2**10).values()
    slices = sum(each.sum.nbytes for each in buckets.buckets)
    one, two = (
        gradient_bytes([each.nbytes for _, each in named], dp=3, zero=zero, bucket_bytes=2**10)
        for zero in (1, 2)
    )
    # both are padded, and aligned in the pool
    assert two == pytest.approx(slices + pool.num_elements, abs=80 * len(buckets.buckets))
    assert two < one


def test_a_step_without_chunks_is_refused():
    job = wide()
    program = read(job, [torch.randn(5, 64), torch.randn(5, 64)])
    with pytest.raises(PlanError, match="not microbatches=0"):
        predict_memory(program, job.optimizer, microbatches=0)
