"""The group over a torch.distributed process group: Gloo for CPU tensors, NCCL for CUDA tensors.

Every operation starts asynchronously. What a backend lacks is composed: avg is a sum that is divided in
`wait()`, a barrier is an all-reduce of one element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshloom.comm.group import Group, ReduceOp, Work
from meshloom.comm.reductions import divide
from meshloom.comm.torch.c10d_operations import C10dOperations
from meshloom.comm.torch.direct_exchange import DirectExchange
from meshloom.core.units import format_bytes

_END_SECONDS = 5.0  # for the thread of its direct exchange

# torch 2.13 renamed these two and warns about the old names.
_NEW_NAMES = hasattr(dist, "all_gather_single")
_all_gather: Callable[..., Any] = getattr(
    dist, "all_gather_single" if _NEW_NAMES else "all_gather_into_tensor"
)
_reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single" if _NEW_NAMES else "reduce_scatter_tensor"
)

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


class C10dGroup(Group):
    """The ranks of one process group, of which this process is a member.

    members: name of each rank in errors, like "rank 3 (dp=3)".
    device: of a barrier's element. With a backend for both, tensors may be on any device.
    secret: known to the ranks and not to their network.
    """

    is_in_place = True

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        members: Sequence[str],
        device: torch.device | None = None,
        secret: bytes = b"",
    ) -> None:
        self.rank, self.size, self.secret = process_group.rank(), process_group.size(), secret
        self._process_group = process_group
        self._members = tuple(members)
        self._device = device or torch.device("cpu")
        self.has_streams = self._device.type == "cuda"
        self._operations = C10dOperations(process_group, self._members)
        self._direct = DirectExchange(process_group, self._members, self._operations)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        tensor = tensor.detach()
        return self._operations.start(
            f"all_reduce of {format_bytes(tensor.nbytes)}",
            [tensor],
            lambda: self._all_reduced(tensor, op),
            self._mean(tensor, op),
        )

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        output, tensor = output.detach(), tensor.detach()
        if self._direct.serves(output):
            return self._direct.reduce_scatter(output, tensor, op)
        # Gloo's own is an all-reduce of a copy.
        in_place = (
            tensor.device.type == "cpu" and output.data_ptr() == tensor.data_ptr() + self.rank * output.nbytes
        )

        def start() -> dist.Work | None:
            if in_place:
                return self._all_reduced(tensor, op)
            return _reduce_scatter(
                output.view(-1), tensor.view(-1), op=_OPS[op], group=self._process_group, async_op=True
            )

        return self._operations.start(
            f"reduce_scatter of {format_bytes(tensor.nbytes)}",
            [output, tensor],
            start,
            self._mean(output, op),
            copied_bytes=0 if in_place else tensor.nbytes,
        )

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        output, tensor = output.detach(), tensor.detach()
        if self._direct.serves(tensor):
            return self._direct.all_gather(output, tensor)
        return self._operations.start(
            f"all_gather of {format_bytes(tensor.nbytes)}",
            [output, tensor],
            lambda: _all_gather(output.view(-1), tensor.view(-1), group=self._process_group, async_op=True),
            copied_bytes=output.nbytes,
        )

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Work:
        output, tensor = output.detach(), tensor.detach()
        return self._operations.start(
            f"all_to_all of {format_bytes(tensor.nbytes)}",
            [output, tensor],
            lambda: dist.all_to_all_single(
                output, tensor, list(output_sizes), list(sizes), group=self._process_group, async_op=True
            ),
        )

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, destination: int) -> Work:
        tensor = tensor.detach()
        targets = _detached(outputs) if self.rank == destination else None
        return self._operations.start(
            f"gather of {format_bytes(tensor.nbytes)} to {self._members[destination]}",
            [tensor, *(targets or ())],
            lambda: dist.gather(
                tensor, targets, group=self._process_group, group_dst=destination, async_op=True
            ),
        )

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        tensor = tensor.detach()
        return self._operations.start(
            f"broadcast of {format_bytes(tensor.nbytes)} from {self._members[source]}",
            [tensor],
            lambda: dist.broadcast(tensor, group_src=source, group=self._process_group, async_op=True),
        )

    def send(self, tensor: Tensor, destination: int) -> Work:
        tensor = tensor.detach()
        return self._operations.start(
            f"send of {format_bytes(tensor.nbytes)} to {self._members[destination]}",
            [tensor],
            lambda: dist.isend(tensor, group=self._process_group, group_dst=destination),
            is_message=True,
        )

    def recv(self, tensor: Tensor, source: int) -> Work:
        tensor = tensor.detach()
        return self._operations.start(
            f"recv of {format_bytes(tensor.nbytes)} from {self._members[source]}",
            [tensor],
            lambda: dist.irecv(tensor, group=self._process_group, group_src=source),
            is_message=True,
        )

    def barrier(self) -> Work:
        token = torch.zeros(1, device=self._device)

        def synchronize() -> None:
            if token.is_cuda:  # a CUDA wait only orders streams
                torch.cuda.current_stream(token.device).synchronize()

        return self._operations.start(
            "barrier", [token], lambda: self._all_reduced(token, "sum"), synchronize
        )

    def close(self) -> None:
        """End its thread, if it has one."""
        self._direct.close(_END_SECONDS)

    def abort(self) -> None:
        self._direct.abort()
        if self._operations.abort() and self._device.type == "cuda":
            self._process_group.abort()  # NCCL kernels under way spin until then

    def who_left(self) -> str | None:
        """The member that has aborted, if one has and its note can be read."""
        return self._operations.who_left()

    def _all_reduced(self, tensor: Tensor, op: ReduceOp) -> dist.Work | None:
        return dist.all_reduce(tensor, _OPS[op], group=self._process_group, async_op=True)

    def _mean(self, total: Tensor, op: ReduceOp) -> Callable[[], None] | None:
        """The division that makes an average of a sum."""
        return (lambda: divide(total, self.size)) if op == "avg" else None


def _detached(tensors: Sequence[Tensor] | None) -> list[Tensor] | None:
    return None if tensors is None else [tensor.detach() for tensor in tensors]
