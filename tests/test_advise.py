"""Advice: what fits, what is recommended and why, on devices whose numbers are known."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from jobs import make_job
from rehearsals import machine
from rich.console import Console

from meshloom.core.errors import PlanError
from meshloom.core.plan import Plan
from meshloom.machine.links import COLLECTIVES, Link
from meshloom.machine.machine import DISK_RATE
from meshloom.planner.advise import advise, recommended
from meshloom.planner.candidates import candidates
from meshloom.planner.memory import rank_memory
from meshloom.planner.pricing import Devices, Option, Pricer, at_speed
from meshloom.planner.reasons import exchange_reason, reason_of, why_of
from meshloom.planner.rehearsal.rehearse import rehearse
from meshloom.planner.step_seconds import Places, StepPrice, price_step
from meshloom.report.advice import advice_records, print_advice
from meshloom.telemetry.timings import Timings

RECORD = {"plan", "step_seconds", "memory_bytes", "bytes", "idle_share", "why"}


def devices(**values: Any) -> Devices:
    return Devices(
        **{
            "num_ranks": 2,
            "machine": machine(),
            "threads_of": lambda ranks: 1,
            "common_memory": True,
            **values,
        }
    )


def option(
    plan: str, seconds: float, memory_bytes: int = 100, limit_bytes: int = 1000, **num_bytes: int
) -> Option:
    price = StepPrice(
        seconds=seconds, chunks=seconds, exchange=0.0, update=0.0, other=0.0, communication={}, idle_share=0.3
    )
    return Option(
        plan=Plan.parse(plan),
        price=price,
        memory_bytes=memory_bytes,
        limit_bytes=limit_bytes,
        num_bytes=num_bytes,
    )


def test_every_product_of_at_most_the_devices_is_a_candidate():
    meshes = {(plan.dp, plan.pp, plan.tp) for plan in candidates(4, 64)}
    assert meshes == {
        (dp, pp, tp) for dp in range(1, 5) for pp in range(1, 5) for tp in range(1, 5) if dp * pp * tp <= 4
    }
    assert {plan.microbatches for plan in candidates(4, 64) if plan.pp == 1} == {1}
    assert all(plan.microbatches > 1 and plan.num_chunks <= 64 for plan in candidates(4, 64) if plan.pp > 1)
    # of two samples no three replicas have some each
    assert not [plan for plan in candidates(4, 2) if plan.dp > 2]
    assert {plan.mesh.size for plan in candidates(12, 64)} == {1, 2, 3, 4, 8, 12}
    assert {plan.zero for plan in candidates(2, 64, zero=True)} == {0, 1}
    assert {plan.schedule for plan in candidates(2, 64)} == {"1f1b", "zb-h1"}
    short = list(candidates(2, 64, memory_bytes=4096))
    assert {plan.microbatches for plan in short if plan.mesh.size == plan.dp} == {1, 4}
    assert {plan.memory_bytes for plan in short if plan.pp > 1 or plan.tp > 1} == {4096}


def test_parameters_are_also_sliced_within_hosts_where_there_are_several():
    two_hosts = list(candidates(16, 64, zero=True, short=True, ranks_per_host=8))
    within = {(plan.dp, plan.tp, plan.zero_within) for plan in two_hosts if plan.zero_within}
    assert (16, 1, 8) in within and (8, 1, 8) not in within
    assert {8 // tp for _, tp, _ in within} == {each for _, _, each in within}
    assert not [plan for plan in candidates(16, 64, zero=True, short=True) if plan.zero_within]


def wide_job(layers: int = 6, width: int = 192) -> Any:
    """A job whose parameters and state are most of its memory."""
    job = make_job("mlp", "adamw", scheduler=None)
    return replace(
        job,
        optimizer=lambda named: torch.optim.AdamW(named, lr=0.01),
        model=lambda: torch.nn.Sequential(
            *(torch.nn.Linear(width, width, bias=False) for _ in range(layers))
        ),
        loss=lambda model, batch: model(batch["x"].repeat(1, 30)[:, :width]).square().mean(),
    )


@pytest.mark.slow
def test_a_machine_without_the_memory_gets_its_optimizer_state_on_disk(monkeypatch: pytest.MonkeyPatch):
    """Where nothing else fits. Its price is that of the plan without it and of the bytes that the disk reads and writes."""
    monkeypatch.setattr(rank_memory, "WINDOW_BYTES", 4096)
    job = wide_job()
    free = advise(job, devices(num_ranks=1))
    assert [str(each.plan) for each in free.options] == ["dp=1"] and not free.disk
    limit = free.options[0].memory_bytes * 3 // 4
    tight = advise(job, devices(num_ranks=1, memory_bytes=limit))
    chosen = tight.recommended
    assert chosen is not None and chosen.plan.offload == "optimizer" and chosen.fits
    assert not [each for each in tight.options if each.fits and each.plan.offload == "none"]
    state = 2 * 6 * 192 * 192 * 4
    assert chosen.price.disk == pytest.approx(2 * state / DISK_RATE, rel=1e-3)  # and two counts of 4 bytes
    assert chosen.seconds > chosen.price.disk and chosen.held[0].offloaded == pytest.approx(state, rel=1e-3)
    assert "offload=optimizer keeps the optimizer's state on a disk" in tight.reason
    assert "at 477 MiB a second, which is assumed: meshloom calibrate measures it" in tight.disk
    measured = advise(
        job, devices(num_ranks=1, memory_bytes=limit, machine=machine(disk_bytes_per_second=1e6))
    )
    slow = next(each for each in measured.options if each.plan == chosen.plan)
    assert slow.price.disk == pytest.approx(2 * state / 1e6, rel=1e-3) and "as measured" in measured.disk
    written = io.StringIO()
    print_advice(tight, Console(width=200, file=written))
    assert "offload=optimizer" in written.getvalue() and tight.disk in written.getvalue()


@pytest.mark.slow
def test_a_slow_disk_is_not_taken_where_something_else_fits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rank_memory, "WINDOW_BYTES", 4096)
    job = wide_job()
    alone = advise(job, devices(num_ranks=1)).options[0]
    found = advise(
        job, devices(memory_bytes=alone.memory_bytes * 3 // 4, machine=machine(disk_bytes_per_second=1e6))
    )
    assert found.recommended is not None and found.recommended.plan.offload == "none"
    assert any(each.fits and each.plan.offload == "optimizer" for each in found.options)


@pytest.mark.slow
def test_slices_within_hosts_where_the_network_between_them_is_slow():
    """Two hosts of eight ranks: with zero=3 over all of them parameters cross the network, within hosts only sums of
    gradients do. On one host, and where the network is as fast as a host, that is no gain."""
    job = replace(wide_job(layers=2, width=96), batch_size=16)
    plans = [Plan.parse("dp=16,zero=3"), Plan.parse("dp=16,zero=3,zero_within=8")]
    over_all, within = (rehearse(job, each, threads=1, common_memory=False) for each in plans)

    def times(network: float, ranks_per_host: int) -> float:
        links = tuple(
            Link(collective=each, ranks=ranks, latency_seconds=0.0, bytes_per_second=rate, residual=0.0, place=place)
            for each in COLLECTIVES
            for ranks in (2, 8, 16)
            for place, rate in (("inside", 1e9), ("between", network))
        )  # fmt: skip
        places, there = Places(ranks_per_host=ranks_per_host), machine(links=links, cores=8)
        mine, other = (price_step(each, there, places=places) for each in (within, over_all))
        return (mine.exchange + other.chunks) / (other.exchange + other.chunks)  # chunks are measured

    assert times(1e7, 8) < 0.7
    assert times(1e9, 8) > 0.9 and times(1e7, 16) > 0.9 and times(1e7, 0) > 0.9
    for per_host, there in ((8, True), (0, False)):
        found = list(candidates(16, 16, zero=True, short=True, ranks_per_host=per_host))
        assert (plans[1] in found) == there and plans[0] in found


def test_of_plans_that_are_about_as_fast_the_simplest_is_recommended():
    found = [option("tp=2", 1.0), option("dp=2", 1.02), option("dp=4", 1.01), option("dp=1", 2.0)]
    assert str((recommended(found) or found[0]).plan) == "dp=2"
    assert str((recommended([option("tp=2", 1.0), option("dp=2", 1.2)]) or found[0]).plan) == "dp=1,tp=2"


def test_what_does_not_fit_is_never_recommended():
    found = [option("dp=1", 1.0, memory_bytes=2000), option("pp=2,microbatches=2", 5.0)]
    assert str((recommended(found) or found[0]).plan) == "dp=1,pp=2,microbatches=2"
    assert recommended(found[:1]) is None


@pytest.mark.parametrize(
    ("one_device", "plans", "sentence"),
    [
        (
            10,
            [("dp=1", 1.0), ("dp=2", 3.0)],
            "so the model fits. Take one rank: on these devices every split costs more than it saves.",
        ),
        (
            10,
            [("dp=1", 2.0), ("dp=2", 1.0)],
            "split the batch, not the model. Take dp=2, 2.00 times as fast as one rank.",
        ),
        (
            10,
            [("dp=2", 2.0), ("tp=2", 1.0)],
            "the best that splits only the batch, dp=2, takes 2.00 times as long. Take dp=1,tp=2",
        ),
        (
            5000,
            [("pp=2,microbatches=4", 2.0)],
            "does not fit and has to be split. Take dp=1,pp=2,microbatches=4: pp=2 gives each rank some of the layers",
        ),
        (5000, [("dp=2", 2.0)], "dp=2 lets each rank hold the activations of fewer samples"),
    ],
)
def test_the_reason_is_said_in_words(one_device: int, plans: list[tuple[str, float]], sentence: str):
    options = [option(plan, seconds) for plan, seconds in plans]
    assert sentence in reason_of(one_device, 1000, recommended(options), options)


def test_when_nothing_fits_it_says_what_is_closest_and_the_way_out():
    options = [option("dp=1", 1.0, memory_bytes=4096), option("tp=2", 1.0, memory_bytes=2048)]
    text = reason_of(4096, 1000, None, options)
    assert "the plan that needs least, dp=1,tp=2, needs 2 KiB of 1000 B. Use more devices" in text


def test_a_slower_plan_says_what_its_time_goes_to():
    best, slow = option("dp=2", 1.0), option("pp=2,microbatches=4", 2.0, pp=4096)
    assert why_of(best, best).endswith("they add up their gradients; nothing is sent; recommended")
    assert why_of(slow, best).endswith(
        "a rank sends 4 KiB along pp a step; 2.00 times the step of dp=2; ranks wait or communicate 30% of it"
    )
    assert "does not fit: a rank would hold 2 KiB of 1000 B" in why_of(
        option("dp=1", 1.0, memory_bytes=2048), best
    )


def test_ring_and_server_are_compared_by_their_formulas():
    link = Link(collective="send", ranks=2, latency_seconds=0.0, bytes_per_second=1e6, residual=0.0)
    text = exchange_reason(
        [option("dp=4", 1.0, dp=1_000_000)], devices(machine=machine(links=(link,)), common_memory=False)
    )
    assert "a ring's formula says 1.5 s, one server's 8 s: every link carries the same" in text
    assert exchange_reason([option("tp=2", 1.0)], devices()) == ""


@pytest.mark.slow
def test_a_memory_limit_only_removes_plans():
    job = make_job("mlp", "adamw")
    plans = [Plan.parse(text) for text in ("dp=1", "dp=2", "tp=2")]
    free = advise(job, devices(), plans=plans)
    sizes = sorted(each.memory_bytes for each in free.options)
    assert all(each.fits for each in free.options) and free.fits_on_one
    known = {str(each.plan): each for each in free.options}
    for limit in (sizes[1], sizes[0] - 1):
        tight = advise(job, devices(memory_bytes=limit), plans=plans)
        assert {str(each.plan): each.memory_bytes for each in tight.options} == {
            plan: each.memory_bytes for plan, each in known.items()
        }
        assert {str(each.plan) for each in tight.options if each.fits} == {
            plan for plan, each in known.items() if each.memory_bytes <= limit
        }
        assert tight.recommended is None or tight.recommended.fits
    assert advise(job, devices(memory_bytes=sizes[0] - 1), plans=plans[:1]).recommended is None


@pytest.mark.slow
def test_records_have_what_is_promised_and_the_text_says_the_same():
    job = make_job("mlp", "sgd")
    found = advise(job, devices())
    records = json.loads(json.dumps(advice_records(found)))
    options = [each for each in records if each["event"] == "plan"]
    assert options and all(each.keys() >= RECORD for each in options)
    assert [each["step_seconds"] for each in options] == sorted(each["step_seconds"] for each in options)
    assert {each["plan"] for each in options} >= {"dp=1", "dp=2", "dp=1,tp=2"}
    assert all(
        each["bytes"].keys() == {axis for axis in ("dp", "pp", "tp") if f"{axis}=2" in each["plan"]}
        for each in options
    )
    assert records[0]["event"] == "one_device" and records[0]["fits"] is True
    assert records[-1] == {
        "event": "recommended",
        "plan": str(found.recommended and found.recommended.plan),
        "why": found.reason,
        "exchange": found.exchange,
    }
    (speedup,) = (each for each in records if each["event"] == "speedup")
    assert 1.0 <= speedup["with_communication"] <= speedup["bound"] <= 2.0
    written = io.StringIO()
    print_advice(found, Console(width=200, file=written))
    text = written.getvalue()
    assert "<- take this" in text and found.reason in text and "Amdahl:" in text


@pytest.mark.slow
def test_a_loss_that_decides_by_values_is_priced():
    job = make_job("mlp", "sgd")

    def depends_on_data(model: Any, batch: Any) -> Any:
        loss = job.loss(model, batch)
        return loss * 2 if float(loss) > 100 else loss

    found = advise(
        replace(job, loss=depends_on_data), devices(), plans=[Plan(), Plan.parse("dp=2"), Plan.parse("tp=2")]
    )
    assert {str(each.plan) for each in found.options} == {"dp=1", "dp=2"}
    assert found.one_device.peak > 0


@pytest.mark.long
def test_an_optimizer_that_needs_values_has_its_memory_measured():
    job = make_job("mlp", "sgd")

    class Careful(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    assert float(parameter.detach().sum()) != 2.0, "a parameter without values says 2"
            return super().step(closure)

    found = advise(
        replace(job, optimizer=lambda named: Careful(named, lr=0.1), scheduler=None),
        devices(),
        plans=[Plan()],
    )
    assert found.one_device.peak > found.one_device.parameters > 0


@pytest.mark.slow
def test_a_plan_that_cannot_run_the_job_is_the_error_when_it_was_the_only_one():
    with pytest.raises(PlanError, match="16 stages need 15. Use at most 6 stages"):
        advise(make_job("mlp", "sgd"), devices(), plans=[Plan.parse("pp=16,microbatches=2")])


def test_a_machine_that_computes_twice_as_fast_takes_half_of_what_is_computed():
    found = rehearse(make_job("mlp", "sgd"), Plan(), threads=1, common_memory=False)
    here, there = (price_step(each, machine()) for each in (found, at_speed(found, 0.5)))
    assert there.seconds == pytest.approx(here.seconds / 2)


@pytest.mark.slow
def test_a_pricer_reads_a_job_once_for_each_size_of_chunk(monkeypatch: pytest.MonkeyPatch):
    from meshloom.planner import readings

    sizes: list[int] = []
    real = readings.capture_shapes
    monkeypatch.setattr(
        readings,
        "capture_shapes",
        lambda job, batch, **how: (sizes.append(len(batch["y"])), real(job, batch, **how))[1],
    )
    pricer = Pricer(make_job("mlp", "sgd"), devices())
    for text in ("dp=1", "dp=2", "dp=2,zero=1", "dp=2,microbatches=1"):
        pricer.price(Plan.parse(text))
    assert sorted(sizes) == [6, 12]


@pytest.mark.slow
def test_what_is_done_for_each_plan_is_told():
    """`meshloom plan` was silent for minutes while it read a loss or looked for a division."""
    lines: list[str] = []
    timings, entered = Timings(), list[tuple[str, str]]()
    timings.entered = lambda phase: entered.append((lines[-1], phase or ""))
    advise(
        make_job("mlp", "sgd"),
        devices(),
        plans=[Plan(), Plan.parse("pp=2")],
        tell=lines.append,
        timings=timings,
    )
    assert lines == ["reading the loss", "rehearsing plan 1 of 2: dp=1", "rehearsing plan 2 of 2: dp=1,pp=2"]
    assert ("reading the loss", "reading") in entered and (lines[2], "choosing cuts") in entered
