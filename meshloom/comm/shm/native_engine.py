"""The compiled engine of one group: starts operations on addresses, and watches other ranks during waits.

native/engine.h describes how the engine moves and reduces tensors in shared memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch

from meshloom.comm.shm.engine_calls import DONE, DTYPES, NO_SPACE, OPS, WAITING, Op
from meshloom.comm.shm.failures import Failures
from meshloom.comm.shm.peers import Peers
from meshloom.comm.shm.rendezvous import GroupMemory, Rendezvous
from meshloom.comm.shm.segments import too_little
from meshloom.core.errors import CollectiveError, DeviceError, MeshloomError, PeerLostError

if TYPE_CHECKING:
    from meshloom.comm.shm._engine import Handle

try:
    from meshloom.comm.shm import _engine
except ImportError:  # installed without a compiler
    _engine = None

_CAPACITY = 1 << 34  # bytes of address space per arena; only what is used becomes memory
_SLICE_MICROSECONDS = 100_000  # of a wait, between two checks of the other ranks
_MAX_RANKS = 256


@dataclass(frozen=True, kw_only=True)
class SharedMemorySettings:
    """How tensors travel through shared memory.

    small_bytes: up to this size every rank computes all of a sum.
    chunk_bytes: of a larger one, what a rank computes at a time.
    piece_bytes: of a piece of a tensor.
    eager_bytes: of pieces that a rank publishes before any other rank waits for them.
    message_piece_bytes, message_bytes: the same, of messages.
    spins: polls of a waiting rank before it yields its core. yields: polls after that before it sleeps.
    """

    small_bytes: int = 1 << 14
    chunk_bytes: int = 1 << 16
    piece_bytes: int = 1 << 19
    eager_bytes: int = 1 << 20
    message_piece_bytes: int = 1 << 24
    message_bytes: int = 1 << 30
    spins: int = 2000
    yields: int = 50


def why_not() -> str:
    """Why ranks of this machine cannot share memory, as a sentence with the way out; "" if they can."""
    if _engine:
        return ""
    return (
        "The shared-memory transport was not compiled when meshloom was installed, so ranks of one machine use Gloo, which is slower: "
        "install a C compiler and Python's headers, then install meshloom again."
    )


@cache
def reduction(dtype: torch.dtype, op: Op) -> tuple[int, int]:
    """The engine's numbers of a dtype and a reduction. Raises `CollectiveError` for an undefined pair."""
    if op not in OPS:
        raise CollectiveError(f"Tensors cannot be reduced by {op!r}, but by {', '.join(OPS)}.")
    numbers = DTYPES.get(dtype, -1), OPS.index(op)
    if numbers[0] < 0 or not _engine or not _engine.reduces(*numbers):
        raise CollectiveError(f"Tensors of {dtype} cannot be reduced by {op}.")
    return numbers


