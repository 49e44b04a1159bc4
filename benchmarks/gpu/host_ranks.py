"""One rank of two processes of this host that share a GPU, or of which one has a GPU and the other none: collectives of
torch.distributed through shared memory, which tensors on a GPU reach by pinned memory (`meshloom.comm.torch_backend`).

    python benchmarks/gpu/host_ranks.py RANK DEVICE MEETING OUT

MEETING: a new file's path. OUT: where the rank's results are written, for `torch.load`; tensors are on the CPU.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import meshloom.comm.torch_backend  # noqa: F401  # registers "shm"
from tests.torch_backend_world import batch, model, operations

MIB = 2**20


def main() -> None:
    rank, device, meeting, out = int(sys.argv[1]), torch.device(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group(
        "shm", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    try:
        with torch.device(device):
            found = operations(dist.group.WORLD)
        results = {
            "operations": _on_cpu(found), "losses": train(rank, device), "late": late(device),
            "seconds": seconds_of_all_reduce(device),
        }  # fmt: skip
        dist.barrier()
    finally:
        dist.destroy_process_group()
    torch.save(results, out)


def train(rank: int, device: torch.device) -> list[float]:
    """Losses of DDP in float64, on this rank's half of the batch."""
    module = DistributedDataParallel(model().double().to(device))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    inputs, target = (each.double().to(device) for each in batch(rank))
    losses: list[float] = []
    for _ in range(5):
        loss = F.mse_loss(module(inputs), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def late(device: torch.device) -> Tensor:
    """Sums over ranks of values that the device is still computing when the collective is called, and that are read
    at once: [round, 4]. Whole numbers: any order of sums gives the same."""
    size = 1024
    shift = torch.roll(torch.eye(size, device=device), 1, 0)
    found: list[Tensor] = []
    for number in range(10):
        value = torch.arange(float(size), device=device)[:, None].repeat(1, size) + number
        for _ in range(8):
            value = shift @ value  # rows move on by one
        work: Any = dist.all_reduce(value, async_op=True)
        work.wait()
        found.append((value * 2)[:4, 0].clone())
        value.zero_()  # its memory may be written again at once
    return torch.stack(found).cpu()


def seconds_of_all_reduce(device: torch.device) -> float:
    """The least of five, of 64 MiB of float32."""
    tensor = torch.ones(64 * MIB // 4, device=device)
    least = float("inf")
    for _ in range(5):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        tensor[:1].item()
        least = min(least, time.perf_counter() - began)
    return least


def _on_cpu(found: Any) -> Any:
    return [each.cpu() if isinstance(each, Tensor) else each for each in found]


if __name__ == "__main__":
    main()
