"""Plans for clusters that are not here: what a rank does is counted by hand, its memory and bytes are those of other parts of the package, and the
search finds what pricing every plan finds."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshloom.cli.main import main
from meshloom.clusters.cluster import named
from meshloom.clusters.work import OperatorWork, Sent
from meshloom.core.errors import PlanError
from meshloom.core.plan import Plan
from meshloom.pipeline.schedules.builders import make_schedule
from meshloom.pipeline.schedules.check import most_in_flight
from meshloom.pipeline.stages.stage_traffic import sent_over_tp
from meshloom.pipeline.stages.stages import cut_into_stages
from meshloom.planner.memory.dry_run import DryStages
from meshloom.planner.on_clusters.answer import answer
from meshloom.planner.on_clusters.cluster_parts import ClusterParts
from meshloom.planner.on_clusters.rank_records import NodeRecord, records_of
from meshloom.planner.on_clusters.search import search
from meshloom.planner.on_clusters.step import ClusterStep, chunks_in_flight
from meshloom.planner.ranks import ranks_of
from meshloom.planner.readings import Readings
from meshloom.planner.staged_plan import staged
from meshloom.program.cost.rates import Rates
from meshloom.program.ir.program import Program
from meshloom.tensor_parallel.layout.layout import layout_of
from meshloom.tensor_parallel.partition import partition
from meshloom.tensor_parallel.rules.table import BUILT_IN
from meshloom.tensor_parallel.search.choose import choose
from tests.cluster_jobs import BLOCKS, GPT, LENGTH, WIDTH, job, products

LOSS = 4  # bytes: where backward starts
HOST = named("a100-80gb-sxm")


@pytest.fixture(scope="module")
def readings() -> Readings:
    return Readings(job)


@pytest.fixture(scope="module")
def parts() -> ClusterParts:
    return ClusterParts(job, HOST)


def rank_program(readings: Readings, samples: int, tp: int) -> Program:
    program = readings.of(samples).program
    if tp == 1:
        return program
    return partition(choose(layout_of(program, BUILT_IN), tp, Rates())).of(0).program


def total(records: dict[str, NodeRecord], side: str) -> int:
    did = [each for record in records.values() for each in getattr(record, side)]
    return sum(each.flops * each.times for each in did if isinstance(each, OperatorWork))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.long
def test_flops_are_those_of_the_formula(readings: Readings, tp: int) -> None:
    found = records_of(rank_program(readings, 8, tp), tp=tp)
    assert total(found, "forward") == products(8) // tp
    scores = 4 * 8 * LENGTH**2 * WIDTH * BLOCKS // tp
    assert total(found, "backward") == 2 * (products(8) // tp) + scores // 2, "scores are computed again"


@pytest.mark.parametrize("tp", [2, 4])
def test_bytes_along_tp_are_those_that_ranks_count(readings: Readings, tp: int) -> None:
    program = rank_program(readings, 8, tp)
    found = Counter[str]()
    for record in records_of(program, tp=tp).values():
        for each in (*record.forward, *record.backward):
            if isinstance(each, Sent):
                handed_in = each.num_bytes // tp if each.collective == "all_gather" else each.num_bytes
                found[each.collective] += handed_in * each.times
    stages = cut_into_stages(program, {node.name: 0 for node in program.nodes}, 1)
    assert found == sent_over_tp(stages, 0)
    assert sum(found.values()) > 0


@pytest.mark.parametrize("tp", [1, 2])
def test_what_is_kept_is_what_a_rank_keeps(readings: Readings, tp: int) -> None:
    program = rank_program(readings, 8, tp)
    given = {*program.constants} | {
        each.value for each in (*program.parameters.values(), *program.buffers.values(), *program.inputs)
    }
    kept = {
        each.memory: each.num_bytes
        for record in records_of(program, tp=tp).values()
        for each in record.kept
        if each.memory not in given
    }
    (stage,) = cut_into_stages(program, {node.name: 0 for node in program.nodes}, 1)
    # operators of a divided table and head keep themselves which tokens are here, and where
    of_tables = 2 * 8 * LENGTH * (1 + 8) if tp > 1 else 0
    assert sum(kept.values()) == DryStages(tp).kept(stage) - LOSS - of_tables


@pytest.mark.long
def test_other_sizes_follow_from_two(parts: ClusterParts, readings: Readings) -> None:
    part = parts.of(1)
    for samples in (4, 24):
        assert part.flops(samples) == sum(
            total(records_of(readings.of(samples).program), side) for side in ("forward", "backward")
        )
        (stage,) = part.stages(1, samples, "none")
        program = readings.of(samples).program
        whole = cut_into_stages(program, {node.name: 0 for node in program.nodes}, 1)[0]
        assert stage.kept == DryStages().kept(whole) - LOSS


@pytest.mark.parametrize("count", [4, 20])
@pytest.mark.long
def test_stages_add_up(count: int, parts: ClusterParts) -> None:
    part = parts.of(2)
    (whole,) = part.stages(1, 4, "none")
    cut = part.stages(count, 4, "none")
    assert len(cut) == count
    assert max(each.forward + each.backward for each in cut) < 4 / count * (whole.forward + whole.backward)
    assert sum(each.forward for each in cut) == pytest.approx(whole.forward)
    assert sum(each.backward for each in cut) == pytest.approx(whole.backward)
    assert sum(each.parameters for each in cut) == whole.parameters
    assert min(each.sent for each in cut[:-1]) >= 4 * LENGTH * WIDTH * 4, "the residual stream goes on"


def test_memory_of_a_plan_by_hand(parts: ClusterParts) -> None:
    elements = sum(each.numel() for each in GPT().parameters())
    for zero, slices in ((0, (1, 1, 1)), (1, (1, 4, 4)), (2, (1, 4, 4)), (3, (4, 4, 4))):
        step = parts.pricer.step(Plan(dp=4, zero=zero), parts.of(1), 8)
        held = [step.memory[kind] for kind in ("parameters", "gradients", "optimizer")]
        expected = [4 * elements / slices[0], 4 * elements / slices[1], 8 * elements / slices[2]]
        assert held == pytest.approx(expected, rel=0.01)


def test_bytes_along_dp(parts: ClusterParts) -> None:
    gradients = sum(each.numel() for each in GPT().parameters()) * 4
    plans = {"dp=4": 1.0, "dp=4,zero=1": 1.25, "dp=4,zero=2,microbatches=2": 2.25}
    for text, times in plans.items():
        plan = Plan.parse(text)
        assert parts.pricer.step(plan, parts.of(1), 8 // plan.microbatches).sent["dp"] == times * gradients


@pytest.mark.parametrize(
    "text",
    [
        "dp=2",
        "dp=4,zero=1",
        "dp=4,zero=2",
        "dp=2,zero=3",
        "pp=2,microbatches=4",
        "pp=4,microbatches=8",
        "pp=2,microbatches=4,schedule=gpipe",
    ],
)
@pytest.mark.long
def test_memory_and_bytes_are_those_that_describe_says(
    text: str, parts: ClusterParts, readings: Readings
) -> None:
    plan = Plan.parse(text)
    stages = staged(readings, plan, offers=False) if plan.pp > 1 else None
    shares, memories = ranks_of(readings, plan, None, stages)
    found = parts.pricer.step(plan, parts.of(1), 32 // plan.dp // plan.microbatches)
    assert found.peak == pytest.approx(max(each.phases["step"] for each in memories), rel=0.03)
    if plan.pp == 1:
        assert found.sent == shares[0].num_bytes


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1"])
def test_a_long_schedule_follows_from_a_short_one(
    parts: ClusterParts, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More microbatches take as long each: what is extrapolated is what execution of all of them on paper gives."""
    from meshloom.planner.on_clusters import step

    plan = Plan(pp=2, microbatches=32, schedule=schedule)
    found = parts.pricer.step(plan, parts.of(1), 1, simulated=True)
    make = step.make_schedule
    lengths: list[int] = []

    def counting(name: str, p: int, count: int, *more: Any) -> Any:
        lengths.append(count)
        return make(name, p, count, *more)

    monkeypatch.setattr(step, "make_schedule", counting)
    monkeypatch.setattr(step, "FEW_ROUNDS", 100)
    whole = parts.pricer.step(plan, parts.of(1), 1, simulated=True)
    assert lengths == [32]
    assert found.seconds == pytest.approx(whole.seconds, rel=1e-3)


