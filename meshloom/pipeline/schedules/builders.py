"""The schedules that a plan can name, for any number of ranks, microbatches and virtual stages.

gpipe         all forwards, then all backwards (Huang et al., 2019)
1f1b          alternating forwards and backwards, from the first gradient on (Narayanan et al., 2019)
interleaved   the same with several stages on each rank (Narayanan et al., 2021, section 2.2)
zb-h1         backward in two halves; weight gradients fill the idle time, with the memory of 1f1b (Qi et al., 2024)
zb-v          the same with two stages per rank, folded (Qi et al., 2024, "Pipeline parallelism with controllable memory")
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pkgutil import resolve_name

from meshloom.core.errors import PlanError
from meshloom.core.schedules import SCHEDULES
from meshloom.core.units import format_count
from meshloom.pipeline.schedules.check import legal_order
from meshloom.pipeline.schedules.greedy import Forwards, build_greedily
from meshloom.pipeline.schedules.schedule import Action, Schedule, folded, looped
from meshloom.pipeline.schedules.schedule import Kind as ActionKind
from meshloom.pipeline.schedules.timing import Durations, length_of


def make_schedule(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int | None = None,
    durations: Durations | None = None,
) -> Schedule:
    """The schedule called `name`. Raises `PlanError` for an unknown name or unsupported numbers.

    stages_per_rank: v; default: the schedule's own, 2 for interleaved.
    durations: of each stage's actions, for schedules built greedily; default: all equal.

    >>> print(make_schedule("1f1b", 2, 3))
    1f1b: stages on ranks 0 1, 3 microbatches
    rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
    rank 1: 1F0 1B0 1F1 1B1 1F2 1B2
    """
    if name not in SCHEDULES:
        raise PlanError(f"schedule={name} is not known. Use one of {', '.join(SCHEDULES)}.")
    entry = SCHEDULES[name]
    stages = stages_per_rank if stages_per_rank is not None else entry.stages_per_rank
    if num_ranks < 1 or num_microbatches < 1 or stages < 1:
        raise PlanError(
            f"A schedule needs 1 or more of each: it has pp={num_ranks}, microbatches={num_microbatches}, virtual_stages={stages}."
        )
    if not entry.any_number and stages != entry.stages_per_rank:
        raise PlanError(
            f"schedule={name} has {format_count(entry.stages_per_rank, 'stage')} on a rank, not virtual_stages={stages}."
        )
    return resolve_name(entry.builder)(num_ranks, num_microbatches, stages, durations)


def gpipe(p: int, m: int, v: int, durations: Durations | None) -> Schedule:
    rows = [
        [*(Action(rank, "F", number) for number in range(m)), *(Action(rank, "B", number) for number in range(m))] for rank in range(p)
    ]  # fmt: skip
    return _schedule("gpipe", looped(p, 1), m, rows)


def one_forward_one_backward(p: int, m: int, v: int, durations: Durations | None) -> Schedule:
    rows = []
    for rank in range(p):
        forwards = [Action(rank, "F", number) for number in range(m)]
        backwards = [Action(rank, "B", number) for number in range(m)]
        rows.append(_alternated(forwards, backwards, min(m, p - rank)))
    return _schedule("1f1b", looped(p, 1), m, rows)


def interleaved(p: int, m: int, v: int, durations: Durations | None) -> Schedule:
    """Microbatches in groups of p: a group passes a rank's first stage, then its second, ...

    Optimal if all groups are complete. Otherwise the greedy schedule with the same memory may be shorter.
    """
    groups = [range(start, min(start + p, m)) for start in range(0, m, p)]
    places = [(turn, number) for group in groups for turn in range(v) for number in group]
    back = [(turn, number) for group in groups for turn in reversed(range(v)) for number in group]
    ranks = looped(p, v)
    limits = [min((p - rank - 1) * (2 if v > 1 else 1) + (v - 1) * p + 1, m * v) for rank in range(p)]
    rows: list[list[Action]] = []
    for rank in range(p):
        forwards = [Action(turn * p + rank, "F", number) for turn, number in places]
        backwards = [Action(turn * p + rank, "B", number) for turn, number in back]
        rows.append(_alternated(forwards, backwards, limits[rank]))
    takes = durations or Durations.uniform(p * v)
    found: list[Schedule | None] = [_schedule("interleaved", ranks, m, rows)]
    if m % p:
        found += [
            build_greedily("interleaved", ranks, m, limits=limits, durations=takes, split=False, urgent=urgent, forwards=forwards)
            for urgent in ("BF", "FB") for forwards in _FORWARDS
        ]  # fmt: skip
    return _shortest(found, takes)


def zero_bubble(p: int, m: int, v: int, durations: Durations | None) -> Schedule:
    """1f1b in which rank r delays weight gradients by r microbatches: each rank holds activations of p."""
    rows: list[list[Action]] = []
    for rank in range(p):
        forwards, inputs, weights = ([Action(rank, kind, number) for number in range(m)] for kind in _HALVES)
        warm = min(m, p - rank)
        row = forwards[:warm]
        late = 0
        for number, action in enumerate(inputs):
            row.append(action)
            if number >= rank:
                row.append(weights[late])
                late += 1
            row += forwards[warm + number : warm + number + 1]
        rows.append([*row, *weights[late:]])
    return _shortest_of_halves(_schedule("zb-h1", looped(p, 1), m, rows), p, durations)


def zero_bubble_v(p: int, m: int, v: int, durations: Durations | None) -> Schedule:
    """ZB-V as drawn in the paper, which is optimal if all actions take equally long; otherwise the greedy
    schedule with the same memory may be shorter."""
    rows = [
        [action for action in _of_the_drawing(p, rank, max(m, 2 * p - 1)) if action.microbatch < m]
        for rank in range(p)
    ]
    return _shortest_of_halves(_schedule("zb-v", folded(p), m, rows), 2 * p, durations)


def _of_the_drawing(p: int, rank: int, m: int) -> Iterator[Action]:
    """A rank's row of ZB-V in Qi et al. (2024), for m >= 2 p - 1: `there` and `back` are its two stages."""
    there, back = rank, 2 * p - 1 - rank
    warm = [(there, "F")] * (2 * (p - rank) - 1)
    warm += [(back, "F"), (there, "F")] * rank + [(back, "FIW")] * (p - rank)
    steady = [(there, "FIW"), (back, "FIW")] * (m - 2 * p + rank + 1)
    steady += [(there, "IW"), (back, "FIW")] * (p - rank - 1)
    cool = [(there, "I"), (back, "I")] * rank + [(there, "IW")] * (p - rank)
    cool += [(back, "W")] * rank + [(there, "W")] * rank
    numbers: Counter[tuple[int, str]] = Counter()
    for stage, kinds in [*warm, *steady, *cool]:
        for kind in _HALVES:
            if kind in kinds:
                yield Action(stage, kind, numbers[stage, kind])
                numbers[stage, kind] += 1


