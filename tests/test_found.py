"""Schedules that are searched: never longer than the named ones, optimal where all can be tried, and run as any other."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshloom.core.errors import PlanError
from meshloom.core.plan import Plan
from meshloom.core.schedules import SCHEDULES
from meshloom.pipeline.runtime.microbatches import first_microbatches
from meshloom.pipeline.schedules.builders import make_schedule
from meshloom.pipeline.schedules.check import check_schedule, most_in_flight
from meshloom.pipeline.schedules.found import find_schedule, limits_of_1f1b
from meshloom.pipeline.schedules.schedule import Schedule
from meshloom.pipeline.schedules.timing import Durations, length_of
from meshloom.pipeline.stages.intervals import StageCost
from meshloom.pipeline.stages.plan_cuts import schedule_of, stage_times
from meshloom.program.cost.rates import Rates
from meshloom.train.trainer import Trainer
from meshloom.verify.run import verify
from tests.jobs import class_loss, make_job
from tests.processes import on_ranks
from tests.verified import equals_one_device


def drawn(chance: random.Random, p: int, m: int, *, uneven: bool) -> Durations:
    """Stages that differ by up to 1.05, or up to 4; transfers of up to half a forward; sometimes a smaller last microbatch."""
    least, most = (0.5, 2.0) if uneven else (1.0, 1.05)
    forward = [chance.uniform(least, most) for _ in range(p)]
    return Durations(
        forward=forward,
        input_gradient=[each * chance.uniform(0.7, 1.4) for each in forward],
        weight_gradient=[each * chance.uniform(0.2, 1.2) for each in forward],
        sent=[chance.choice([0.0, 0.1, 0.5]) for _ in range(p)],
        returned=[chance.choice([0.0, 0.1, 0.5]) for _ in range(p)],
        sizes=[1.0] * (m - 1) + [chance.uniform(0.3, 1.0)] if chance.random() < 0.2 else (),
    )


def named_within(p: int, m: int, durations: Durations, limits: Sequence[int]) -> Iterator[Schedule]:
    for name, entry in SCHEDULES.items():
        if entry.stages_per_rank == 1 and name != "found":
            made = make_schedule(name, p, m, durations=durations)
            if all(map(int.__le__, most_in_flight(made), limits)):
                yield made


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_never_longer_than_the_named_ones_and_shorter_on_uneven_stages():
    chance, gains = random.Random(63), dict[str, list[float]]()
    for number in range(2000):
        p, m, uneven = chance.randint(2, 6), chance.randint(1, 12), chance.random() < 0.75
        durations = drawn(chance, p, m, uneven=uneven)
        any_limits = [chance.randint(1, 2 * p) for _ in range(p)]
        kind = chance.choice(["those of 1f1b", "those of 1f1b", "those of zb-h1", "any"])
        limits = {"those of 1f1b": limits_of_1f1b(p), "those of zb-h1": [p] * p, "any": any_limits}[kind]
        found = find_schedule(p, m, durations, limits)
        check_schedule(found)
        assert found.name == "found" and found.num_microbatches == m
        assert all(map(int.__le__, most_in_flight(found), limits)), number
        length = length_of(found, durations)
        if known := [length_of(each, durations) for each in named_within(p, m, durations, limits)]:
            assert length <= min(known) * (1 + 1e-9), number
            if uneven:
                gains.setdefault(kind, []).append(1 - length / min(known))
    for kind, of_kind in gains.items():
        by_5 = sum(gain >= 0.05 for gain in of_kind)
        print(f"limits: {kind}: {by_5} of {len(of_kind)} by 5% or more, median {median(of_kind):.1%}, most {max(of_kind):.1%}")  # fmt: skip
    assert median(gains["those of 1f1b"]) >= 0.05


def words(m: int, limit: int) -> list[str]:
    """All orders of a rank in which microbatches of one kind follow each other: a B is an I with its W behind it."""

    def longer(word: str) -> Iterator[str]:
        forwards, inputs, weights = map(word.count, "FIW")
        if weights == m:
            yield word
        if forwards < m and forwards - weights < limit:
            yield from longer(f"{word}F")
        if inputs < forwards:
            yield from longer(f"{word}I")
        if weights < inputs:
            yield from longer(f"{word}W")

    return list(longer(""))


def length_of_words(rows: Sequence[str], durations: Durations) -> float:
    """Ranks take turns, each with one action if what it needs has an end; infinite where none has."""
    takes = {"F": durations.forward, "I": durations.input_gradient, "W": durations.weight_gradient}
    ends: dict[tuple[int, str, int], float] = {}
    at, free = [0] * len(rows), [0.0] * len(rows)
    while any(place < len(row) for place, row in zip(at, rows, strict=True)):
        before = sum(at)
        for rank, row in enumerate(rows):
            if at[rank] == len(row):
                continue
            kind = row[at[rank]]
            number = row[: at[rank]].count(kind)
            arrives = 0.0
            if kind == "F" and rank:
                arrives = ends.get((rank - 1, "F", number), -1.0)
                sent = durations.sent[rank - 1]
            elif kind == "I" and rank + 1 < len(rows):
                arrives = ends.get((rank + 1, "I", number), -1.0)
                sent = durations.returned[rank + 1]
            else:
                sent = 0.0
            if arrives >= 0:
                free[rank] = max(free[rank], arrives + sent) + takes[kind][rank]
                ends[rank, kind, number] = free[rank]
                at[rank] += 1
        if sum(at) == before:
            return float("inf")
    return max(free)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("limits", [[3, 2, 1], [2, 2, 1], [4, 1, 1], [2, 1, 2], [1, 3, 1]])
def test_with_three_stages_and_four_microbatches_none_is_shorter(limits: list[int]):
    """Microbatches of one size can be renamed, so that every kind of action has them in order on each rank."""
    chance = random.Random(str(limits))
    for number in range(3):
        durations = replace(drawn(chance, 3, 4, uneven=number != 2), sizes=())
        rows = product(*(words(4, limit) for limit in limits))
        best = min(length_of_words(each, durations) for each in rows)
        assert length_of(find_schedule(3, 4, durations, limits), durations) == pytest.approx(best, rel=1e-9)


def test_three_stages_by_hand():
    """All actions take a unit; the last rank holds one microbatch at a time. Under 1f1b messages wait for the weights.

    rank 0: F0 F1 .. .. .. I0 W0 .. I1 W1
    rank 1: .. F0 F1 .. I0 W0 .. I1 W1
    rank 2: .. .. F0 I0 W0 F1 I1 W1
    """
    ones = Durations.uniform(3)
    found = find_schedule(3, 2, ones, limits_of_1f1b(3))
    assert length_of(found, ones) == 10 and length_of(make_schedule("1f1b", 3, 2), ones) == 12


def test_without_a_gain_backward_is_not_split():
    """Weights take no time: halves would be launched twice for nothing."""
    durations = Durations(forward=[1.0] * 3, input_gradient=[2.0] * 3, weight_gradient=[0.0] * 3)
    assert make_schedule("found", 3, 6, durations=durations).actions == make_schedule("1f1b", 3, 6).actions


SHOWN = """
from meshloom.pipeline.schedules.builders import make_schedule
from meshloom.pipeline.schedules.timing import Durations
print(make_schedule("found", 3, 5, durations=Durations(forward=[1, 2, 1.5], input_gradient=[1, 2.5, 1], weight_gradient=[1, 1, 0.5], transfer=0.1)))
"""


@pytest.mark.long
def test_equal_numbers_give_equal_schedules_in_every_process():
    texts = [
        subprocess.run(
            [sys.executable, "-c", SHOWN], env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert texts[0] == texts[1] and texts[0].startswith("found: stages on ranks 0 1 2, 5 microbatches")


def cost(seconds: float, state: int, kept: int) -> StageCost:
    return StageCost(
        forward_seconds=seconds, backward_seconds=2 * seconds, later_seconds=seconds, parameters=1, parameter_bytes=4, state_bytes=state, kept_bytes=kept,
        returned_bytes=0, sent_bytes=8, handed_back_bytes=8, module="", last_module="",
    )  # fmt: skip


def test_a_memory_limit_lets_ranks_hold_what_there_is_room_for():
    """Of 1,000 bytes, rank 1 has room for four activations besides those of one, and rank 2 only for what 1f1b holds."""
    stages = [cost(1.0, 100, 200), cost(1.0, 500, 100), cost(2.0, 400, 500)]
    for limit, expected in (("", [3, 2, 1]), (",memory_bytes=1000", [3, 4, 1])):
        plan = Plan.parse(f"pp=3,microbatches=6,schedule=found{limit}")
        times = stage_times(plan, stages, Rates(), [4] * 6)
        assert times is not None and times.limits == expected
        assert all(map(int.__le__, most_in_flight(schedule_of(plan, 6, times)), expected))


def test_a_schedule_of_one_rank_is_refused_as_the_others_are():
    with pytest.raises(PlanError, match="schedule=found is for a pipeline, and pp=1. Use pp=2 or more"):
        Plan.parse("schedule=found")
    with pytest.raises(
        PlanError, match="virtual_stages=2 does not go with schedule=found, which has 1 on each"
    ):
        Plan.parse("pp=2,schedule=found,virtual_stages=2")


class Uneven(nn.Module):
    """[batch, 7] -> [batch, 5]; the widths of its layers are `widths`."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        sizes = [7, *widths]
        self.layers = nn.ModuleList(map(nn.Linear, sizes, [*widths, 5]))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


