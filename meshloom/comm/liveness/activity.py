"""A rank's current activity, written where another process can read it, even after the rank was killed.

    a rank      enter("saving", 12)   began(1F3)   waits()   goes_on()   ended(1F3)       about a microsecond each, no system call
                      |
    a record of 80 bytes: private, or in a page of shared memory that the launcher has created
                      |
    launcher    read(page) -> Snapshot -> "computing 1F3 of step 12 (stage 1, forward of microbatch 3)"

Times are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from meshloom.core.units import format_count

Phase = Literal[
    "starting", "joining", "own code", "setting up", "between steps", "reading", "preparing", "before", "computing",
    "exchanging", "updating", "comparing", "evaluating", "saving",
]  # fmt: skip
PHASES: tuple[Phase, ...] = get_args(Phase)
PAGE_BYTES = 4096
KINDS = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}
WARM_UP_STEPS = 2  # whose actions take longer: memory is touched for the first time, kernels are selected

_MARK = b"meshloom activity 1".ljust(24, b"\0")
_RECORD = struct.Struct("=5q2d")  # phase, step, stage, kind, microbatch, since, longest
_START = len(_MARK)
_WAITS, _MOVED = (_START + _RECORD.size) // 8, (_START + _RECORD.size) // 8 + 1  # as numbers of doubles


class ActionLike(Protocol):
    """An action of a pipeline schedule (`pipeline/schedules/schedule.py`)."""

    @property
    def stage(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def microbatch(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class ActivitySnapshot:
    """A rank's activity at one moment.

    step: number of the batch; in "between steps", "comparing", "evaluating", "saving", of the steps done.
    stage, kind, microbatch: of the action, in "computing" and "before".
    since: when this activity began. moved: when the rank last began an activity, or ended a wait.
    waits: whether it waits for another rank now.
    longest_seconds: of an action of this stage and kind so far; 0: not known yet.
    """

    phase: Phase
    step: int
    stage: int
    kind: str
    microbatch: int
    since: float
    moved: float
    waits: bool
    longest_seconds: float

    def __str__(self) -> str:
        """As in "while ..." and "it was ...".

        >>> str(ActivitySnapshot(phase="computing", step=12, stage=1, kind="F", microbatch=3, since=0, moved=0, waits=False, longest_seconds=0))
        'computing 1F3 of step 12 (stage 1, forward of microbatch 3)'
        """
        if self.phase == "before":
            return f"{'waiting' if self.waits else 'about to go on'} before {self._action()}"
        waits = self.waits and self.phase not in ("starting", "joining")
        return self._doing() + (", waiting for another rank" if waits else "")

    def _doing(self) -> str:
        step, done = self.step, format_count(self.step, "step")
        match self.phase:
            case "computing":
                return f"computing {self._action()}"
            case "between steps":
                return f"between steps {step - 1} and {step}" if step else "about to begin step 0"
            case _:
                return {
                    "starting": "starting",
                    "joining": "joining the other ranks",
                    "own code": "running code of its own",
                    "setting up": "setting up",
                    "reading": f"reading the data of step {step}",
                    "preparing": f"preparing step {step}",
                    "exchanging": f"exchanging the gradients of step {step}",
                    "updating": f"updating the parameters in step {step}",
                    "comparing": f"comparing the ranks after {done}",
                    "evaluating": f"evaluating after {done}",
                    "saving": f"saving after {done}",
                }[self.phase]

    def _action(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch} of step {self.step} (stage {self.stage}, {KINDS[self.kind]} of microbatch {self.microbatch})"


class Activity:
    """Records a rank's activity. It is also a listener of pipeline runs.

    page: `PAGE_BYTES` bytes that `new_page` has marked; None: private memory.
    """

    def __init__(self, page: memoryview | None = None) -> None:
        self._page = memoryview(new_page()) if page is None else page
        self._doubles = self._page.cast("d")
        self._step = 0
        self._next: list[ActionLike] = []  # of the run under way, the last one first
        self._runs = 0
        self._began = 0.0
        self._longest: dict[tuple[int, str], float] = {}

    def enter(self, phase: Phase, step: int = 0) -> None:
        """An activity other than an action begins."""
        self._step = step
        _RECORD.pack_into(self._page, _START, PHASES.index(phase), step, 0, 0, 0, time.monotonic(), 0.0)
        self._doubles[_WAITS] = 0.0

    def follow(self, actions: Sequence[ActionLike]) -> None:
        """A run of these actions begins, in the step that was entered last."""
        self._next = list(reversed(actions))
        self._runs += 1
        if self._next:
            self._write(_BEFORE, self._next[-1], time.monotonic())

    def began(self, action: ActionLike) -> None:
        """The action's inputs are there, and it begins."""
        self._began = time.monotonic()
        self._write(_COMPUTING, action, self._began)

    def ended(self, action: ActionLike) -> None:
        """The action has ended; the next one, or the wait for its messages, begins."""
        now = time.monotonic()
        if self._runs > WARM_UP_STEPS:
            key = action.stage, action.kind
            self._longest[key] = max(self._longest.get(key, 0.0), now - self._began)
        if self._next:
            self._next.pop()
        if self._next:
            self._write(_BEFORE, self._next[-1], now)

    def waits(self) -> None:
        """This rank begins to wait for another one."""
        self._doubles[_WAITS] = time.monotonic()

    def goes_on(self) -> None:
        """The wait has ended."""
        self._doubles[_WAITS] = 0.0
        self._doubles[_MOVED] = time.monotonic()

    def now(self) -> ActivitySnapshot:
        """This rank's own activity."""
        snapshot = read(self._page)
        assert snapshot
        return snapshot

    def _write(self, phase: int, action: ActionLike, now: float) -> None:
        longest = self._longest.get((action.stage, action.kind), 0.0)
        where = action.stage, ord(action.kind), action.microbatch
        _RECORD.pack_into(self._page, _START, phase, self._step, *where, now, longest)


_BEFORE, _COMPUTING = PHASES.index("before"), PHASES.index("computing")


def new_page() -> bytearray:
    """The content of a page before its rank has written anything."""
    return bytearray(_MARK.ljust(PAGE_BYTES, b"\0"))


def is_page(page: memoryview) -> bool:
    """Whether the page was created by `new_page`."""
    return len(page) == PAGE_BYTES and bytes(page[:_START]) == _MARK


def read(page: memoryview) -> ActivitySnapshot | None:
    """The activity in a page; None while the rank is writing it. That of a dead rank can always be read."""
    for _ in range(3):  # a write in between shows as a difference
        seen, again = bytes(page[_START : (_MOVED + 1) * 8]), bytes(page[_START : (_MOVED + 1) * 8])
        if seen == again:
            phase, step, stage, kind, microbatch, since, longest = _RECORD.unpack_from(seen)
            waits, moved = struct.unpack_from("=2d", seen, _RECORD.size)
            return ActivitySnapshot(
                phase=PHASES[phase], step=step, stage=stage, kind=chr(kind), microbatch=microbatch,
                since=since, moved=max(since, moved, waits), waits=waits > 0.0, longest_seconds=longest,
            )  # fmt: skip
    return None
