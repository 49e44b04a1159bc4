"""The price of a step, of ranks whose times are known, is what one gets by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rehearsals import machine, rehearsal, step

from meshloom.core.errors import MachineError
from meshloom.machine.links import Link
from meshloom.pipeline.schedules.builders import make_schedule
from meshloom.pipeline.schedules.spans import Span
from meshloom.planner.rehearsal.rehearsal import RankStep, RehearsedCall
from meshloom.planner.step_seconds import Places, price_step


def call(axis: Any, kind: str, num_bytes: int, at: float, ranks: int = 2) -> RehearsedCall:
    return RehearsedCall(axis=axis, kind=kind, num_bytes=num_bytes, ranks=ranks, at=at)


def actions(schedule: Any, rank: int, seconds: dict[str, float]) -> tuple[Span, ...]:
    """The rank's actions without gaps."""
    found: list[Span] = []
    now = 0.0
    for action in schedule.actions[rank]:
        stop = now + seconds[action.kind]
        found.append(
            Span(kind=action.kind, start=now, stop=stop, stage=action.stage, microbatch=action.microbatch)
        )
        now = stop
    return tuple(found)


def test_one_rank_takes_what_it_took():
    price = price_step(rehearsal("dp=1", [step(2.0, before=0.25, update=1.0, after=0.5)]), machine())
    assert (price.seconds, price.chunks, price.update, price.other, price.exchange) == (
        3.75,
        2.0,
        1.0,
        0.75,
        0.0,
    )
    assert price.idle_share == 0.0


def test_replicas_take_as_long_as_the_slowest_and_what_they_send():
    ranks = [
        step(chunks, update=0.5, calls=(call("dp", "all_reduce", 3_000_000, at=1.0),))
        for chunks in (2.0, 1.0)
    ]
    price = price_step(rehearsal("dp=2", ranks), machine(latency=0.125, bytes_per_second=1e7))
    # chunks 2.0, all-reduce 0.125 + 3e6 / 1e7, update 0.5
    assert price.seconds == pytest.approx(2.0 + 0.425 + 0.5)
    assert price.exchange == pytest.approx(0.425)
    assert price.idle_share == pytest.approx(1 - (1.5 + 0.5) / 2.925)


def test_ranks_that_share_cores_are_slower_only_while_they_compute_together():
    ranks = [step(2.0, update=1.0), step(2.0, update=0.0)]  # one server updates
    price = price_step(rehearsal("dp=2,exchange=server", ranks), machine(cores=1))
    assert (price.chunks, price.update) == (pytest.approx(2.0 * 2), pytest.approx(1.0))


def test_what_a_network_carries_is_hidden_behind_the_rest_of_the_chunks():
    """10 s of chunks; gradients at 6 s take 3 s, at 9 s take 3 s more: they are through at 12 s.

    chunks  0 ................ 6 ......... 9 ... 10
    network                    [---------][---------] 12
    """
    calls = (call("dp", "all_reduce", 3000, at=6.0), call("dp", "all_reduce", 3000, at=9.0))
    ranks = [step(10.0, calls=calls)] * 2
    between = Link(
        collective="all_reduce",
        ranks=2,
        latency_seconds=0.0,
        bytes_per_second=1000.0,
        residual=0.0,
        place="between",
    )
    there = machine(links=(between,))
    assert price_step(rehearsal("dp=2", ranks), there, places=Places(dp="between")).exchange == pytest.approx(
        2.0
    )
    # inside a host cores move the bytes
    assert price_step(rehearsal("dp=2", ranks), there).exchange == pytest.approx(6.0)


def test_a_divided_layer_waits_for_every_sum():
    calls = tuple(call("tp", "all_reduce", 1000, at=at) for at in (0.5, 1.0, 1.5))
    price = price_step(
        rehearsal("tp=2", [step(2.0, calls=calls)] * 2), machine(latency=0.1, bytes_per_second=1e4)
    )
    assert price.chunks == pytest.approx(2.0 + 3 * 0.2)
    assert price.communication == {"tp": pytest.approx(0.6)}


