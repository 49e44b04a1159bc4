"""A process group of torch.distributed whose ranks share memory.

Every collective starts its operation (`host_operations.py`) and returns a `ShmWork`. torch 2.13 renamed some
methods; both names are here, the older ones at the end.
"""

from __future__ import annotations

import importlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshloom.comm.network.one_host import check_one_host
from meshloom.comm.shm.shared_memory import ShmGroup
from meshloom.comm.torch.async_work import Completer, ShmWork
from meshloom.comm.torch.device_groups import OtherBackends
from meshloom.comm.torch.host_operations import HostOperations
from meshloom.comm.torch.process_group_calls import collective

_ProcessGroup: Any = dist.ProcessGroup
_options: Any = importlib.import_module("torch._C._distributed_c10d")


class ShmProcessGroup(_ProcessGroup):
    """A process group whose ranks share memory.

    options: what torch.distributed passes to an extension (`_DistributedBackendOptions`).
    Raises `CollectiveError` if the ranks are on several hosts, `PeerLostError` if some do not come.
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
        self._operations = HostOperations(self._group, self._completer)
        self._others = OtherBackends(self, options)
        self._name = self._description = ""

    # --- Collectives

    @collective(_options.AllreduceOptions)
    def allreduce(self, tensors: list[Tensor], opts: Any) -> ShmWork:
        is_dense = tensors[0].layout == torch.strided
        start = self._operations.all_reduce if is_dense else self._operations.sparse_all_reduce
        return start(tensors, opts)

    @collective(_options.AllreduceCoalescedOptions)
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> ShmWork:
        return self._operations.all_reduce(tensors, opts)

    @collective(_options.ReduceOptions)
    def reduce(self, tensors: list[Tensor], opts: Any) -> ShmWork:
        return self._operations.reduce(tensors, opts)

    @collective(_options.BroadcastOptions)
    def broadcast(self, tensors: list[Tensor], opts: Any) -> ShmWork:
        return self._operations.broadcast(tensors, opts)

    @collective(_options.AllgatherOptions)
    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any) -> ShmWork:
        return self._operations.all_gather([output], [tensor], opts)

    @collective(_options.AllgatherOptions)
    def all_gather_single_coalesced(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any) -> ShmWork:
        return self._operations.all_gather(outputs, tensors, opts)

    @collective(_options.AllgatherOptions)
    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> ShmWork:
        return self._operations.all_gather_lists(outputs, tensors, opts)

    @collective(_options.AllgatherOptions)
    def allgather_coalesced(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> ShmWork:
        return self._operations.all_gather_lists(list(zip(*outputs, strict=True)), tensors, opts)

    @collective(_options.ReduceScatterOptions)
    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any) -> ShmWork:
        return self._operations.reduce_scatter([output], [tensor], opts)

    @collective(_options.ReduceScatterOptions)
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], tensors: list[Tensor], opts: Any
    ) -> ShmWork:
        return self._operations.reduce_scatter(outputs, tensors, opts)

    @collective(_options.ReduceScatterOptions)
    def reduce_scatter(self, outputs: list[Tensor], tensors: list[list[Tensor]], opts: Any) -> ShmWork:
        return self._operations.reduce_scatter_lists(outputs, tensors, opts)

    @collective(_options.AllToAllOptions)
    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_rows: list[int], rows: list[int], opts: Any
    ) -> ShmWork:
        return self._operations.all_to_all_single(output, tensor, output_rows, rows, opts)

    @collective(_options.AllToAllOptions)
    def alltoall(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any) -> ShmWork:
        return self._operations.all_to_all(outputs, tensors, opts)

    @collective(_options.GatherOptions)
    def gather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> ShmWork:
        return self._operations.gather(outputs, tensors[0], opts)

    @collective(_options.ScatterOptions)
    def scatter(self, outputs: list[Tensor], tensors: list[list[Tensor]], opts: Any) -> ShmWork:
        return self._operations.scatter(outputs, tensors, opts)

    @collective(_options.BarrierOptions)
    def barrier(self, opts: Any) -> ShmWork:
        return self._operations.barrier(opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier: its error names the ranks that have not come anyway."""
        options = _options.BarrierOptions()
        if timeout is not None:
            options.timeout = timeout
        self.barrier(options).wait()

    # --- Messages

    @collective()
    def send(self, tensors: list[Tensor], destination: int, tag: int) -> ShmWork:
        return self._operations.send(tensors, destination, tag)

    @collective()
    def recv(self, tensors: list[Tensor], source: int, tag: int) -> ShmWork:
        return self._operations.receive(tensors, source, tag)

    @collective()
    def recv_anysource(self, tensors: list[Tensor], tag: int) -> ShmWork:
        return self._operations.receive(tensors, None, tag)

    # --- What torch.distributed asks of a group

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
        """The backend of a device, whose abilities callers query; a Python group's is itself."""
        other = self.carrier_of(torch.device(device).type)
        return other._get_backend(device) if other else self

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._operations.num_calls

    def set_timeout(self, timeout: timedelta) -> None:
        self._operations.limit = timeout

    def shutdown(self) -> None:
        self._others.shutdown()
        if self._completer.close():
            # otherwise a thread still waits in its memory, which stays until the process ends
            self._group.close()

    def abort(self) -> None:
        self._others.abort()
        self._group.abort()

    def carrier_of(self, device: str) -> Any:
        """The group that carries tensors of a type of device; None: this one."""
        return self._others.group_of(device)

    # Names before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
