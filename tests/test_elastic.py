"""Asynchronous runs on a virtual clock: the bound, no share twice, no deadlock, whoever comes, goes or is
killed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshloom.asynchronous.protocol.circumstances import Circumstances, Incident, parse_incidents
from meshloom.asynchronous.protocol.clocks import Clocks
from meshloom.asynchronous.protocol.leases import Leases
from meshloom.asynchronous.protocol.store import Storage
from meshloom.core.errors import PlanError, TrainingError
from tests.counting import Account, Counts, ahead, applied, count

# some fall together with a step's end
MOMENTS = st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.5, 7.0, 7.01, 9.0, 12.0, 16.0])
SECONDS = st.sampled_from([0.1, 0.3, 0.7, 1.0, 1.0, 1.3, 2.9, 10.0])
WORKERS = st.integers(0, 5)


def incident(what: Any) -> st.SearchStrategy[Incident]:
    number = st.integers(0, 2) if what == "server" else WORKERS
    return st.builds(
        Incident,
        what=st.just(what),
        number=number,
        at_seconds=MOMENTS,
        away_seconds=st.sampled_from([0.0, 0.4, 3.0]),
    )


INCIDENTS = st.lists(
    st.one_of(*(incident(what) for what in ("kill", "join", "leave", "suspect", "server"))), max_size=10
)


@st.composite
def circumstances(draw: st.DrawFn) -> Circumstances:
    """Anything may happen; late a worker comes, because all others may have gone."""
    return Circumstances(
        step_seconds=tuple(draw(st.lists(SECONDS, min_size=1, max_size=6))),
        latency_seconds=draw(st.sampled_from([0.0, 0.01, 0.3, 2.0])),
        jitter=draw(st.sampled_from([0.0, 0.5])),
        notice_seconds=draw(st.sampled_from([0.0, 0.5, 5.0])),
        incidents=(*draw(INCIDENTS), Incident(what="join", number=9, at_seconds=40.0)),
    )


def check(account: Account, num_servers: int, staleness: int | None, steps: int) -> None:
    assert account.finals == [Counter(applied(account))] * num_servers, (
        "what servers hold is the surviving history, each of it once"
    )
    assert set(account.finals[0].values()) <= {1}, "a share was applied twice"
    for version, state in account.states.items():
        assert max(applied(account)[:version], default=-1) < state["next_share"], (
            "one would be again if resumed"
        )
    assert len(account.history) == steps
    assert staleness is None or max(account.gaps) <= staleness
    assert account.reported_ages == Counter(account.ages)
    assert account.left == 0


def check_any(
    seen: Circumstances,
    num_servers: int,
    num_workers: int,
    staleness: int | None,
    steps: int,
    keep_every: int,
) -> None:
    account = count(
        seen,
        num_servers=num_servers,
        num_workers=num_workers,
        staleness=staleness,
        steps=steps,
        keep_every=keep_every,
    )
    check(account, num_servers, staleness, steps)


RUNS: dict[str, Any] = {
    "seen": circumstances(),
    "num_servers": st.integers(1, 3),
    "num_workers": st.integers(1, 6),
    "staleness": st.sampled_from([None, 1, 2, 4]),
    "steps": st.integers(1, 40),
    "keep_every": st.integers(1, 12),
}


KILLED_BEFORE_IT_WENT_BACK: dict[str, Any] = {
    "seen": Circumstances(
        step_seconds=(0.1,),
        latency_seconds=0.3,
        incidents=(
            Incident(what="server", number=1, at_seconds=3.0, away_seconds=3.0),
            Incident(what="server", number=1, at_seconds=7.0, away_seconds=0.0),
        ),
    ),
    "num_servers": 2,
    "num_workers": 1,
    "staleness": None,
    "steps": 2,
    "keep_every": 2,
}

# it leaves, and ends when a server is back, while the head gives it a share
ENDED_WITH_A_SHARE: dict[str, Any] = {
    "seen": Circumstances(
        step_seconds=(0.1,),
        latency_seconds=2.0,
        jitter=0.5,
        notice_seconds=0.0,
        incidents=(
            Incident(what="kill", number=3, at_seconds=0.0),
            Incident(what="leave", number=0, at_seconds=4.0),
            Incident(what="leave", number=1, at_seconds=0.0),
            Incident(what="server", number=1, at_seconds=1.5, away_seconds=0.4),
            Incident(what="join", number=9, at_seconds=40.0),
        ),
    ),
    "num_servers": 3,
    "num_workers": 5,
    "staleness": None,
    "steps": 2,
    "keep_every": 1,
}


@given(**RUNS)
@example(**KILLED_BEFORE_IT_WENT_BACK)
@example(**ENDED_WITH_A_SHARE)
@settings(max_examples=300, deadline=None, derandomize=True)
@pytest.mark.slow
def test_whatever_happens(**run: Any) -> None:
    check_any(**run)


@pytest.mark.slow
@given(**RUNS)
@settings(max_examples=1_000, deadline=None)
def test_whatever_happens_many_times(**run: Any) -> None:
    check_any(**run)


# --- What the clock and the bound come to.


@pytest.mark.long
@given(
    step_seconds=st.lists(SECONDS, min_size=4, max_size=4).map(tuple),
    latency=st.sampled_from([0.0, 0.3]),
    killed=st.sets(st.sampled_from([0, 1]), max_size=2),
    staleness=st.integers(1, 4),
    num_servers=st.integers(1, 2),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_the_slowest_that_lives_is_never_further_behind(
    step_seconds: tuple[float, ...], latency: float, killed: set[int], staleness: int, num_servers: int
) -> None:
    """Counted from the order of updates alone: workers 2 and 3 live from the start to the end."""
    incidents = tuple(Incident(what="kill", number=number, at_seconds=3.0) for number in killed)
    seen = Circumstances(step_seconds=step_seconds, latency_seconds=latency, incidents=incidents)
    account = count(seen, staleness=staleness, num_servers=num_servers, steps=40)
    assert ahead(account.history, [2, 3]) <= staleness
    assert account.lost == 0


def test_a_killed_worker_is_waited_for_until_it_is_noticed_and_costs_its_gradient_only() -> None:
    kill = (Incident(what="kill", number=3, at_seconds=0.5),)
    account = count(Circumstances(notice_seconds=4.0, incidents=kill), staleness=2, steps=12)
    # two ahead of worker 3 at 2 s; it counts as gone at 4.5 s
    assert account.times == [1, 1, 1, 2, 2, 2, 5.5, 5.5, 5.5, 6.5, 6.5, 6.5]
    # share 3 is lost with it
    assert applied(account) == [0, 1, 2, *range(4, 13)]


def test_who_joins_begins_where_the_slowest_is() -> None:
    join = (Incident(what="join", number=7, at_seconds=10.5),)
    account = count(Circumstances(incidents=join), num_workers=2, staleness=1, steps=40)
    # nobody waits for ten rounds of the new one
    assert account.times[20:26] == [11, 11, 11.5, 12.5, 12.5, 12.5]
    assert ahead(account.history[20:], [0, 1, 7]) <= 1


def test_who_leaves_finishes_its_share_first() -> None:
    leave = (Incident(what="leave", number=0, at_seconds=2.5),)
    account = count(Circumstances(incidents=leave), num_workers=2, steps=10)
    assert [worker for worker, _ in account.history].count(0) == 3
    assert applied(account) == list(range(10))


@pytest.mark.parametrize("num_servers", [1, 3])
def test_updates_after_the_snapshot_are_lost_as_a_block_and_said(num_servers: int) -> None:
    """Updates 1 to 10 at 1, 2, ... s; the snapshot after 7 is the newest when a server is killed."""
    crash = (Incident(what="server", number=num_servers - 1, at_seconds=10.5, away_seconds=5.0),)
    account = count(
        Circumstances(incidents=crash), num_workers=1, num_servers=num_servers, steps=20, keep_every=7
    )
    assert account.lost == 3
    assert account.versions == [*range(1, 11), *range(8, 21)]
    assert account.times[10] == 16.5  # back at 15.5 s
    # shares 7 to 9 are lost, and share 10, which was under way
    assert applied(account) == [*range(7), *range(11, 24)]


def test_a_snapshot_that_nobody_heard_of_counts() -> None:
    """Both servers have kept the last one; the head is killed before it knows."""
    crash = (Incident(what="server", number=0, at_seconds=2.5),)
    account = count(
        Circumstances(step_seconds=(0.1,), latency_seconds=0.3, incidents=crash),
        num_workers=1,
        num_servers=2,
        steps=1,
        keep_every=1,
    )
    check(account, 2, None, 1)


def test_refused_pushes_do_not_make_workers_join_for_ever() -> None:
    """Messages take longer than shares: a second lease must not make the first one void again and again."""
    incidents = parse_incidents("kill:1@0+kill:4@2+kill:0@12+server:0@7.01/0.4")
    seen = Circumstances(
        step_seconds=(1.3, 0.3, 0.1, 0.7, 0.3, 1.0), latency_seconds=2.0, notice_seconds=0.0, incidents=incidents
    )  # fmt: skip
    check_any(seen, num_servers=3, num_workers=6, staleness=None, steps=34, keep_every=5)


def test_without_anybody_left_the_run_ends_with_a_sentence() -> None:
    with pytest.raises(TrainingError, match="After update 3, .* no worker is left"):
        count(Circumstances(incidents=parse_incidents("kill:0@3.5")), num_workers=1)


def test_wrong_circumstances_are_refused() -> None:
    for wrong in (
        lambda: Circumstances(jitter=1.0),
        lambda: Circumstances(latency_seconds=-1.0),
        lambda: parse_incidents("kill:-1@3"),
    ):
        with pytest.raises(PlanError):
            wrong()


# --- The checks see what they should.


@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [
        # a lost worker's share stays out
        (Leases, "remove", lambda self, worker: self.clocks.remove(worker) or []),
        (Clocks, "may_begin", lambda self, worker: True),  # nobody waits
        # a server forgets which shares it has sent parameters for
        (Storage, "next_share", property(lambda self: 0, lambda self, share: None)),
        (Leases, "first_open", property(lambda self: 0)),  # a resumed run reads all again
        (Counts, "snapshot", lambda self: self.counts),  # a snapshot that goes on changing
        (Clocks, "remove", lambda self, worker: None),  # who is gone is waited for
    ],
)
def test_a_planted_mistake_is_found(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, wrong: Any
) -> None:
    monkeypatch.setattr(where, name, wrong)
    runs = [
        Circumstances(step_seconds=(1, 1, 3), incidents=parse_incidents(each))
        for each in ("kill:1@2.5", "kill:1@2.5+server:0@7.5/1")
    ]
    with pytest.raises((AssertionError, TrainingError)):
        _ = [
            check_any(seen, num_servers=1, num_workers=3, staleness=2, steps=20, keep_every=5)
            for seen in runs
        ]
