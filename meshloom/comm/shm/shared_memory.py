"""The group of ranks of one host that share memory: as fast as memory, and usable from torch alone.

Here tensors become addresses. The compiled engine (`native_engine.py`) moves and reduces what is there;
`failures.py` has the sentences for a rank that died, that does not come, or that called something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from meshloom.comm.group import Group, Work
from meshloom.comm.shm.engine_calls import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    Op,
    describe,
    dtype_number,
)
from meshloom.comm.shm.native_engine import NativeEngine, SharedMemorySettings, reduction
from meshloom.comm.shm.operands import (
    NONE,
    Operand,
    check_cpu,
    check_each,
    check_sizes,
    check_slices,
    readable,
    readable_each,
    writable,
    writable_each,
)
from meshloom.comm.shm.rendezvous import Rendezvous
from meshloom.comm.shm.started import StartedMessage, StartedOperation
from meshloom.comm.shm.window import SharedWindow, share_memory
from meshloom.machine.cores import cores

_ANY_RANK = -1


class ShmGroup(Group):
    """Ranks of one host, CPU tensors of any strides.

    Constructed by all members together. Raises `DeviceError` without the compiled engine, `PeerLostError` if
    other members do not come.

    store: used by this group alone, for the rendezvous.
    members: name of each rank in errors, like "rank 3 (dp=3)".
    timeout: of a wait.
    ranks_here: ranks on this machine, of this group or not; with more than cores, waiting ranks do not spin.
    secret: known to the ranks and not to the store; signs what they write there.
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
        settings: SharedMemorySettings | None = None,
        secret: bytes = b"",
    ) -> None:
        # no secret: whoever could change what is sent could change the memory
        self.rank, self.size = rank, size
        self._members, self._name = tuple(members), members[rank]
        self._windows: list[SharedWindow] = []
        settings = settings or SharedMemorySettings()
        if (ranks_here or size) > cores():
            settings = replace(settings, spins=0)
        self._engine = NativeEngine(
            Rendezvous(store, rank, self._members, timeout, secret),
            rank,
            self._members,
            timeout.total_seconds(),
            settings,
        )

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Work:
        memory = writable(tensor)
        how = reduction(tensor.dtype, op)
        return self._start(ALL_REDUCE, tensor, memory, memory, how, shape=tensor.shape)

    def reduce(self, tensor: Tensor, destination: int, op: Op = "sum") -> Work:
        """Replace rank `destination`'s `tensor` by the reduction over all ranks; the others' stay."""
        memory = writable(tensor)
        how = reduction(tensor.dtype, op)
        return self._start(REDUCE, tensor, memory, memory, how, destination, tensor.shape)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: Op = "sum") -> Work:
        check_slices("reduce_scatter", self._name, tensor, output, self.size)
        target, how = writable(output), reduction(tensor.dtype, op)
        return self._start(REDUCE_SCATTER, output, readable(tensor), target, how)

    def scatter_reduced(self, output: Tensor, tensors: Sequence[Tensor], op: Op = "sum") -> Work:
        """`reduce_scatter` of one input tensor for each rank, anywhere in memory."""
        sources = readable_each(check_each("reduce_scatter", self._name, tensors, output, self.size))
        target, how = writable(output), reduction(output.dtype, op)
        return self._start(REDUCE_SCATTER, output, sources, target, how)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        check_slices("all_gather", self._name, output, tensor, self.size)
        source = readable(tensor)
        return self._start(ALL_GATHER, tensor, source, writable(output))

    def gather_all(self, outputs: Sequence[Tensor], tensor: Tensor) -> Work:
        """`all_gather` into one output tensor for each rank, anywhere in memory."""
        targets = writable_each(check_each("all_gather", self._name, outputs, tensor, self.size))
        source = readable(tensor)
        return self._start(ALL_GATHER, tensor, source, targets)

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Work:
        check_sizes("all_to_all", self._name, output, tensor, output_sizes, sizes, self.size)
        source, target = readable(tensor), writable(output)
        check_cpu(tensor, output)
        engine, handle = self._engine.opened()
        number = engine.start_all_to_all(
            handle,
            dtype_number(tensor),
            source.addresses,
            target.addresses,
            tuple(sizes),
            tuple(output_sizes),
        )
        return self._started(number, ALL_TO_ALL, tensor, source, target)

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, destination: int) -> Work:
        source, targets = readable(tensor), NONE
        if self.rank == destination:
            targets = writable_each(check_each("gather", self._name, outputs, tensor, self.size))
        return self._start(GATHER, tensor, source, targets, root=destination)

    def scatter(self, output: Tensor, tensors: Sequence[Tensor] | None, source: int) -> Work:
        target, sources = writable(output), NONE
        if self.rank == source:
            sources = readable_each(check_each("scatter", self._name, tensors, output, self.size))
        return self._start(SCATTER, output, sources, target, root=source)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        memory = writable(tensor)
        return self._start(BROADCAST, tensor, memory, memory, root=source, shape=tensor.shape)

    def send(self, tensor: Tensor, destination: int, tag: int = 0) -> Work:
        """Send to a rank; finished as soon as the tensor may be changed."""
        memory = readable(tensor)
        check_cpu(tensor)
        engine, handle = self._engine.opened()
        dtype, shape = dtype_number(tensor), tensor.shape
        number = engine.send(handle, destination, tag, dtype, tensor.numel(), shape, memory.addresses)
        what = f"send of {describe(tensor)} to {self._members[destination]}"
        return StartedMessage(self._engine, number, what, destination, memory)

    def recv(self, tensor: Tensor, source: int | None, tag: int = 0) -> StartedMessage:
        """Fill `tensor` with what rank `source` (None: any rank) sent under that tag."""
        memory = writable(tensor)
        check_cpu(tensor)
        engine, handle = self._engine.opened()
        peer = _ANY_RANK if source is None else source
        dtype, shape = dtype_number(tensor), tensor.shape
        number = engine.receive(handle, peer, tag, dtype, tensor.numel(), shape, memory.addresses)
        what = f"recv of {describe(tensor)} from {'any rank' if source is None else self._members[source]}"
        return StartedMessage(self._engine, number, what, source, memory)

    def barrier(self) -> Work:
        engine, handle = self._engine.opened()
        return self._started(engine.start(handle, BARRIER, 0, 0, 0, 0, (), 0, 0), BARRIER, None, NONE, NONE)

    def window(self, num_bytes: int, owner: int | None = None) -> SharedWindow:
        """Allocate `num_bytes` on every rank, mapped by all of them, until the group is closed.

        A collective: all ranks call it with the same arguments. Tensors in the window are used in place.
        owner: the only rank that allocates: the others' parts are empty, and collectives copy. Raises
        `CollectiveError` on all ranks if one of them has too little memory.
        """
        memory = share_memory(self, self._engine.processes, self._members, num_bytes, owner)
        window = SharedWindow(memory)
        engine, handle = self._engine.opened()
        if owner is None:
            engine.add_window(handle, tuple(each.data_ptr() for each in memory), num_bytes)
        self._windows.append(window)
        return window

    def abort(self) -> None:
        self._engine.abort()

    def close(self) -> None:
        """Unmap the memory; other ranks may do so at another time. Nothing can be started afterwards."""
        self._engine.close()
        self._windows.clear()

    def _start(
        self,
        kind: int,
        tensor: Tensor,
        source: Operand,
        target: Operand,
        how: tuple[int, int] | None = None,
        root: int = 0,
        shape: torch.Size | None = None,
    ) -> Work:
        """Start an operation. tensor: its dtype, number of elements and `shape` (default: flat) are compared
        between ranks. how: dtype and reduction as numbers; None: nothing is reduced."""
        check_cpu(tensor)
        dtype, op = how or (dtype_number(tensor), 0)
        count = tensor.numel()
        compared = (count,) if shape is None else shape
        engine, handle = self._engine.opened()
        number = engine.start(
            handle, kind, op, dtype, root, count, compared, source.addresses, target.addresses
        )
        return self._started(number, kind, tensor, source, target)

    def _started(
        self, number: int, kind: int, tensor: Tensor | None, source: Operand, target: Operand
    ) -> Work:
        self._engine.keep(number, (source, target))
        return StartedOperation(self._engine, number, kind, tensor, target.copy_back)
