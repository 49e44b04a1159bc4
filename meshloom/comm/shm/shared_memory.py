"""Ranks of one host that talk through memory which all of them have mapped: as fast as memory, and usable
from torch alone.

What is done with the memory is the compiled engine's work (native/engine.h says how). Here tensors become
addresses and ranks meet; what goes wrong gets its sentence in shm_failures.py: a rank that has died, that
does not come, that has called something else.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple
from datetime import timedelta
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshloom.comm.group import Group, Work
from meshloom.comm.liveness.activity import Activity
from meshloom.comm.shm.contiguous import one_after_another, to_read, to_write
from meshloom.comm.shm.engine_calls import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    DONE,
    DTYPES,
    GATHER,
    MOVED,
    NO_SPACE,
    OPS,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    WAITING,
    Op,
    describe,
)  # fmt: skip
from meshloom.comm.shm.failures import Failures
from meshloom.comm.shm.peers import Peers
from meshloom.comm.shm.rendezvous import Meeting
from meshloom.comm.shm.segments import Files, free_bytes, too_little
from meshloom.comm.shm.settings import SharedMemorySettings
from meshloom.comm.shm.started import RecvWork, StartedMessage, StartedOperation
from meshloom.comm.shm.window import SharedWindow, share_memory
from meshloom.core.errors import CollectiveError, DeviceError, MeshloomError, PeerLostError
from meshloom.machine.cores import cores

if TYPE_CHECKING:
    from meshloom.comm.shm._engine import Handle

try:
    from meshloom.comm.shm import _engine
except ImportError:  # installed without a compiler
    _engine = None

_CAPACITY = 1 << 34  # bytes of an arena's mapping; only what is used of it is memory
_SLICE_MICROSECONDS = 100_000  # how long a wait goes without looking after the peers
_MOST_RANKS = 256
_ANY = -1


def why_not() -> str:
    """Why ranks of this machine cannot talk through memory, as a sentence with the way out; "" if they
    can."""
    if _engine:
        return ""
    return (
        "The shared-memory transport was not compiled when meshloom was installed, so ranks of one machine talk over Gloo, which is slower: "
        "install a C compiler and Python's headers, then install meshloom again."
    )


class ShmGroup(Group):
    """Ranks of one host, CPU tensors of any strides.

    Made by all members at once. Raises `DeviceError` without the compiled engine, `PeerLostError` if the
    others do not come.

    store: of this group alone, for meeting.
    members: what to call each rank in errors, like "rank 3 (dp=3)".
    timeout: how long a wait may take.
    ranks_here: ranks on this machine, this group's or not: with more than cores, waiting ranks do not spin.
    activity: where this rank writes that it waits. After a wait that failed it still says so.
    files: how memory is shared; None: as the system allows.
    secret: what the ranks know and the store does not. What they say in it about their memory is signed with
        it.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        members: Sequence[str],
        *,
        timeout: timedelta,
        ranks_here: int | None = None,
        activity: Activity | None = None,
        settings: SharedMemorySettings | None = None,
        files: Files | None = None,
        secret: bytes = b"",
    ) -> None:
        if not _engine:
            raise DeviceError(why_not())
        if size > _MOST_RANKS:
            raise DeviceError(
                f"{size} ranks cannot share memory, {_MOST_RANKS} can. Let them talk over Gloo (--transport gloo)."
            )
        self._rank, self._size = rank, size
        self._members = tuple(members)
        self._timeout = timeout.total_seconds()
        self._activity = activity or Activity()
        self._own_abort = False
        # what the engine still reads or writes, by number of operation
        self._kept: deque[tuple[int, Any]] = deque()
        self._kept_lock = Lock()  # several threads may wait
        self._reductions: dict[tuple[torch.dtype, str], tuple[int, int]] = {}
        self._windows: list[SharedWindow] = []
        self._settings = settings or SharedMemorySettings()
        if (ranks_here or size) > cores():
            self._settings = SharedMemorySettings(**{**self._settings.__dict__, "spins": 0})
        meeting = Meeting(store, rank, self._members, self._timeout, secret)
        self._files, self._processes, control, arenas, arena_file = meeting.share(
            _engine.control_bytes(size), _CAPACITY, files
        )
        self._memory = (control, arenas, arena_file)  # mapped for as long as the group lives
        self._peers = Peers(
            {other: process for other, process in enumerate(self._processes) if other != rank}
        )
        self._handle: Handle | None = _engine.open_group(
            rank,
            size,
            control.data_ptr(),
            tuple(arena.data_ptr() for arena in arenas),
            _CAPACITY,
            arena_file.descriptor,
            astuple(self._settings),
        )

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def secret(self) -> bytes:
        return b""  # who could change what is sent could change the memory

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Work:
        flat, finish = to_write(tensor)
        address = flat.data_ptr()
        return self._start(
            ALL_REDUCE, flat, address, address, self._reduction(tensor.dtype, op), tensor.shape, finish=finish
        )

    def reduce(self, tensor: Tensor, destination: int, op: Op = "sum") -> Work:
        """Rank `destination`'s `tensor` becomes the reduction of all ranks'; the others' stay."""
        flat, finish = to_write(tensor)
        address = flat.data_ptr()
        return self._start(
            REDUCE,
            flat,
            address,
            address,
            self._reduction(tensor.dtype, op),
            tensor.shape,
            destination,
            finish,
        )

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: Op = "sum") -> Work:
        self._check_share("reduce_scatter", tensor, output)
        (into, finish), whole = to_write(output), to_read(tensor)
        return self._start(
            REDUCE_SCATTER,
            into,
            whole.data_ptr(),
            into.data_ptr(),
            self._reduction(tensor.dtype, op),
            (into.numel(),),
            finish=finish,
            kept=whole,
        )

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        self._check_share("all_gather", output, tensor)
        (into, finish), part = to_write(output), to_read(tensor)
        return self._start(
            ALL_GATHER,
            part,
            part.data_ptr(),
            into.data_ptr(),
            self._moved(tensor),
            (part.numel(),),
            finish=finish,
            kept=into,
        )

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Work:
        if (
            sum(sizes) != tensor.numel()
            or sum(output_sizes) != output.numel()
            or len(sizes) != self._size
            or len(output_sizes) != self._size
        ):
            raise CollectiveError(
                f"all_to_all on {self._members[self._rank]} sends {list(sizes)} of {tensor.numel()} elements and receives {list(output_sizes)} into "
                f"{output.numel()}: give one size for each of the {self._size} ranks, adding up to each."
            )
        (into, finish), whole = to_write(output), to_read(tensor)
        self._check(whole, into)
        engine, handle = self._open()
        dtype, _ = self._moved(tensor)
        number = engine.start_all_to_all(
            handle, dtype, whole.data_ptr(), into.data_ptr(), tuple(sizes), tuple(output_sizes)
        )
        return self._started(number, ALL_TO_ALL, whole, finish, (whole, into))

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, destination: int) -> Work:
        part = to_read(tensor)
        moved, shape = self._moved(tensor), (part.numel(),)
        if self._rank != destination:
            return self._start(GATHER, part, part.data_ptr(), 0, moved, shape, destination)
        written = [to_write(output) for output in self._one_each("gather", outputs, tensor)]
        places = tuple(into.data_ptr() for into, _ in written)
        return self._start(
            GATHER,
            part,
            part.data_ptr(),
            places,
            moved,
            shape,
            destination,
            one_after_another(written),
            written,
        )

    def scatter(self, output: Tensor, tensors: Sequence[Tensor] | None, source: int) -> Work:
        into, finish = to_write(output)
        moved, shape = self._moved(output), (into.numel(),)
        if self._rank != source:
            return self._start(SCATTER, into, 0, into.data_ptr(), moved, shape, source, finish)
        parts = [to_read(tensor) for tensor in self._one_each("scatter", tensors, output)]
        return self._start(
            SCATTER,
            into,
            tuple(part.data_ptr() for part in parts),
            into.data_ptr(),
            moved,
            shape,
            source,
            finish,
            parts,
        )

    def gather_all(self, outputs: Sequence[Tensor], tensor: Tensor) -> Work:
        """`all_gather` whose outputs, one for each rank, lie anywhere."""
        part = to_read(tensor)
        written = [to_write(output) for output in self._one_each("all_gather", outputs, tensor)]
        places = tuple(into.data_ptr() for into, _ in written)
        return self._start(
            ALL_GATHER,
            part,
            part.data_ptr(),
            places,
            self._moved(tensor),
            (part.numel(),),
            finish=one_after_another(written),
            kept=written,
        )

    def scatter_reduced(self, output: Tensor, tensors: Sequence[Tensor], op: Op = "sum") -> Work:
        """`reduce_scatter` whose inputs, one for each rank, lie anywhere."""
        into, finish = to_write(output)
        parts = [to_read(tensor) for tensor in self._one_each("reduce_scatter", tensors, output)]
        return self._start(
            REDUCE_SCATTER, into, tuple(part.data_ptr() for part in parts), into.data_ptr(), self._reduction(output.dtype, op), (into.numel(),),
            finish=finish, kept=parts,
        )  # fmt: skip

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        flat, finish = to_write(tensor)
        address = flat.data_ptr()
        return self._start(
            BROADCAST, flat, address, address, self._moved(tensor), tensor.shape, source, finish
        )

    def send(self, tensor: Tensor, destination: int, tag: int = 0) -> Work:
        """Send to a rank; over as soon as the tensor may be changed."""
        flat = to_read(tensor)
        self._check(flat)
        engine, handle = self._open()
        dtype, _ = self._moved(tensor)
        number = engine.send(handle, destination, tag, dtype, flat.numel(), tensor.shape, flat.data_ptr())
        return StartedMessage(
            self, number, f"send of {describe(flat)} to {self._members[destination]}", destination, flat
        )

    def recv(self, tensor: Tensor, source: int | None, tag: int = 0) -> RecvWork:
        """Fill `tensor` with what rank `source`, or any rank, sent under that tag."""
        flat, finish = to_write(tensor)
        self._check(flat)
        engine, handle = self._open()
        dtype, _ = self._moved(tensor)
        number = engine.receive(
            handle,
            _ANY if source is None else source,
            tag,
            dtype,
            flat.numel(),
            tensor.shape,
            flat.data_ptr(),
        )
        what = f"recv of {describe(flat)} from {'any rank' if source is None else self._members[source]}"
        return StartedMessage(self, number, what, source, flat, finish)

    def barrier(self) -> Work:
        engine, handle = self._open()
        return self._started(engine.start(handle, BARRIER, 0, 0, 0, 0, (), 0, 0), BARRIER, None, None, None)

    def window(self, num_bytes: int, owner: int | None = None) -> SharedWindow:
        """New memory of every rank, `num_bytes` of each, which all ranks ask for at once. It is kept until
        the group is closed.

        Tensors that lie there are used in place. owner: the only rank that gives any: the others' parts are
        empty, and collectives copy. Raises `CollectiveError` on all ranks if one of them has too little
        memory.
        """
        memory = share_memory(self, self._files, self._processes, self._members, num_bytes, owner)
        window = SharedWindow(memory)
        engine, handle = self._open()
        if owner is None:
            engine.add_window(handle, tuple(each.data_ptr() for each in memory), num_bytes)
        self._windows.append(window)
        return window

    def abort(self) -> None:
        if self._handle and _engine:
            self._own_abort = True
            _engine.abort(self._handle)

    def close(self) -> None:
        """Let go of the memory; the others need not do so at the same time. Nothing can be started
        afterwards."""
        self._handle = None
        self._peers.close()
        self._memory = None
        self._windows.clear()
        self._kept.clear()

    def _reduction(self, dtype: torch.dtype, op: Op) -> tuple[int, int]:
        """The engine's numbers of a dtype and an operation. Raises `CollectiveError` for a pair without a
        meaning."""
        found = self._reductions.get((dtype, op))
        if found is None:
            if op not in OPS:
                raise CollectiveError(f"Tensors cannot be reduced by {op!r}, but by {', '.join(OPS)}.")
            found = DTYPES.get(dtype, -1), OPS.index(op)
            if found[0] < 0 or not _engine or not _engine.reduces(*found):
                raise CollectiveError(f"Tensors of {dtype} cannot be reduced by {op}.")
            self._reductions[dtype, op] = found
        return found

    def _moved(self, tensor: Tensor) -> tuple[int, int]:
        number = DTYPES.get(tensor.dtype)
        return (MOVED[tensor.element_size()] if number is None else number), 0

    def _start(
        self,
        kind: int,
        tensor: Tensor,
        source: int | tuple[int, ...],
        target: int | tuple[int, ...],
        how: tuple[int, int],
        shape: tuple[int, ...],
        root: int = 0,
        finish: Callable[[], None] | None = None,
        kept: Any = None,
    ) -> Work:
        """tensor: what is compared between ranks: its dtype, count and `shape`. kept: other tensors that must
        live until the end."""
        self._check(tensor)
        engine, handle = self._open()
        number = engine.start(handle, kind, how[1], how[0], root, tensor.numel(), shape, source, target)
        return self._started(number, kind, tensor, finish, (tensor, kept))

    def _started(
        self, number: int, kind: int, tensor: Tensor | None, finish: Callable[[], None] | None, kept: Any
    ) -> Work:
        self._kept.append((number, kept))
        return StartedOperation(self, number, kind, tensor, finish)

    def _open(self) -> tuple[Any, Handle]:
        if self._own_abort:
            raise PeerLostError(f"{self._members[self._rank]} has aborted its group: nothing can run in it.")
        if not self._handle:
            raise CollectiveError(f"{self._members[self._rank]} has closed its group: nothing can run in it.")
        return _engine, self._handle

    def _check(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            if not tensor.is_cpu:
                raise CollectiveError(
                    f"Ranks that talk through memory exchange CPU tensors, and this one is on {tensor.device}."
                )

    def _check_share(self, name: str, whole: Tensor, part: Tensor) -> None:
        if whole.numel() != self._size * part.numel() or whole.dtype != part.dtype:
            raise CollectiveError(
                f"{name} on {self._members[self._rank]}: {describe(whole)} is not {self._size} times {describe(part)}, for {self._size} ranks."
            )

    def _one_each(self, name: str, tensors: Sequence[Tensor] | None, share: Tensor) -> Sequence[Tensor]:
        if (
            tensors is None
            or len(tensors) != self._size
            or any(each.numel() != share.numel() or each.dtype != share.dtype for each in tensors)
        ):
            given = "none" if tensors is None else ", ".join(describe(each) for each in tensors)
            raise CollectiveError(
                f"{name} on {self._members[self._rank]} needs {self._size} tensors of {describe(share)}, and was given {given}."
            )
        return tensors

    def wait_for(self, number: int, what: Callable[[], str], message: bool, peer: int | None = None) -> None:
        """Wait for an operation or a message of this group; `what` it is, for errors, and with whom."""
        engine, handle = self._open()
        wait = engine.wait_message if message else engine.wait
        if wait(handle, number, 0) != DONE:
            self._activity.waits()
            deadline = time.monotonic() + self._timeout
            missed: set[int] = set()
            while (status := wait(handle, number, _SLICE_MICROSECONDS)) != DONE:
                if status != WAITING:
                    raise self._failure(status, what(), message)
                missed = self._look_after(number, what, message, peer, deadline, missed)
            self._activity.goes_on()
        if not message:
            with self._kept_lock:
                kept = self._kept
                while kept and kept[0][0] <= number:
                    kept.popleft()

    def is_over(self, number: int, message: bool) -> bool:
        """Whether a wait for it would return at once, or raise."""
        engine, handle = self._open()
        return (engine.wait_message if message else engine.wait)(handle, number, 0) != WAITING

    def source_of(self, number: int) -> int:
        """Whom a message that has come is from; it is forgotten then."""
        engine, handle = self._open()
        source = engine.message_source(handle, number)
        engine.release_message(handle, number)
        return source

    def _look_after(
        self,
        number: int,
        what: Callable[[], str],
        message: bool,
        peer: int | None,
        deadline: float,
        missed: set[int],
    ) -> set[int]:
        """Raise if a peer that is needed has gone, or all took too long. missed: those that were gone at the
        last look already."""
        engine, handle = self._open()
        gone = self._peers.gone()
        behind = [
            rank for rank in range(self._size) if not message and engine.started(handle, rank) <= number
        ]
        for rank in sorted(gone):
            # One that had started it has done its part, unless it died in the middle: then nothing moves any
            # more.
            needed = (
                rank == peer or peer is None if message else rank in behind or (not behind and rank in missed)
            )
            if needed and rank in missed:
                raise self._failures().gone(rank, what())
        if time.monotonic() > deadline:
            late = [rank for rank in behind if rank != self._rank] or ([peer] if peer is not None else [])
            raise self._failures().late(late, what(), self._timeout, message=message)
        return gone

    def _failures(self) -> Failures:
        engine, handle = self._open()
        return Failures(engine=engine, handle=handle, rank=self._rank, members=self._members)

    def _failure(self, status: int, what: str, message: bool) -> MeshloomError:
        if status == NO_SPACE:
            engine, handle = self._open()
            return too_little(
                self._files.where,
                engine.missing_bytes(handle),
                free_bytes(self._memory[2].descriptor) if self._memory else None,
            )
        return self._failures().of(status, what, message=message)
