"""The errors of a failed wait for shared memory: which rank is missing, or what it called instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshloom.comm.shm.engine_calls import ABORTED, MISMATCH, OUTSIDE, call_of, tensor_of
from meshloom.core.errors import ABORTED as HAS_ABORTED
from meshloom.core.errors import CollectiveError, MeshloomError, PeerLostError

if TYPE_CHECKING:
    from meshloom.comm.shm._engine import Handle


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Errors of waits of `rank`. engine, handle: know what each rank started. members: name of each rank."""

    engine: Any
    handle: Handle
    rank: int
    members: Sequence[str]

    @property
    def here(self) -> str:
        """The name of this rank."""
        return self.members[self.rank]

    def gone(self, rank: int, what: str) -> PeerLostError:
        """The process of `rank`, which `what` needs, has ended."""
        return PeerLostError(f"{self.here} lost {self.members[rank]}, whose process has ended, in {what}.")

    def late(
        self, missing: Sequence[int], what: str, timeout_seconds: float, *, message: bool
    ) -> PeerLostError:
        """`what` took longer than the timeout. missing: the ranks that it waits for, as far as known."""
        who = ", ".join(self.members[rank] for rank in missing) or "the other ranks"
        last = "".join(f" {self.members[rank]} {self._last_of(rank)}." for rank in missing[:3] if not message)
        return PeerLostError(
            f"{self.here} waited too long for {who} in {what}: longer than the timeout of {timeout_seconds:g} s.{last}"
        )

    def of(self, status: int, what: str, *, message: bool) -> MeshloomError:
        """The engine ended the wait with this status, which is not `NO_SPACE`."""
        engine, handle = self.engine, self.handle
        if status == ABORTED:
            by = engine.aborted_by(handle)
            return PeerLostError(
                f"{self.here} lost {self.members[by] if by >= 0 else 'another rank'}, {HAS_ABORTED}, in {what}."
            )
        if status not in (MISMATCH, OUTSIDE):
            return CollectiveError(f"{self.here} is out of memory in {what}.")
        rank, number = engine.mismatch(handle)
        there = self.members[rank]
        if status == OUTSIDE:
            return CollectiveError(
                f"{what} on {self.here}: {there} has published an address outside of its memory. Something has overwritten what the ranks share."
            )
        if message:
            sent = engine.letter(handle, rank, number)
            return CollectiveError(
                f"{what} on {self.here} met {tensor_of(sent)} from {there}: give recv the shape and dtype that were sent."
            )
        own, other = engine.descriptor(handle, self.rank, number), engine.descriptor(handle, rank, number)
        if own == other:
            return CollectiveError(
                f"{what}: the sizes that {self.here} and {there} expect of each other differ."
            )
        return CollectiveError(
            f"{self.here} called {call_of(own)} where {there} called {call_of(other)}: all ranks of a group must make the same calls in the same order."
        )

    def _last_of(self, rank: int) -> str:
        started = self.engine.started(self.handle, rank)
        descriptor = self.engine.descriptor(self.handle, rank, started - 1) if started else None
        return f"has started {call_of(descriptor)} last" if descriptor else "has started nothing yet"
