"""Notes of ranks that abort: read by the others, and no wait for a store that does not answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from meshloom.comm.liveness.notes import Notes


class SilentStore:
    """Does not answer before it is let."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.asked = 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        self.let.wait()
        return False

    def set(self, key: str, value: str) -> None:
        self.asked += 1
        self.let.wait()


@pytest.fixture
def silent() -> Iterator[SilentStore]:
    store = SilentStore()
    yield store
    store.let.set()


def test_a_note_is_read_by_the_others():
    store = dist.HashStore()
    here, there = (Notes(lambda: store) for _ in range(2))
    assert there.who_left() is None
    here.leave("rank 1 (dp=1)")
    assert there.who_left() == "rank 1 (dp=1)"


@pytest.mark.long
def test_a_store_that_does_not_answer_is_asked_once(silent: SilentStore):
    notes = Notes(lambda: silent)  # type: ignore[arg-type, return-value]
    assert notes.who_left() is None
    assert notes.who_left() is None
    notes.leave("rank 1 (dp=1)")
    assert silent.asked == 1


@pytest.mark.long
def test_a_store_that_answers_late_is_asked_again(silent: SilentStore):
    notes = Notes(lambda: silent)  # type: ignore[arg-type, return-value]
    assert notes.who_left() is None
    silent.let.set()
    for thread in threading.enumerate():
        if thread.name == "meshloom notes":
            thread.join()
    notes.leave("rank 1 (dp=1)")
    assert silent.asked == 2


def test_a_store_that_went_away_has_no_notes():
    def gone() -> Any:
        raise RuntimeError("Connection reset by peer")

    notes = Notes(gone)
    notes.leave("rank 1 (dp=1)")
    assert notes.who_left() is None
