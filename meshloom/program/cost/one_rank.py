"""A rank's own program by shapes, without the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshloom.comm.group import Group, ReduceOp, Work
from meshloom.program.ir.nodes import Node
from meshloom.program.ir.program import Program
from meshloom.program.operators.collectives import Joint
from meshloom.program.operators.experts import rows_here

Told = Callable[[str, int], None]  # of a collective: its kind, and the bytes of the whole tensor


def alone(program: Program, group: Group | None) -> Program:
    """The program with the operators that communicate, and those that read values, as one rank computes them by shapes. group: of that rank; None: whoever
    runs it has one."""

    def one(node: Node) -> Node:
        target: Any = node.target
        if isinstance(target, Joint) and group:
            return replace(node, target=partial(target.run, group))
        if target is rows_here:
            (meta,) = node.outputs
            empty = partial(torch.empty, meta.shape, dtype=torch.int64, device=program.device)
            return replace(node, target=lambda *_: empty())
        return node

    return replace(program, nodes=tuple(map(one, program.nodes)))


class Unheard(Group):
    """One of some ranks, without the others: what it would receive has a shape and no values. told: of every collective."""

    def __init__(self, size: int, rank: int, told: Told = lambda kind, num_bytes: None) -> None:
        self.size, self.rank = size, rank
        self._told = told

    def _done(self, kind: str, tensor: Tensor) -> Work:
        self._told(kind, tensor.nbytes)
        return _Done()

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        return self._done("all_reduce", tensor)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        return self._done("reduce_scatter", tensor)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        return self._done("all_gather", output)

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Work:
        return self._done("all_to_all", tensor)

    def gather(self, outputs: Sequence[Tensor] | None, tensor: Tensor, destination: int) -> Work:
        return self._done("send", tensor)

    def scatter(self, output: Tensor, tensors: Sequence[Tensor] | None, source: int) -> Work:
        return self._done("send", output)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return self._done("broadcast", tensor)

    def send(self, tensor: Tensor, destination: int) -> Work:
        return self._done("send", tensor)

    def recv(self, tensor: Tensor, source: int) -> Work:
        return _Done()

    def barrier(self) -> Work:
        return _Done()

    def abort(self) -> None:
        pass


class _Done(Work):
    def wait(self) -> None:
        pass

    def is_finished(self) -> bool:
        return True
