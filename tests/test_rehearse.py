"""What a rehearsal hands over is what a run counts, what a rank holds is what it owns, and its own clock is
its own."""

from __future__ import annotations

import os
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from jobs import make_job
from test_cli import FILE, records

from meshloom.cli.main import main
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.windows import windows_of
from meshloom.core.errors import PlanError
from meshloom.core.jobfile import load_job
from meshloom.core.plan import Plan
from meshloom.machine.host_memory import free_bytes
from meshloom.planner.rehearsal import rehearse as planner_rehearse
from meshloom.planner.rehearsal.own_clock import CommonMemory, OwnClock, RehearsedGroup
from meshloom.planner.rehearsal.rehearse import rehearse
from meshloom.telemetry.progress import QUIET
from meshloom.train.trainer import Trainer

CPU = torch.device("cpu")
PLANS = [
    ("gpt", "dp=2"),
    ("gpt", "dp=3,zero=1,microbatches=2"),
    ("gpt", "pp=2,microbatches=3"),
    ("gpt", "tp=2"),
    pytest.param("gpt", "dp=2,pp=2,tp=2,microbatches=2", marks=pytest.mark.slow),
    ("cnn", "dp=2,sync_batch_norm=true"),
    ("mlp", "dp=2,exchange=server"),
    ("mlp", "dp=2,exchange=local_sgd,local_steps=2"),
    ("mlp", "dp=2,compress=powersgd:2"),
]


def counted(trainer: Trainer) -> dict[str, int]:
    """Axis -> bytes that rank 0 handed over so far."""
    context = trainer.replicas[0].context
    found = {
        axis: sum(count.bytes for count in group.counts.values()) for axis, group in context.groups.items()
    }
    found["dp"] += sum(count.bytes for count in context.statistics.counts.values())
    return found


@pytest.mark.covering("gpt-dp=3", "cnn-dp=2", "mlp-dp=2,exchange=server", "local_sgd", "powersgd")
@pytest.mark.long
@pytest.mark.parametrize(("model", "text"), PLANS)
def test_bytes_are_those_that_a_run_counts(model: str, text: str):
    job = make_job(model, "adamw", steps=9, drop_last=True)  # a short batch has other shapes
    plan = Plan.parse(text)
    found = rehearse(job, plan, threads=1, common_memory=False)
    with Trainer(job, plan, devices="simulated", listener=QUIET) as trainer:
        before: dict[str, int] = {}
        for batch in trainer.batches():
            if batch.step == 2:
                before = counted(trainer)
            trainer.step(batch)
            if batch.step == 3:  # a round of local steps, at most
                break
        per_step = {
            axis: (count - before[axis]) / 2
            for axis, count in counted(trainer).items()
            if count > before[axis]
        }
    assert per_step == found.num_bytes


@pytest.mark.slow
@pytest.mark.processes
def test_ranks_that_share_memory_hand_over_what_was_rehearsed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Over shared memory gradients are added up where they lie, by other calls than over a network."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "run.jsonl"
    assert (
        main(["train", FILE, "--plan", "dp=2", "--devices", "cpu", "--steps", "2", "--json", str(path)]) == 0
    )
    end = records(path.read_text())[-1]
    assert end["bytes"]["predicted"] == end["bytes"]["counted"]
    job = load_job(FILE)
    assert job is not None
    found = rehearse(job, Plan.parse("dp=2"), threads=1, common_memory=True)
    assert found.one_copy
    rehearsed = [call.num_bytes for call in found.steps[0][0].calls if call.kind == "reduce_scatter"]
    # nothing of it is done but in steps
    assert 2 * sum(rehearsed) == end["bytes"]["counted"]["dp"]["reduce_scatter"] > 0
    assert all(call.in_place for call in found.steps[0][0].calls if call.kind == "reduce_scatter")
    capfd.readouterr()


@pytest.mark.slow
def test_a_step_has_its_exchange_its_update_and_the_actions_of_its_rank():
    job = make_job("gpt", "sgd")
    found = rehearse(job, Plan.parse("pp=2,microbatches=3"), threads=1, common_memory=False)
    assert found.schedule is not None
    for step in found.steps:
        for rank, own in enumerate(step):
            spans = [span for span in own.spans if span.kind != "wait"]
            done = [span.action for span in spans if span.action]
            assert done == list(found.schedule.actions[rank])
            assert [span.kind for span in spans[len(done) :]] == ["exchange", "update", "exchange"]
            assert all(earlier.stop <= later.start for earlier, later in pairwise(spans))
            assert own.seconds >= spans[-1].stop
    whole = rehearse(job, Plan(), threads=1, common_memory=False)
    # tied parameters have one owner
    assert sum(each.optimizer for each in found.held) == whole.held[0].optimizer


@pytest.mark.long
def test_a_rehearsal_leaves_threads_and_draws_as_they_were():
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    rehearse(make_job("cnn", "sgd"), Plan.parse("dp=2"), threads=2, common_memory=True)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("dp=2,exchange=async", "has no steps that all workers take together"),
        ("dp=16,sync_batch_norm=true", "cannot fill 16 chunks"),
    ],
)
def test_what_cannot_be_rehearsed_is_said(text: str, sentence: str):
    with pytest.raises(PlanError, match=sentence):
        rehearse(make_job("cnn", "sgd"), Plan.parse(text), threads=1, common_memory=False)


def test_ranks_that_have_no_room_in_this_process_are_said(monkeypatch: pytest.MonkeyPatch):
    # 984 bytes of parameters, four times that with gradients and state
    monkeypatch.setattr(planner_rehearse, "free_bytes", lambda: 6000)
    rehearse(make_job("mlp", "sgd"), Plan(), threads=1, common_memory=False)
    with pytest.raises(
        PlanError, match="2 ranks hold up to 3.84 KiB each in this process, and 5.86 KiB of memory are free"
    ):
        rehearse(make_job("mlp", "sgd"), Plan.parse("dp=2"), threads=1, common_memory=False)


def test_free_memory_is_some_and_not_all():
    assert 2**20 < free_bytes() < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_an_own_clock_stands_still_while_the_rank_talks_or_sleeps():
    clock = OwnClock(CPU)
    clock.begin()
    time.sleep(0.02)
    asleep = clock.seconds
    clock.stop()
    until = time.thread_time() + 0.02
    while time.thread_time() < until:
        pass
    assert clock.seconds - asleep < 0.01 and asleep < 0.01
    clock.go()
    until = time.thread_time() + 0.02
    while time.thread_time() < until:
        pass
    assert clock.seconds >= 0.019


def test_a_group_notes_its_calls_and_has_windows_only_where_memory_is_common():
    clock, common = OwnClock(CPU), CommonMemory(1)
    clock.begin()
    near = RehearsedGroup(simulated_groups(1)[0], "dp", clock, common)
    far = RehearsedGroup(simulated_groups(1)[0], "tp", clock)
    assert windows_of(near) is near and windows_of(far) is None
    flat = near.window(64).of(0).view(torch.float32)
    near.all_reduce(flat).wait()
    far.all_reduce(torch.ones(3)).wait()
    far.barrier().wait()
    assert [(each.axis, each.kind, each.num_bytes, each.in_place) for each in clock.calls] == [
        ("dp", "all_reduce", 64, True),
        ("tp", "all_reduce", 12, False),
        ("tp", "barrier", 0, False),
    ]
