"""The shared-memory transport as a backend of torch.distributed: DDP, FSDP2, DTensor, pipelining and
checkpoints run on it unchanged.

    import meshloom.comm.torch_backend
    torch.distributed.init_process_group("shm")                  or "cpu:shm,cuda:nccl"

All ranks are on one host. Tensors on a GPU travel through pinned host memory, so ranks may share a GPU.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from meshloom.comm.shm.native_engine import why_not
from meshloom.comm.torch.process_group import ShmProcessGroup
from meshloom.core.errors import DeviceError
from meshloom.launch.environment import bring_ranks_back

__all__ = ["ShmProcessGroup"]


def _create(options: Any, _own_options: object) -> ShmProcessGroup:
    return ShmProcessGroup(options)


bring_ranks_back()  # by which `init_process_group` finds the others
if reason := why_not():
    raise DeviceError(f"The shm backend is not available: {reason}")
dist.Backend.register_backend("shm", _create, extended_api=True, devices=["cpu", "cuda"])
