"""Where PyTorch's pipelining claims the same schedule, its action lists are ours; where its order differs,
ours idles and holds no more.

Its lists are built by its own constructors, or are what its schedules do with a stage that takes notes.
Nothing is sent.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as theirs

from meshloom.pipeline.schedules.builders import make_schedule
from meshloom.pipeline.schedules.check import check_schedule, most_in_flight
from meshloom.pipeline.schedules.schedule import Action, Kind, Schedule, folded, looped
from meshloom.pipeline.schedules.timing import Durations, Timed, run_on_paper
from tests.covering import few

pytestmark = pytest.mark.long
KINDS: dict[str, Kind] = {"F": "F", "B": "B", "I": "I", "W": "W"}
# Qi et al. (2024): ranks, microbatches, milliseconds of F, I, W and of a transfer as profiled, and the bubble
# rates they give for 1F1B and ZB-H1.
PROFILED = {
    "1.5B": (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585),
    "6.2B": (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323),
    "14.6B": (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397),
    "28.3B": (32, 96, 10.419, 10.315, 7.715, 0.408, 0.2646, 0.1421),
}


class Noting:
    """A stage that notes what its schedule asks of it. Nothing comes in and nothing leaves."""

    def __init__(self, number: int, num_stages: int) -> None:
        self.stage_index, self.num_stages, self.is_last = number, num_stages, number + 1 == num_stages
        self.noted: list[Action] = []

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.noted.append(Action(self.stage_index, "F", microbatch))

    def backward_one_chunk(self, microbatch: int, **_: Any) -> None:
        self.noted.append(Action(self.stage_index, "B", microbatch))

    def _nothing(self, *_: Any, **__: Any) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = perform_reduce_grad = _nothing


def done_by(kind: type[Any], name: str, p: int, m: int) -> Schedule:
    """What a schedule of one stage a rank does, rank by rank."""
    rows: list[tuple[Action, ...]] = []
    for rank in range(p):
        stage = Noting(rank, p)
        schedule = kind(stage, m)
        schedule._stage_forward_initialized = schedule._stage_backward_initialized = True
        schedule._initialize_stage = lambda *_: None
        schedule._step_microbatches([()] * m, [{}] * m)
        rows.append(tuple(stage.noted))
    return Schedule(name=name, ranks=looped(p, 1), num_microbatches=m, actions=tuple(rows))


def built_by(kind: type[Any], name: str, ranks: tuple[int, ...], m: int) -> Schedule:
    """The lists that a schedule of several stages a rank constructs."""
    p, count = max(ranks) + 1, len(ranks)
    stages = [
        SimpleNamespace(num_stages=count, group_size=p, group_rank=0, stage_index=stage, submod=None, is_last=stage + 1 == count)
        for stage in range(count) if ranks[stage] == 0
    ]  # fmt: skip
    order = kind(stages, m).pipeline_order
    rows = [
        tuple(Action(each.stage_index, KINDS[each.computation_type.value], each.microbatch_index) for each in order[rank] if each is not None)
        for rank in range(p)
    ]  # fmt: skip
    return Schedule(name=name, ranks=ranks, num_microbatches=m, actions=tuple(rows))


def on_paper(
    schedule: Schedule, forward: float = 1.0, inputs: float = 1.0, weights: float = 1.0, transfer: float = 0.0
) -> Timed:
    """Of stages that are all alike and take these times together on a rank."""
    share = schedule.num_ranks / schedule.num_stages
    takes = {"F": forward * share, "I": inputs * share, "W": weights * share, "B": (inputs + weights) * share}
    return run_on_paper(schedule, lambda action: takes[action.kind], lambda before, after: transfer)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("extra", [0, 1, 4, 9])
@pytest.mark.every
def test_gpipe_and_1f1b_are_the_same_lists(p: int, extra: int):
    m = p + extra  # theirs refuses 1f1b with fewer
    for name, kind in (("gpipe", theirs.ScheduleGPipe), ("1f1b", theirs.Schedule1F1B)):
        found = done_by(kind, name, p, m)
        check_schedule(found)
        assert make_schedule(name, p, m) == found


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.every
def test_interleaved_is_the_same_list_for_whole_groups(p: int, v: int, groups: int):
    found = built_by(theirs.ScheduleInterleaved1F1B, "interleaved", looped(p, v), p * groups)
    check_schedule(found)
    assert make_schedule("interleaved", p, p * groups, v) == found


@pytest.mark.parametrize(("p", "m"), [(4, 6), (4, 10), (3, 4), (8, 12), (8, 20)])
@pytest.mark.parametrize("v", [2, 3])
def test_interleaved_holds_less_where_a_group_is_incomplete(p: int, m: int, v: int):
    """PyTorch makes all groups larger then: it holds more microbatches, and may be shorter for it."""
    found = built_by(theirs.ScheduleInterleaved1F1B, "interleaved", looped(p, v), m)
    made = make_schedule("interleaved", p, m, v)
    check_schedule(found)
    assert max(most_in_flight(made)) < max(most_in_flight(found))
    assert on_paper(made).length < on_paper(make_schedule("1f1b", p, m)).length


# it refuses others
@pytest.mark.parametrize(
    ("p", "m"), [(p, m) for p in (2, 3, 4, 8) for m in (8, 15, 16, 32) if m % max(1, m // p) == 0]
)
def test_zb_h1_is_the_same_list(p: int, m: int):
    """What PyTorch calls ZB1P."""
    found = built_by(theirs.ScheduleInterleavedZeroBubble, "zb-h1", looped(p, 1), m)
    check_schedule(found, in_flight=p)
    assert make_schedule("zb-h1", p, m) == found


@pytest.mark.covering("times1")
@pytest.mark.parametrize("p", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("m", few([1, 3, 8, 15, 16, 32], 4, pytest.mark.slow))
@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.1, 0.7), (1.0, 1.4, 1.0)])
@pytest.mark.every
def test_zb_v_is_never_longer_and_holds_no_more(p: int, m: int, times: tuple[float, float, float]):
    found = built_by(theirs.ScheduleZBVZeroBubble, "zb-v", folded(p), m)
    check_schedule(found, in_flight=2 * p)
    forward, inputs, weights = ([each / 2] * (2 * p) for each in times)
    made = make_schedule(
        "zb-v", p, m, durations=Durations(forward=forward, input_gradient=inputs, weight_gradient=weights)
    )
    assert on_paper(made, *times).length <= on_paper(found, *times).length + 1e-9  # sums in another order
    assert max(most_in_flight(made)) <= 2 * p


@pytest.mark.covering("6.2B", "1.5B")
@pytest.mark.parametrize("model", [*list(PROFILED)[:3], pytest.param("28.3B", marks=pytest.mark.slow)])
def test_bubble_rates_of_the_zero_bubble_paper(model: str):
    """To half a thousandth: the paper's times are rounded."""
    p, m, *times, of_1f1b, of_zb_h1 = PROFILED[model]
    for name, published in (("1f1b", of_1f1b), ("zb-h1", of_zb_h1)):
        length = on_paper(make_schedule(name, p, m), *times).length
        assert (length - m * sum(times[:3])) / length == pytest.approx(published, abs=5e-4)
