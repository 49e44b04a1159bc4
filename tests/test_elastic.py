"""Asynchronous runs on a virtual clock: the bound, exactly once, no deadlock, whoever comes, goes or is killed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshloom.errors import PlanError, TrainingError
from meshloom.exchange.elastic.circumstances import Circumstances, Incident, parse_incidents
from tests.counting import Account, ahead, applied, count

MOMENTS = st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.5, 7.0, 7.01, 9.0, 12.0, 16.0])  # some fall together with a step's end
SECONDS = st.sampled_from([0.1, 0.3, 0.7, 1.0, 1.0, 1.3, 2.9, 10.0])
WORKERS = st.integers(0, 5)


def incident(what: Any) -> st.SearchStrategy[Incident]:
    number = st.integers(0, 2) if what == "server" else WORKERS
    return st.builds(Incident, what=st.just(what), number=number, at_seconds=MOMENTS, away_seconds=st.sampled_from([0.0, 0.4, 3.0]))


INCIDENTS = st.lists(st.one_of(*(incident(what) for what in ("kill", "join", "leave", "suspect", "server"))), max_size=10)


@st.composite
def circumstances(draw: st.DrawFn) -> Circumstances:
    """Anything may happen; late a worker comes, because all others may have gone."""
    return Circumstances(
        step_seconds=tuple(draw(st.lists(SECONDS, min_size=1, max_size=6))),
        latency_seconds=draw(st.sampled_from([0.0, 0.01, 0.3, 2.0])),
        jitter=draw(st.sampled_from([0.0, 0.5])),
        notice_seconds=draw(st.sampled_from([0.0, 0.5, 5.0])),
        duplicate_every=draw(st.sampled_from([0, 0, 1, 3])),
        incidents=(*draw(INCIDENTS), Incident(what="join", number=9, at_seconds=40.0)),
    )


def check(account: Account, num_servers: int, staleness: int | None, steps: int) -> None:
    assert account.finals == [Counter(applied(account))] * num_servers, "what servers hold is the surviving history, each of it once"
    assert set(account.finals[0].values()) <= {1}, "a share was applied twice"
    assert len(account.history) == steps
    ledger = account.states[steps]["ledger"]
    assert sorted(applied(account) + ledger["free"]) == list(range(ledger["next_share"])), "a share is neither applied nor free"
    assert staleness is None or max(account.gaps) <= staleness
    assert account.reported_ages == Counter(account.ages)
    assert account.left == 0


def check_any(seen: Circumstances, num_servers: int, num_workers: int, staleness: int | None, steps: int, keep_every: int) -> None:
    account = count(seen, num_servers=num_servers, num_workers=num_workers, staleness=staleness, steps=steps, keep_every=keep_every)
    check(account, num_servers, staleness, steps)


RUNS: dict[str, Any] = {
    "seen": circumstances(),
    "num_servers": st.integers(1, 3),
    "num_workers": st.integers(1, 6),
    "staleness": st.sampled_from([None, 1, 2, 4]),
    "steps": st.integers(1, 40),
    "keep_every": st.integers(1, 12),
}


@given(**RUNS)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_whatever_happens(**run: Any) -> None:
    check_any(**run)


@pytest.mark.slow
@given(**RUNS)
@settings(max_examples=10_000, deadline=None)
def test_whatever_happens_many_times(**run: Any) -> None:
    check_any(**run)
