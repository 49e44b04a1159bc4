"""What torch's own parallel tools compute over a backend, on each rank of a world: the same functions for shm
and for Gloo."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

# torch 2.13 renamed it and warns about the old name.
ALL_GATHER: Callable[..., Any] = getattr(
    dist, "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
)


def model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def batch(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(5, 6, generator=generator), torch.randn(5, 4, generator=generator)


def train(module: nn.Module, rank: int, num_steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    losses: list[float] = []
    for _ in range(num_steps):
        data, target = batch(rank)
        loss = F.mse_loss(module(data), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def ddp(group: Any) -> Any:
    module = model()
    losses = train(
        DistributedDataParallel(
            module, process_group=group, bucket_cap_mb=1e-4, gradient_as_bucket_view=True
        ),
        group.rank(),
    )
    return losses, [parameter.detach() for parameter in module.parameters()]


def fsdp(group: Any) -> Any:
    module, mesh = model(), DeviceMesh.from_group(group, "cpu")
    for layer in module:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    losses = train(module, group.rank())
    return losses, [parameter.full_tensor().detach() for parameter in module.parameters()]


def tensor_parallel(group: Any) -> Any:
    module, mesh = model(), DeviceMesh.from_group(group, "cpu")
    parallelize_module(module, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    losses = train(module, 0)
    return losses, [parameter.full_tensor().detach() for parameter in module.parameters()]


def placements(group: Any) -> Any:
    """Every change of placement of a DTensor, forward and backward, uneven shards included."""
    mesh = DeviceMesh.from_group(group, "cpu")
    whole = torch.arange(35.0).view(5, 7)
    found: list[Tensor] = []
    for source in (Shard(0), Shard(1), Replicate()):
        for target in (Shard(0), Shard(1), Replicate()):
            tensor = distribute_tensor(whole.clone().requires_grad_(), mesh, [source])
            moved = tensor.redistribute(mesh, [target])
            (moved * moved).sum().full_tensor().backward()
            found += [moved.to_local().detach(), tensor.grad.full_tensor()]
    summed = dist.tensor.DTensor.from_local(whole * (group.rank() + 1), mesh, [Partial()])
    return [*found, summed.redistribute(mesh, [Shard(0)]).to_local(), summed.full_tensor()]


def pipeline(group: Any) -> Any:
    layers, rank = list(model()), group.rank()
    part = nn.Sequential(*layers[:2]) if rank == 0 else nn.Sequential(*layers[2:])
    data, target = torch.cat([batch(0)[0], batch(1)[0]]), torch.cat([batch(0)[1], batch(1)[1]])
    stage = PipelineStage(part, rank, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, n_microbatches=5, loss_fn=F.mse_loss)
    losses: list[Tensor] = []
    schedule.step(data) if rank == 0 else schedule.step(target=target, losses=losses)
    return torch.stack([loss.detach() for loss in losses]) if losses else None, [
        parameter.grad for parameter in part.parameters()
    ]


def checkpoint(group: Any, loading: Any) -> Any:
    """Sharded over `group`, saved over it, loaded over `loading` into a model that is sharded over that."""

    def sharded(over: Any) -> nn.Module:
        module = model()
        fully_shard(module, mesh=DeviceMesh.from_group(over, "cpu"))
        return module

    saved = sharded(group)
    train(saved, group.rank())
    names = [tempfile.mkdtemp()] if group.rank() == 0 else [None]
    dist.broadcast_object_list(names, group=group, group_src=0)
    dcp.save({"model": saved.state_dict()}, checkpoint_id=names[0], process_group=group)
    loaded = sharded(loading)
    state = {"model": loaded.state_dict()}
    dcp.load(state, checkpoint_id=names[0], process_group=loading)
    loaded.load_state_dict(state["model"])
    dist.barrier(group)
    if group.rank() == 0:
        for path in Path(names[0]).iterdir():
            path.unlink()
        Path(names[0]).rmdir()
    return [
        (each.full_tensor().detach(), other.full_tensor().detach())
        for each, other in zip(loaded.parameters(), saved.parameters(), strict=True)
    ]


def operations(group: Any) -> Any:
    """The calls of torch.distributed on shapes and types that the tools above do not use. Values are small
    whole numbers."""
    size, rank = group.size(), group.rank()
    found: list[Tensor] = []

    def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return ((torch.arange(torch.Size(shape).numel()) * 7 + rank * 5) % 11 + 1).view(shape).to(dtype)

    def keep(work: Any, *tensors: Tensor) -> None:
        if work is not None:
            work.wait()
        found.extend(tensors)

    ops = dist.ReduceOp
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.complex64):
        for op in (ops.SUM, ops.PRODUCT, ops.MIN, ops.MAX) if not dtype.is_complex else (ops.SUM,):
            tensor = numbers(3, 5, dtype=dtype).T  # with gaps
            keep(dist.all_reduce(tensor, op, group, async_op=True), tensor)
        output = torch.empty(2, 3, dtype=dtype)
        keep(
            dist.reduce_scatter(
                output,
                [numbers(2, 3, dtype=dtype) + other for other in range(size)],
                group=group,
                async_op=True,
            ),
            output,
        )
        outputs = [torch.empty(3, 2, dtype=dtype).T for _ in range(size)]
        keep(dist.all_gather(outputs, numbers(2, 3, dtype=dtype), group=group, async_op=True), *outputs)
    for op in (ops.BAND, ops.BOR, ops.BXOR):
        tensor = numbers(9, dtype=torch.int32)
        keep(dist.all_reduce(tensor, op, group, async_op=True), tensor)
    for empty in (torch.empty(0), torch.empty(3, 0)):
        keep(dist.all_reduce(empty, group=group, async_op=True), empty)
    whole = torch.zeros(size * 4)
    part = whole[rank * 4 : rank * 4 + 4]  # in place
    part.copy_(numbers(4))
    keep(ALL_GATHER(whole, part, group=group, async_op=True), whole)
    rows = [rank + 1] * size
    output = torch.empty(sum(range(1, size + 1)), 2)
    keep(
        dist.all_to_all_single(
            output, numbers(sum(rows), 2), list(range(1, size + 1)), rows, group=group, async_op=True
        ),
        output,
    )
    outputs = [torch.empty(2, 3) for _ in range(size)]  # Gloo has no others
    keep(
        dist.all_to_all(
            outputs, [numbers(2, 3) + other for other in range(size)], group=group, async_op=True
        ),
        *outputs,
    )
    for root in range(size):
        tensor = numbers(2, 2)
        outputs = [torch.empty(4) for _ in range(size)] if rank == root else None
        keep(dist.gather(numbers(4), outputs, group=group, group_dst=root, async_op=True), *(outputs or ()))
        output = torch.empty(4)
        parts = [numbers(4) + other for other in range(size)] if rank == root else None
        keep(dist.scatter(output, parts, group=group, group_src=root, async_op=True), output)
        keep(dist.broadcast(tensor, group_src=root, group=group, async_op=True), tensor)
        tensor = numbers(3)
        keep(
            dist.reduce(tensor, group_dst=root, group=group, async_op=True),
            *([tensor] if rank == root else []),
        )
    with dist.distributed_c10d._coalescing_manager(group):
        several = [numbers(count) for count in (1, 4)]
        for tensor in several:
            dist.all_reduce(tensor, group=group)
    keep(None, *several)
    messages = [torch.empty(2), torch.empty(3)]
    to, source = (rank + 1) % size, (rank - 1) % size
    works = [
        dist.isend(numbers(3), group=group, group_dst=to, tag=2),
        dist.isend(numbers(2), group=group, group_dst=to, tag=1),
    ]
    works += [
        dist.irecv(messages[0], group=group, group_src=source, tag=1),
        dist.irecv(messages[1], group=group, tag=2),
    ]
    for work in works:
        work.wait()
    keep(None, *messages)
    future = (
        dist.all_reduce(numbers(6), group=group, async_op=True)
        .get_future()
        .then(lambda done: done.value()[0] * 2)
    )
    return [*found, future.wait()]


def beyond() -> list[Any]:
    """What Gloo does not do, on two ranks over shm."""
    rank, ops = dist.get_rank(), dist.ReduceOp
    premultiplied = torch._C._distributed_c10d._make_nccl_premul_sum(0.5)
    results: list[Any] = []
    for op, tensor in (
        (ops.AVG, torch.tensor([1.0, 4.0]) * (rank + 1)),
        (ops.AVG, torch.tensor([1 + 2j]) * (rank + 1)),
        (premultiplied, torch.tensor([2.0, 6.0]) * (rank + 1)),
        (ops.BOR, torch.tensor([rank == 0, rank == 1, False])),
    ):
        dist.all_reduce(tensor, op)
        results.append(tensor.tolist())
    output, tensor = torch.empty(1), torch.tensor([2.0, 6.0])
    dist.reduce_scatter(output, [tensor[:1], tensor[1:]], premultiplied)
    received = [torch.empty(rank + 1), torch.empty(rank + 1)]
    # parts of unequal sizes
    dist.all_to_all(received, [torch.full((1,), float(rank)), torch.full((2,), float(rank))])
    message = dist.irecv(torch.empty(1), 1 - rank).get_future()  # before anything is sent: does not wait
    dist.send(torch.tensor([rank + 4.0]), 1 - rank)
    return [
        *results,
        output.tolist(),
        tensor.tolist(),
        [each.tolist() for each in received],
        message.wait()[0].tolist(),
    ]


SCENARIOS: dict[str, Callable[[Any], Any]] = {
    each.__name__: each for each in (ddp, fsdp, tensor_parallel, placements, pipeline, operations)
}


def world() -> dict[str, Any]:
    """On each rank: what every scenario gives over shm, and over Gloo."""
    warnings.simplefilter("ignore")  # torch's tools warn about themselves
    import meshloom.comm.torch_backend  # noqa: F401

    dist.init_process_group("shm", timeout=timedelta(seconds=30))
    gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
    shm: Any = dist.group.WORLD
    found: dict[str, Any] = {name: (scenario(shm), scenario(gloo)) for name, scenario in SCENARIOS.items()}
    found["checkpoint"] = checkpoint(shm, gloo) + checkpoint(gloo, shm)
    found["beyond"] = beyond()
    dist.destroy_process_group()
    return found
