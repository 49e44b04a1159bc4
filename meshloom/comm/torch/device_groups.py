"""The groups for tensors of other devices, in a process group with several backends ("cpu:shm,cuda:nccl").

torch.distributed creates no second backend beside a process group written in Python. So the group creates it
itself, with the first tensor of such a device, which comes in the same call on all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from meshloom.core.errors import DeviceError

_c10d: Any = dist.distributed_c10d


class OtherBackends:
    """The backends beside shm in `group`.

    options: with which torch.distributed created the group (`_DistributedBackendOptions`).
    """

    def __init__(self, group: Any, options: Any) -> None:
        self._group, self._options = group, options
        self._names: dict[str, str] = {}  # backend per device, once torch.distributed knows the group
        self._groups: dict[str, Any] = {}

    def devices(self) -> list[torch.device]:
        """The types of devices whose tensors the group carries."""
        return [torch.device(device) for device in self._backends()]

    def group_of(self, device: str) -> Any:
        """The group that carries tensors of a device; None: the shm group itself."""
        name = self._backends().get(device)
        if name is None:
            known = ",".join(f"{each}:{backend}" for each, backend in self._names.items())
            raise DeviceError(
                f"This group has no backend for {device} tensors, it was created with '{known}'; add '{device}:shm' to it."
            )
        if name == "shm":
            return None
        if device not in self._groups:
            self._groups[device] = self._create(device, name)
        return self._groups[device]

    def shutdown(self) -> None:
        for group in self._groups.values():
            group.shutdown()

    def abort(self) -> None:
        for group in self._groups.values():
            group.abort()

    def _backends(self) -> dict[str, str]:
        if not self._names:
            text = _c10d._world.pg_backend_config.get(self._group)
            if text is None:  # still being created
                return {"cpu": "shm", "cuda": "shm"}
            self._names = dict(each.split(":") for each in text.split(","))
        return self._names

    def _create(self, device: str, name: str) -> Any:
        options = self._options
        rank, size = options.group_rank, options.group_size
        store = dist.PrefixStore(f"beside shm/{device}", options.store)
        if name == "nccl" and dist.is_nccl_available():
            its_options = _c10d.ProcessGroupNCCL.Options()
            its_options._timeout = options.timeout
            its_options.global_ranks_in_group = options.global_ranks_in_group
            its_options.group_name = f"{options.group_id} beside shm"
            backend: Any = _c10d.ProcessGroupNCCL(store, rank, size, its_options)
            kind = dist.ProcessGroup.BackendType.NCCL
        elif name == "gloo" and dist.is_gloo_available():
            backend = _c10d.ProcessGroupGloo(store, rank, size, timeout=options.timeout)
            kind = dist.ProcessGroup.BackendType.GLOO
        else:
            raise DeviceError(
                f"The shm backend cannot be combined with '{name}' for {device} tensors; use nccl, gloo or shm for them."
            )
        backend._set_sequence_number_for_group()
        group: Any = dist.ProcessGroup(store, rank, size)
        group._set_default_backend(kind)
        group._register_backend(torch.device(device), kind, backend)
        return group
