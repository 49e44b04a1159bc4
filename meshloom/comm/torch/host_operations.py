"""The operations of torch.distributed on a group that shares memory, for tensors of any device.

Tensors on a GPU travel through copies in pinned host memory (`host_copies.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

from meshloom.comm.group import Work
from meshloom.comm.shm.shared_memory import ShmGroup
from meshloom.comm.torch.async_work import Completer, ShmReceived, ShmWork
from meshloom.comm.torch.host_copies import HostCopies
from meshloom.comm.torch.process_group_calls import op_of, scaled
from meshloom.comm.torch.sparse_sum import SparseSum
from meshloom.core.errors import CollectiveError


class HostOperations:
    """Starts operations; each takes the tensors and options of the process group's method of its name.

    limit: how long a wait may take; None: the group's own timeout.
    num_calls: operations started so far.
    """

    def __init__(self, group: ShmGroup, completer: Completer) -> None:
        self._group, self._completer = group, completer
        self.limit: timedelta | None = None
        self.num_calls = 0

    def all_reduce(self, tensors: Sequence[Tensor], opts: Any) -> ShmWork:
        copies, kind = HostCopies(), opts.reduceOp
        host = [copies.changed(tensor) for tensor in tensors]

        def start(tensor: Tensor) -> Work:
            if (summand := scaled(tensor, kind)) is not tensor:
                tensor.copy_(summand)
            return self._group.all_reduce(tensor, op_of(kind))

        return self._start("all_reduce", copies, tensors, opts, lambda: [start(each) for each in host])

    def sparse_all_reduce(self, tensors: Sequence[Tensor], opts: Any) -> ShmWork:
        if op_of(opts.reduceOp) != "sum" or len(tensors) != 1:
            raise CollectiveError(
                "The shm backend reduces sparse tensors one by one and with SUM only; make them dense first."
            )
        total = SparseSum(self._group, tensors[0])
        what = "all_reduce of a sparse tensor"
        return self._start(what, HostCopies(), tensors, opts, total.start, total.finish)

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> ShmWork:
        copies, kind, root = HostCopies(), opts.reduceOp, opts.rootRank
        is_root = root == self._group.rank
        host = [copies.changed(tensor) if is_root else copies.read(tensor) for tensor in tensors]

        def start(tensor: Tensor) -> Work:
            summand = scaled(tensor, kind)
            if is_root and summand is not tensor:
                summand = tensor.copy_(summand)
            return self._group.reduce(summand, root, op_of(kind))

        return self._start("reduce", copies, tensors, opts, lambda: [start(each) for each in host])

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> ShmWork:
        copies, root = HostCopies(), opts.rootRank
        is_root = root == self._group.rank
        host = [copies.changed(tensor) if is_root else copies.written(tensor) for tensor in tensors]
        return self._start(
            "broadcast", copies, tensors, opts, lambda: [self._group.broadcast(each, root) for each in host]
        )

    def all_gather(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: Any) -> ShmWork:
        """Each output is one tensor with the elements of all ranks."""
        copies = HostCopies()
        host = [
            (copies.written(output, apart_from=tensor), copies.read(tensor))
            for output, tensor in zip(outputs, tensors, strict=True)
        ]
        return self._start(
            "all_gather", copies, outputs, opts, lambda: [self._group.all_gather(*pair) for pair in host]
        )

    def all_gather_lists(
        self, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], opts: Any
    ) -> ShmWork:
        """Each output is a list of one tensor for each rank."""
        copies = HostCopies()
        host = [
            ([copies.written(output, apart_from=tensor) for output in each], copies.read(tensor))
            for each, tensor in zip(outputs, tensors, strict=True)
        ]
        result = [output for each in outputs for output in each]
        return self._start(
            "all_gather", copies, result, opts, lambda: [self._group.gather_all(*pair) for pair in host]
        )

    def reduce_scatter(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: Any) -> ShmWork:
        """Each input is one tensor with the elements for all ranks."""
        copies, kind = HostCopies(), opts.reduceOp
        host = [
            (copies.written(output, apart_from=tensor), copies.read(tensor))
            for output, tensor in zip(outputs, tensors, strict=True)
        ]

        def start(output: Tensor, tensor: Tensor) -> Work:
            return self._group.reduce_scatter(output, scaled(tensor, kind), op_of(kind))

        return self._start("reduce_scatter", copies, outputs, opts, lambda: [start(*pair) for pair in host])

    def reduce_scatter_lists(
        self, outputs: Sequence[Tensor], tensors: Sequence[Sequence[Tensor]], opts: Any
    ) -> ShmWork:
        """Each input is a list of one tensor for each rank."""
        copies, kind = HostCopies(), opts.reduceOp
        host = [
            (copies.written(output, apart_from=each), [copies.read(tensor) for tensor in each])
            for output, each in zip(outputs, tensors, strict=True)
        ]

        def start(output: Tensor, parts: Sequence[Tensor]) -> Work:
            return self._group.scatter_reduced(output, [scaled(part, kind) for part in parts], op_of(kind))

        return self._start("reduce_scatter", copies, outputs, opts, lambda: [start(*pair) for pair in host])

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_rows: Sequence[int], rows: Sequence[int], opts: Any
    ) -> ShmWork:
        sizes, output_sizes = self._elements(tensor, rows), self._elements(output, output_rows)
        copies = HostCopies()
        source, target = copies.read(tensor), copies.written(output, apart_from=tensor)

        def start() -> list[Work]:
            return [self._group.all_to_all(target, source, output_sizes, sizes)]

        return self._start("all_to_all", copies, [output], opts, start)

    def all_to_all(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: Any) -> ShmWork:
        copies = HostCopies()
        source, target = copies.joined(tensors), copies.parted(outputs)
        sizes, output_sizes = [each.numel() for each in tensors], [each.numel() for each in outputs]

        def start() -> list[Work]:
            return [self._group.all_to_all(target, source, output_sizes, sizes)]

        return self._start("all_to_all", copies, outputs, opts, start)

    def gather(self, outputs: Sequence[Sequence[Tensor]], tensor: Tensor, opts: Any) -> ShmWork:
        copies, root = HostCopies(), opts.rootRank
        is_root = root == self._group.rank
        result = outputs[0] if is_root else []
        source = copies.read(tensor)
        targets = [copies.written(output, apart_from=tensor) for output in result] if is_root else None
        return self._start(
            "gather", copies, result, opts, lambda: [self._group.gather(targets, source, root)]
        )

    def scatter(self, outputs: Sequence[Tensor], tensors: Sequence[Sequence[Tensor]], opts: Any) -> ShmWork:
        copies, root = HostCopies(), opts.rootRank
        is_root = root == self._group.rank
        parts = tensors[0] if is_root else []
        sources = [copies.read(part) for part in parts] if is_root else None
        target = copies.written(outputs[0], apart_from=parts)
        return self._start(
            "scatter", copies, outputs, opts, lambda: [self._group.scatter(target, sources, root)]
        )

    def barrier(self, opts: Any) -> ShmWork:
        return self._start("barrier", HostCopies(), [], opts, lambda: [self._group.barrier()])

    def send(self, tensors: Sequence[Tensor], destination: int, tag: int) -> ShmWork:
        copies = HostCopies()
        host = [copies.read(tensor) for tensor in tensors]
        return self._start(
            "send", copies, [], None, lambda: [self._group.send(each, destination, tag) for each in host]
        )

    def receive(self, tensors: Sequence[Tensor], source: int | None, tag: int) -> ShmReceived:
        copies = HostCopies()
        parts = [self._group.recv(copies.written(tensor), source, tag) for tensor in tensors]
        return ShmReceived("recv", parts, copies, tensors, self._completer, self.limit)

    def _start(
        self,
        what: str,
        copies: HostCopies,
        result: Sequence[Tensor],
        opts: Any,
        start: Callable[[], Sequence[Work]],
        finish: Callable[[], None] | None = None,
    ) -> ShmWork:
        copies.arrive()
        self.num_calls += 1
        limit = opts.timeout if opts is not None and opts.timeout > timedelta(0) else self.limit
        return ShmWork(what, start(), copies, result, self._completer, limit, finish)

    def _elements(self, tensor: Tensor, rows: Sequence[int]) -> list[int]:
        """Elements of `tensor` to or from each rank. rows: of its first dim; empty: equal parts."""
        size = self._group.size
        if not rows and tensor.dim() and tensor.shape[0] % size:
            raise CollectiveError(
                f"all_to_all: {tensor.shape[0]} rows do not divide equally over {size} ranks; say how many each one gets."
            )
        if rows and (len(rows) != size or sum(rows) != tensor.shape[0]):
            raise CollectiveError(
                f"all_to_all: a tensor of {tensor.shape[0]} rows was split as {list(rows)} for {size} ranks."
            )
        if not rows:
            return [tensor.numel() // size] * size
        return [count * tensor[:1].numel() for count in rows] if tensor.shape[0] else [0] * size