def _shortest_of_halves(drawn: Schedule, limit: int, durations: Durations | None) -> Schedule:
    """`drawn`, or a shorter greedy schedule with split backwards and `limit` activations on every rank."""
    limits, takes = [limit] * drawn.num_ranks, durations or Durations.uniform(drawn.num_stages)
    build = partial(build_greedily, drawn.name, drawn.ranks, drawn.num_microbatches, limits=limits)
    greedy = [
        build(durations=takes, split=True, urgent=urgent, forwards=forwards)
        for urgent in ("IFW", "FIW", "IWF")
        for forwards in _FORWARDS
    ]
    return _shortest([drawn, *greedy], takes)


def _shortest(schedules: Sequence[Schedule | None], durations: Durations) -> Schedule:
    """The first of the shortest schedules."""
    possible = [each for each in schedules if each is not None and legal_order(each) is not None]
    return min(possible, key=lambda each: round(length_of(each, durations), 9))


_HALVES: tuple[ActionKind, ...] = ("F", "I", "W")
_FORWARDS: tuple[Forwards, ...] = ("deep", "in groups")


def _alternated(forwards: Sequence[Action], backwards: Sequence[Action], warm: int) -> list[Action]:
    """`warm` forwards, then alternating backwards and forwards, then the remaining backwards."""
    rest = len(forwards) - warm
    pairs = [action for pair in zip(backwards, forwards[warm:], strict=False) for action in pair]
    return [*forwards[:warm], *pairs, *backwards[rest:]]


def _schedule(name: str, ranks: tuple[int, ...], m: int, rows: Sequence[Sequence[Action]]) -> Schedule:
    return Schedule(name=name, ranks=ranks, num_microbatches=m, actions=tuple(map(tuple, rows)))