CASES = [
    ((96, 16, 16), "pp=3,microbatches=4,cuts=layers.1+layers.2"),
    ((16, 64, 64, 16), "pp=3,microbatches=5,cuts=layers.1+layers.3"),
    ((16, 16, 16, 96), "pp=3,microbatches=6,cuts=layers.2+layers.3"),
]


def job_of(widths: Sequence[int]) -> Any:
    return replace(make_job("mlp", "sgd"), model=lambda: Uneven(*widths), loss=class_loss)


def verified(widths: Sequence[int], plan: str) -> bool | None:
    report = verify(job_of(widths), Plan.parse(plan), devices="cpu", steps=2, oversubscribe=True)
    return None if report is None else report.passed


@pytest.mark.slow
@pytest.mark.usefixtures("silent_export")
@pytest.mark.parametrize(("widths", "plan"), CASES)
def test_processes_run_it_and_equal_one_device(widths: tuple[int, ...], plan: str):
    assert on_ranks(verified, 3, widths, f"{plan},schedule=found", timeout_seconds=120.0) == [
        True,
        None,
        None,
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("silent_export")
@pytest.mark.parametrize(
    "plan",
    [
        "dp=2,pp=2,tp=2,microbatches=3,zero=1,recompute=full",
        "dp=2,pp=2,microbatches=3,zero=3,cuts=blocks.1",
        "pp=3,microbatches=5,recompute=selective,memory_bytes=1GiB",
        "pp=2,tp=2,microbatches=2,precision=bf16-mixed",
    ],
)
def test_it_goes_with_other_settings(plan: str):
    equals_one_device(
        make_job("gpt", "adamw"),
        f"{plan},schedule=found",
        dtype=torch.float64 if "bf16" not in plan else None,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("silent_export")
@pytest.mark.parametrize(("widths", "plan"), CASES)
def test_all_ranks_have_the_list_of_the_deciding_rank(widths: tuple[int, ...], plan: str):
    """Of two replicas, also for a batch with fewer microbatches."""
    with Trainer(job_of(widths), f"dp=2,{plan},schedule=found", devices="simulated", steps=2) as trainer:
        trainer.fit()
        replicas: Any = trainer.replicas
        cutters = [replica.engine.stages.cutter for replica in replicas]
        for number in (cutters[0].sizes, [1]):
            first, *others = [cutter.schedule(len(number)) for cutter in cutters]
            assert first.name == "found" and all(each == first for each in others)
        whole = cutters[0].schedule(len(cutters[0].sizes))
        check_schedule(first_microbatches(whole, 2))
        assert whole.split  # a shorter one than 1f1b was found
