"""A process group of torch.distributed whose ranks talk through shared memory.

Every method starts its operation and returns a `ShmWork`. torch 2.13 renamed some of them; both names are
here, the older ones at the end.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshloom.comm.group import Work
from meshloom.comm.network.one_host import check_one_host
from meshloom.comm.shm.shared_memory import ShmGroup
from meshloom.comm.torch.async_work import Completer, ShmReceived, ShmWork
from meshloom.comm.torch.device_groups import OtherBackends
from meshloom.comm.torch.host_copies import StandIns
from meshloom.comm.torch.process_group_calls import collective, op_of, scaled
from meshloom.comm.torch.sparse_sum import SparseSum
from meshloom.core.errors import CollectiveError

_ProcessGroup: Any = dist.ProcessGroup
_options: Any = importlib.import_module("torch._C._distributed_c10d")


class ShmProcessGroup(_ProcessGroup):
    """A process group whose ranks talk through shared memory.

    options: what torch.distributed tells an extension (`_DistributedBackendOptions`).
    Raises CollectiveError if the ranks are on several hosts, PeerLostError if some do not come.
    """

    def __init__(self, options: Any) -> None:
        rank, size, timeout = options.group_rank, options.group_size, options.timeout
        super().__init__(rank, size)
        self._store = options.store
        ranks = options.global_ranks_in_group or list(range(size))
        members = [f"rank {each}" for each in ranks]
        check_one_host(dist.PrefixStore("host", self._store), rank, members, timeout)
        self._group = ShmGroup(dist.PrefixStore("shm", self._store), rank, size, members, timeout=timeout)
        self._completer = Completer()
        self._others = OtherBackends(self, options)
        self._name = self._description = ""
        self._limit: timedelta | None = None  # other than the group's own
        self._num_calls = 0

    # --- Collectives

    @collective(_options.AllreduceOptions)
    def allreduce(self, tensors: list[Tensor], opts: Any) -> ShmWork:
        return (
            self._sparse_sum(tensors, opts)
            if tensors[0].layout != torch.strided
            else self._all_reduced(tensors, opts)
        )

    @collective(_options.AllreduceCoalescedOptions)
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> ShmWork:
        return self._all_reduced(tensors, opts)

    @collective(_options.ReduceOptions)
    def reduce(self, tensors: list[Tensor], opts: Any) -> ShmWork:
        near, root = StandIns(), opts.rootRank
        host = [near.changed(tensor) if root == self.rank() else near.read(tensor) for tensor in tensors]

        def start(tensor: Tensor) -> Work:
            summand = scaled(tensor, opts.reduceOp)
            if root == self.rank() and summand is not tensor:
                summand = tensor.copy_(summand)
            return self._group.reduce(summand, root, op_of(opts.reduceOp))

        return self._start("reduce", near, tensors, opts, lambda: [start(tensor) for tensor in host])

    @collective(_options.BroadcastOptions)
    def broadcast(self, tensors: list[Tensor], opts: Any) -> ShmWork:
        near = StandIns()
        host = [
            near.changed(tensor) if opts.rootRank == self.rank() else near.written(tensor)
            for tensor in tensors
        ]
        return self._start(
            "broadcast",
            near,
            tensors,
            opts,
            lambda: [self._group.broadcast(tensor, opts.rootRank) for tensor in host],
        )

    @collective(_options.AllgatherOptions)
    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any) -> ShmWork:
        return self._all_gather([output], [tensor], opts)

    @collective(_options.AllgatherOptions)
    def all_gather_single_coalesced(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any) -> ShmWork:
        return self._all_gather(outputs, tensors, opts)

    @collective(_options.AllgatherOptions)
    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> ShmWork:
        near = StandIns()
        host = [
            ([near.written(output, apart_from=tensor) for output in each], near.read(tensor))
            for each, tensor in zip(outputs, tensors, strict=True)
        ]
        result = [output for each in outputs for output in each]
        return self._start(
            "all_gather",
            near,
            result,
            opts,
            lambda: [self._group.gather_all(each, tensor) for each, tensor in host],
        )

    @collective(_options.AllgatherOptions)
    def allgather_coalesced(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> ShmWork:
        return self.allgather([list(parts) for parts in zip(*outputs, strict=True)], tensors, opts)

    @collective(_options.ReduceScatterOptions)
    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any) -> ShmWork:
        return self._reduce_scatter([output], [tensor], opts)

    @collective(_options.ReduceScatterOptions)
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], tensors: list[Tensor], opts: Any
    ) -> ShmWork:
        return self._reduce_scatter(outputs, tensors, opts)

    @collective(_options.ReduceScatterOptions)
    def reduce_scatter(self, outputs: list[Tensor], tensors: list[list[Tensor]], opts: Any) -> ShmWork:
        near, kind = StandIns(), opts.reduceOp
        host = [
            (near.written(output, apart_from=each), [near.read(tensor) for tensor in each])
            for output, each in zip(outputs, tensors, strict=True)
        ]

        def start() -> list[Work]:
            return [
                self._group.scatter_reduced(output, [scaled(tensor, kind) for tensor in each], op_of(kind))
                for output, each in host
            ]

        return self._start("reduce_scatter", near, outputs, opts, start)

    @collective(_options.AllToAllOptions)
    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_rows: list[int], rows: list[int], opts: Any
    ) -> ShmWork:
        sizes, output_sizes = self._elements(tensor, rows), self._elements(output, output_rows)
        near = StandIns()
        source, target = near.read(tensor), near.written(output, apart_from=tensor)
        return self._start(
            "all_to_all",
            near,
            [output],
            opts,
            lambda: [self._group.all_to_all(target, source, output_sizes, sizes)],
        )

    @collective(_options.AllToAllOptions)
    def alltoall(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any) -> ShmWork:
        near = StandIns()
        source, target = near.joined(tensors), near.parted(outputs)
        sizes, output_sizes = [tensor.numel() for tensor in tensors], [output.numel() for output in outputs]
        return self._start(
            "all_to_all",
            near,
            outputs,
            opts,
            lambda: [self._group.all_to_all(target, source, output_sizes, sizes)],
        )

    @collective(_options.GatherOptions)
    def gather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> ShmWork:
        near, root = StandIns(), opts.rootRank
        result = outputs[0] if root == self.rank() else []
        host, targets = (
            near.read(tensors[0]),
            [near.written(output, apart_from=tensors[0]) for output in result],
        )
        return self._start(
            "gather",
            near,
            result,
            opts,
            lambda: [self._group.gather(targets if root == self.rank() else None, host, root)],
        )

    @collective(_options.ScatterOptions)
    def scatter(self, outputs: list[Tensor], tensors: list[list[Tensor]], opts: Any) -> ShmWork:
        near, root = StandIns(), opts.rootRank
        given = tensors[0] if root == self.rank() else []
        sources = [near.read(tensor) for tensor in given] if root == self.rank() else None
        target = near.written(outputs[0], apart_from=given)
        return self._start(
            "scatter", near, outputs, opts, lambda: [self._group.scatter(target, sources, root)]
        )

    @collective(_options.BarrierOptions)
    def barrier(self, opts: Any) -> ShmWork:
        return self._start("barrier", StandIns(), [], opts, lambda: [self._group.barrier()])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier: whoever has not come is named in the error anyway."""
        options = _options.BarrierOptions()
        if timeout is not None:
            options.timeout = timeout
        self.barrier(options).wait()

    # --- Messages

    @collective()
    def send(self, tensors: list[Tensor], destination: int, tag: int) -> ShmWork:
        near = StandIns()
        host = [near.read(tensor) for tensor in tensors]
        return self._start(
            "send", near, [], None, lambda: [self._group.send(tensor, destination, tag) for tensor in host]
        )

    @collective()
    def recv(self, tensors: list[Tensor], source: int, tag: int) -> ShmWork:
        return self._receive(tensors, source, tag)

    @collective()
    def recv_anysource(self, tensors: list[Tensor], tag: int) -> ShmWork:
        return self._receive(tensors, None, tag)

    # --- What torch.distributed asks a group

    def getBackendName(self) -> str:  # noqa: N802
        return "shm"

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupDesc(self, text: str) -> None:  # noqa: N802
        self._description = text

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def get_group_store(self) -> Any:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return self._others.devices()

    def _get_backend(self, device: torch.device) -> Any:
        """Callers ask it what it can do; a group of Python has no backend but itself."""
        other = self._others.group_of(torch.device(device).type)
        return other._get_backend(device) if other else self

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._num_calls

    def set_timeout(self, timeout: timedelta) -> None:
        self._limit = timeout

    def shutdown(self) -> None:
        self._others.shutdown()
        if self._completer.close():
            # otherwise a thread still waits in its memory, which stays until the process ends
            self._group.close()

    def abort(self) -> None:
        self._others.abort()
        self._group.abort()

    # --- Inside

    def carrier_of(self, tensor: Tensor | None) -> Any:
        """The group that carries such a tensor, if it is another one."""
        return None if tensor is None else self._others.group_of(tensor.device.type)

    def _all_gather(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any) -> ShmWork:
        near = StandIns()
        host = [
            (near.written(output, apart_from=tensor), near.read(tensor))
            for output, tensor in zip(outputs, tensors, strict=True)
        ]
        return self._start(
            "all_gather",
            near,
            outputs,
            opts,
            lambda: [self._group.all_gather(output, tensor) for output, tensor in host],
        )

    def _reduce_scatter(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any) -> ShmWork:
        near, kind = StandIns(), opts.reduceOp
        host = [
            (near.written(output, apart_from=tensor), near.read(tensor))
            for output, tensor in zip(outputs, tensors, strict=True)
        ]

        def start() -> list[Work]:
            return [
                self._group.reduce_scatter(output, scaled(tensor, kind), op_of(kind))
                for output, tensor in host
            ]

        return self._start("reduce_scatter", near, outputs, opts, start)

    def _all_reduced(self, tensors: list[Tensor], opts: Any) -> ShmWork:
        near = StandIns()
        host = [near.changed(tensor) for tensor in tensors]
        return self._start(
            "all_reduce",
            near,
            tensors,
            opts,
            lambda: [self._all_reduce(tensor, opts.reduceOp) for tensor in host],
        )

    def _all_reduce(self, tensor: Tensor, kind: Any) -> Work:
        if (summand := scaled(tensor, kind)) is not tensor:
            tensor.copy_(summand)
        return self._group.all_reduce(tensor, op_of(kind))

    def _sparse_sum(self, tensors: list[Tensor], opts: Any) -> ShmWork:
        if op_of(opts.reduceOp) != "sum" or len(tensors) != 1:
            raise CollectiveError(
                "The shm backend reduces sparse tensors one by one and with SUM only; make them dense first."
            )
        total = SparseSum(self._group, tensors[0])
        return self._start(
            "all_reduce of a sparse tensor", StandIns(), tensors, opts, total.start, total.finish
        )

    def _receive(self, tensors: list[Tensor], source: int | None, tag: int) -> ShmWork:
        near = StandIns()
        host = [near.written(tensor) for tensor in tensors]
        parts = [self._group.recv(tensor, source, tag) for tensor in host]
        return ShmReceived("recv", parts, near, tensors, self._completer, self._limit)

    def _start(
        self,
        what: str,
        near: StandIns,
        result: Sequence[Tensor],
        opts: Any,
        start: Callable[[], Sequence[Work]],
        finish: Callable[[], None] | None = None,
    ) -> ShmWork:
        near.arrive()
        self._num_calls += 1
        limit = opts.timeout if opts is not None and opts.timeout > timedelta(0) else self._limit
        return ShmWork(what, start(), near, result, self._completer, limit, finish)

    def _elements(self, tensor: Tensor, rows: list[int]) -> list[int]:
        """How many elements of `tensor` go to or come from each rank; `rows`: how many of its first dim,
        empty: equal parts."""
        if not rows and tensor.dim() and tensor.shape[0] % self.size():
            raise CollectiveError(
                f"all_to_all: {tensor.shape[0]} rows do not divide equally over {self.size()} ranks; say how many each one gets."
            )
        if rows and (len(rows) != self.size() or sum(rows) != tensor.shape[0]):
            raise CollectiveError(
                f"all_to_all: a tensor of {tensor.shape[0]} rows was split as {rows} for {self.size()} ranks."
            )
        if not rows:
            return [tensor.numel() // self.size()] * self.size()
        return [count * tensor[:1].numel() for count in rows] if tensor.shape[0] else [0] * self.size()

    # Names before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
