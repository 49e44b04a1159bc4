"""Checks of a schedule before anything runs.

Every stage processes every microbatch once in each direction, backwards follow what they depend on,
activations in flight stay within a bound, and ranks do not deadlock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import get_args

from meshloom.core.errors import PlanError
from meshloom.pipeline.schedules.schedule import Action, Kind, Schedule


def check_schedule(schedule: Schedule, *, in_flight: int | None = None) -> None:
    """Raises `PlanError` with the rank and action that violate a rule.

    in_flight: the most activations (of one stage for one microbatch) that a rank may hold at a time.
    """
    _check_complete(schedule)
    _check_order(schedule)
    if legal_order(schedule) is None:
        raise PlanError(_circle(schedule))
    for rank, most in enumerate(most_in_flight(schedule)):
        if in_flight is not None and most > in_flight:
            raise PlanError(
                f"Rank {rank} of schedule {schedule.name} holds the activations of {most} forwards at a time, and {in_flight} is the bound."
            )


def needs(action: Action, schedule: Schedule) -> list[Action]:
    """The actions that must precede one, on any rank."""
    stage, number = action.stage, action.microbatch
    if action.kind == "F":
        return [Action(stage - 1, "F", number)] if stage else []
    if action.kind == "W":
        return [Action(stage, "I", number)]
    after = [schedule.backward_of(stage + 1, number)] if stage + 1 < schedule.num_stages else []
    return [Action(stage, "F", number), *after]


def legal_order(schedule: Schedule) -> list[tuple[int, Action]] | None:
    """(rank, action) of all actions in an order that one thread can run; None: the ranks deadlock.

    Ranks take turns, each running as far as it can.
    """
    order: list[tuple[int, Action]] = list(_run(schedule))
    return order if len(order) == sum(map(len, schedule.actions)) else None


def most_in_flight(schedule: Schedule) -> list[int]:
    """The most activations that each rank holds at a time, each from a forward to the end of its backward."""
    found: list[int] = []
    for actions in schedule.actions:
        ends = _ends(actions)
        now = most = 0
        for action in actions:
            now += action.kind == "F"
            most = max(most, now)
            now -= action in ends
        found.append(most)
    return found


def held_by_stage(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """[moment][stage]: microbatches whose activations are held, at moments that include every rank's maximum
    of each combination of its stages.

    Moments of different ranks are unrelated. If each rank has one stage, there is one moment.
    """
    found: list[list[dict[int, int]]] = []
    for actions in schedule.actions:
        ends = _ends(actions)
        now: Counter[int] = Counter()
        seen: list[dict[int, int]] = []
        for action in actions:
            if action.kind == "F":
                now[action.stage] += 1
                if not any(all(each.get(stage, 0) >= count for stage, count in now.items()) for each in seen):
                    seen = [each for each in seen if any(count > now[stage] for stage, count in each.items())]
                    seen.append(dict(now))
            elif action in ends:
                now[action.stage] -= 1
        found.append(seen)
    return tuple(
        tuple(
            found[rank][min(moment, len(found[rank]) - 1)].get(stage, 0)
            for stage, rank in enumerate(schedule.ranks)
        )
        for moment in range(max(map(len, found)))
    )


def _ends(actions: tuple[Action, ...]) -> set[Action]:
    """The actions that free activations: B, or W."""
    return {action for action in actions if action.kind in ("B", "W")}


def _run(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    at = [0] * schedule.num_ranks
    done: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            while at[rank] < len(actions) and done.issuperset(needs(actions[at[rank]], schedule)):
                done.add(actions[at[rank]])
                yield rank, actions[at[rank]]
                at[rank] += 1
                moved = True


def _check_complete(schedule: Schedule) -> None:
    m, name = schedule.num_microbatches, schedule.name
    if m < 1 or not schedule.ranks:
        raise PlanError(
            f"Schedule {name} has {m} microbatches and {schedule.num_stages} stages; both must be 1 or more."
        )
    if sorted(set(schedule.ranks)) != list(range(schedule.num_ranks)):
        raise PlanError(
            f"Schedule {name} has rows for {schedule.num_ranks} ranks, and its stages belong to ranks {sorted(set(schedule.ranks))}."
        )
    counts = Counter(action for _, action in schedule)
    for rank, action in schedule:
        if action.stage >= schedule.num_stages or action.microbatch >= m:
            raise PlanError(
                f"{action} on rank {rank}: schedule {name} has {schedule.num_stages} stages and {m} microbatches."
            )
        if schedule.ranks[action.stage] != rank:
            raise PlanError(
                f"{action} is listed on rank {rank}, but stage {action.stage} of schedule {name} belongs to rank {schedule.ranks[action.stage]}."
            )
        if counts[action] > 1:
            raise PlanError(f"{action} occurs {counts[action]} times in schedule {name}.")
    for stage in range(schedule.num_stages):
        for number in range(m):
            kinds = "".join(kind for kind in get_args(Kind) if Action(stage, kind, number) in counts)
            if kinds not in ("FB", "FIW"):
                raise PlanError(
                    f"Stage {stage} of schedule {name} has {' '.join(kinds) or 'nothing'} for microbatch {number}. It needs F and B, or F, I and W."
                )


def _check_order(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule.actions):
        place = {action: number for number, action in enumerate(actions)}
        for action in actions:
            for earlier in needs(action, schedule):
                if earlier.stage == action.stage and place[earlier] > place[action]:
                    raise PlanError(
                        f"{action} comes before {earlier} on rank {rank} of schedule {schedule.name}."
                    )


def _circle(schedule: Schedule) -> str:
    done = {action for _, action in _run(schedule)}
    waits: list[str] = []
    for rank, actions in enumerate(schedule.actions):
        stuck = next((action for action in actions if action not in done), None)
        if stuck is not None:
            missing = next(each for each in needs(stuck, schedule) if each not in done)
            owner = schedule.ranks[missing.stage]
            waits.append(f"rank {rank} must run {stuck} and waits for {missing} of rank {owner}")
    return f"Schedule {schedule.name} deadlocks: {'; '.join(waits)}."