class NativeEngine:
    """Whoever opens it closes it. All ranks of the group open it together.

    members: name of each rank in errors. timeout_seconds: of a wait.
    Raises `DeviceError` if the engine is not compiled or there are too many ranks, `PeerLostError` if other
    ranks do not open it, `CollectiveError` if memory cannot be shared.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        members: Sequence[str],
        timeout_seconds: float,
        settings: SharedMemorySettings,
    ) -> None:
        if not _engine:
            raise DeviceError(why_not())
        self._rank, self._members, self._size = rank, members, len(members)
        if self._size > _MAX_RANKS:
            raise DeviceError(
                f"{self._size} ranks cannot share memory, {_MAX_RANKS} can. Let them use Gloo (--transport gloo)."
            )
        self._timeout = timeout_seconds
        self._aborted = False
        # what the engine still reads or writes, by number of operation
        self._in_use: deque[tuple[int, Any]] = deque()
        self._in_use_lock = Lock()  # several threads may wait
        memory = rendezvous.share(_engine.control_bytes(self._size), _CAPACITY)
        self.processes = memory.processes
        self._memory: GroupMemory | None = memory  # mapped until the engine is closed
        self._peers = Peers({other: process for other, process in enumerate(self.processes) if other != rank})
        self._handle: Handle | None = _engine.open_group(
            rank,
            self._size,
            memory.control.data_ptr(),
            tuple(arena.data_ptr() for arena in memory.arenas),
            _CAPACITY,
            memory.own_file.descriptor,
            astuple(settings),
        )

    def opened(self) -> tuple[Any, Handle]:
        """The compiled module and the handle to call it with. Raises if the group was aborted or closed."""
        if self._aborted:
            raise PeerLostError(f"{self._members[self._rank]} has aborted its group: nothing can run in it.")
        if not self._handle:
            raise CollectiveError(f"{self._members[self._rank]} has closed its group: nothing can run in it.")
        return _engine, self._handle

    def keep(self, number: int, memory: Any) -> None:
        """Keep memory alive until operation `number` has finished."""
        self._in_use.append((number, memory))

    def wait_for(self, number: int, what: Callable[[], str], message: bool, peer: int | None = None) -> None:
        """Wait for an operation, or for a message from or to `peer`. what: describes it in errors."""
        engine, handle = self.opened()
        wait = engine.wait_message if message else engine.wait
        if wait(handle, number, 0) != DONE:
            deadline = time.monotonic() + self._timeout
            missed: set[int] = set()
            while (status := wait(handle, number, _SLICE_MICROSECONDS)) != DONE:
                if status != WAITING:
                    raise self._failure(status, what(), message)
                missed = self._check_peers(number, what, message, peer, deadline, missed)
        if not message:
            with self._in_use_lock:
                while self._in_use and self._in_use[0][0] <= number:
                    self._in_use.popleft()

    def is_over(self, number: int, message: bool) -> bool:
        """Whether a wait would return, or raise, immediately."""
        engine, handle = self.opened()
        return (engine.wait_message if message else engine.wait)(handle, number, 0) != WAITING

    def take_source(self, number: int) -> int | None:
        """The sender of a message that has arrived, which is forgotten; None for a message that was sent."""
        engine, handle = self.opened()
        source = engine.message_source(handle, number)
        engine.release_message(handle, number)
        return None if source < 0 else source

    def abort(self) -> None:
        """Fail all operations, here and on the other ranks."""
        if self._handle and _engine:
            self._aborted = True
            _engine.abort(self._handle)

    def close(self) -> None:
        """Unmap the memory; other ranks may do so at another time. Nothing can be started afterwards."""
        self._handle = None
        self._peers.close()
        self._memory = None
        self._in_use.clear()

    def _check_peers(
        self,
        number: int,
        what: Callable[[], str],
        message: bool,
        peer: int | None,
        deadline: float,
        missed: set[int],
    ) -> set[int]:
        """The ranks whose processes have ended. missed: those that had ended at the last check.

        Raises `PeerLostError` if one of them is needed or the deadline has passed.
        """
        engine, handle = self.opened()
        gone = self._peers.gone()
        behind = [] if message else [r for r in range(self._size) if engine.started(handle, r) <= number]
        for rank in sorted(gone & missed):
            # One that had started the operation has done its part, unless it died within: then nothing moves.
            needed = peer in (rank, None) if message else rank in behind or not behind
            if needed:
                raise self._failures().gone(rank, what())
        if time.monotonic() > deadline:
            late = [rank for rank in behind if rank != self._rank] or ([peer] if peer is not None else [])
            raise self._failures().late(late, what(), self._timeout, message=message)
        return gone

    def _failures(self) -> Failures:
        engine, handle = self.opened()
        return Failures(engine=engine, handle=handle, rank=self._rank, members=self._members)

    def _failure(self, status: int, what: str, message: bool) -> MeshloomError:
        if status != NO_SPACE:
            return self._failures().of(status, what, message=message)
        engine, handle = self.opened()
        return too_little(engine.missing_bytes(handle))