def test_a_pipeline_takes_the_schedule_with_its_messages():
    """1f1b, two stages, two microbatches, forward 1, backward 2, a message 0.5:

    rank 0   0F0 0F1 .  .  .  .  0B0     0B1         0F0 ends at 1, 0F1 at 2
    rank 1      .  1F0 1B0   1F1 1B1                 1F0 1.5-2.5, 1B0 -4.5, 1F1 -5.5, 1B1 -7.5
    0B0 starts at 5.0 (4.5 + 0.5), ends at 7; 0B1 at 8.0 (7.5 + 0.5), ends at 10
    """
    schedule = make_schedule("1f1b", 2, 2)
    ranks: list[RankStep] = []
    for rank, (kind, sends) in enumerate((("F", 1000), ("B", 1000))):
        spans = actions(schedule, rank, {"F": 1.0, "B": 2.0})
        calls = tuple(call("pp", "send", sends, at=span.stop) for span in spans if span.kind == kind)
        ranks.append(step(6.0, update=0.25, calls=calls, actions=spans))
    found = rehearsal("pp=2,microbatches=2", ranks, schedule=schedule)
    price = price_step(found, machine(bytes_per_second=2000.0))
    assert price.chunks == pytest.approx(10.0)
    assert price.seconds == pytest.approx(10.25)
    assert price.idle_share == pytest.approx(1 - 6.25 / 10.25)


def test_a_pipeline_of_divided_layers_talks_within_its_actions():
    """One microbatch: 0F0, 1F0, 1B0, 0B0 one after another, each with a sum of 0.5 s along tp; gaps of 0.25 s
    belong to the action that comes."""
    schedule = make_schedule("1f1b", 2, 1)
    ranks: list[RankStep] = []
    for place in (0, 0, 1, 1):  # ranks in order of pp, then of tp
        spans = (
            Span(kind="F", start=0.0, stop=1.0, stage=place, microbatch=0),
            Span(kind="B", start=1.25, stop=3.25, stage=place, microbatch=0),
        )
        calls = tuple(call("tp", "all_reduce", 500, at=at) for at in (0.5, 2.0))
        ranks.append(step(3.5, calls=calls, actions=spans))
    price = price_step(rehearsal("pp=2,tp=2", ranks, schedule=schedule), machine(bytes_per_second=1000.0))
    # two forwards of 1.5, two backwards of 0.25 + 2.5, and 0.25 after the last action
    assert price.chunks == pytest.approx(2 * 1.5 + 2 * 2.75 + 0.25)
    assert price.communication == {"tp": pytest.approx(1.0)}


def test_a_pipeline_on_one_core_takes_the_sum():
    schedule = make_schedule("1f1b", 2, 2)
    ranks = [step(6.0, actions=actions(schedule, rank, {"F": 1.0, "B": 2.0})) for rank in range(2)]
    price = price_step(rehearsal("pp=2,microbatches=2", ranks, schedule=schedule), machine(cores=1))
    assert price.seconds == pytest.approx(12.0)


def test_steps_of_a_round_are_averaged_and_of_others_the_median_counts():
    def steps(plan: str) -> Any:
        one = rehearsal(plan, [step(1.0), step(1.0)])
        return type(one)(**{**vars(one), "steps": tuple((step(chunks),) * 2 for chunks in (1.0, 2.0, 9.0))})

    assert price_step(steps("dp=2,exchange=local_sgd,local_steps=3"), machine()).seconds == pytest.approx(4.0)
    assert price_step(steps("dp=2"), machine()).seconds == pytest.approx(2.0)


@given(
    st.floats(1e3, 1e9),
    st.floats(1.0, 100.0),
    st.lists(
        st.tuples(st.integers(0, 10**7), st.floats(0.0, 1.0), st.sampled_from(["dp", "tp"])), max_size=6
    ),
    st.sampled_from(["inside", "between"]),
)
@pytest.mark.long
def test_more_bandwidth_never_makes_a_plan_slower(
    rate: float, times: float, sent: list[tuple[int, float, Any]], place: Any
):
    calls = tuple(
        call(axis, "all_reduce", num_bytes, at)
        for num_bytes, at, axis in sorted(sent, key=lambda each: each[1])
    )
    found = rehearsal("dp=2,tp=2", [step(1.0, update=0.1, calls=calls)] * 4)
    slow, fast = (
        price_step(found, machine(latency=1e-4, bytes_per_second=each), places=Places(dp=place)).seconds
        for each in (rate, rate * times)
    )
    assert fast <= slow * (1 + 1e-12)


def test_a_machine_of_one_rank_has_no_price_for_talking():
    with pytest.raises(MachineError, match="Calibrate with --ranks 2 or more"):
        price_step(
            rehearsal("dp=2", [step(1.0, calls=(call("dp", "all_reduce", 8, at=1.0),))] * 2),
            machine(links=()),
        )