@pytest.mark.slow
def test_the_search_finds_what_pricing_everything_finds() -> None:
    cluster = named("a100-80gb-sxm", hosts=2)
    parts = ClusterParts(job, cluster)
    found = search(parts.of, parts.pricer, cluster, 32)
    everything: list[ClusterStep] = []
    for plan in _all_plans(16, 32):
        try:
            everything.append(
                parts.pricer.step(plan, parts.of(plan.tp), 32 // plan.dp // plan.microbatches, simulated=True)
            )
        except PlanError:
            continue
    assert len(everything) > 100
    assert found.steps[0].seconds == pytest.approx(min(each.seconds for each in everything), rel=1e-9)


def _all_plans(gpus: int, batch: int) -> list[Plan]:
    powers = (1, 2, 4, 8, 16, 32)
    found: list[Plan] = []
    for tp, pp, dp, m in (
        (tp, pp, dp, m) for tp in powers[:4] for pp in powers for dp in powers for m in powers
    ):
        if tp * pp * dp != gpus or batch % (dp * m):
            continue
        for schedule, v in (
            (("1f1b", 0), ("interleaved", 2), ("zb-h1", 0), ("zb-v", 0)) if pp > 1 else (("1f1b", 0),)
        ):
            for zero in (0, 1, 2, 3) if dp > 1 else (0,):
                for recompute in ("none", "full"):
                    try:
                        found.append(
                            Plan(tp=tp, pp=pp, dp=dp, microbatches=m, schedule=schedule, virtual_stages=v, zero=zero, recompute=recompute)
                        )  # fmt: skip
                    except PlanError:
                        continue
    return found


@pytest.mark.long
def test_too_little_memory_is_met_by_computing_again_or_by_slices() -> None:
    full = ClusterParts(job, HOST).pricer.step(Plan(dp=8), ClusterParts(job, HOST).of(1), 4)
    room = HOST.device.runtime_bytes + full.peak - 1
    small = replace(HOST, device=replace(HOST.device, memory_bytes=room))
    parts = ClusterParts(job, small)
    found = search(parts.of, parts.pricer, small, 32, fixed={"dp": 8, "microbatches": 1})
    assert all(each.peak < full.peak for each in found.steps)
    assert found.steps
    assert any(each.plan == Plan(dp=8) for each in found.fits_not)


@pytest.mark.long
def test_the_cheapest_plan_leaves_hosts_out_that_wait_for_each_other() -> None:
    cluster = named("h100-80gb-sxm", hosts=2)
    parts = ClusterParts(job, cluster)
    fastest, cheapest = (
        answer(job, cluster, parts, precision="float32", fixed={"tp": 1, "pp": 1}, objective=each, batch=32)
        for each in ("time", "cost")
    )
    assert fastest.best and cheapest.best and fastest.cluster.hosts == 2 and cheapest.cluster.hosts == 1
    assert cheapest.gpu_hours(cheapest.best) < fastest.gpu_hours(fastest.best)
    low, high = cheapest.interval(cheapest.best)
    assert low * (1 + cluster.device.step_error) == pytest.approx(cheapest.best.seconds)
    assert high * (1 - cluster.device.step_error) == pytest.approx(cheapest.best.seconds)


@pytest.mark.long
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = tmp_path / "plans.json"
    words = [
        "plan",
        "tests/cluster_jobs.py:job",
        "--cluster",
        "h100-80gb-sxm",
        "--hosts",
        "2",
        "--fix",
        "tp=2",
        "--cache",
        "off",
    ]
    assert main([*words, "--json", str(records)]) == 0
    shown = capsys.readouterr().out
    assert "16 GPUs of h100-80gb-sxm" in shown
    plans = [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()]
    plans = [each for each in plans if each["event"] == "plan"]
    assert plans
    assert all("tp=2" in each["plan"] and each["gpus"] == 16 for each in plans)
    assert all(each["step_seconds"] == pytest.approx(sum(each["breakdown"].values())) for each in plans)
    assert all(each["peak_bytes"] == sum(each["memory"].values()) for each in plans)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cluster", "h100"], "There is no cluster 'h100'"),
        (["--cluster", "h100-80gb-sxm", "--devices", "4"], "--devices is of devices that are here"),
        (
            ["--cluster", "h100-80gb-sxm", "--plan", "dp=16"],
            "needs 16 GPUs, and h100-80gb-sxm with --hosts 1 has 8",
        ),
        (["--fabric", "8x400"], "--fabric is of a cluster"),
        (["--cluster", "h100-80gb-sxm", "--compare", "dp=8", "dp=8,precision=bf16"], "the same precision"),
    ],
)
def test_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tests/cluster_jobs.py:job", "--cache", "off", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_chunks_in_flight_are_those_of_the_actions(schedule: str) -> None:
    for p, m in ((2, 3), (4, 4), (4, 16), (5, 20)):
        made = make_schedule(schedule, p, m)
        v = made.num_stages // p
        for rank, most in enumerate(most_in_flight(made)):
            bound = chunks_in_flight(schedule, p, rank, m, v)
            assert most <= bound, f"{schedule}, {m} microbatches: rank {rank} of {p}"
            if schedule in ("gpipe", "1f1b") or (schedule == "interleaved" and m % p == 0):
                assert most == bound
