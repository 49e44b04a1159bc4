"""Memory of one real training step, measured: every tensor's memory is tracked from the operator that
allocates it until it is freed.

A plain loop over the job's own module. It shares nothing with the prediction but the type of its result.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshloom.core.job import Job
from meshloom.core.job_functions import as_list, without_averages
from meshloom.core.moments.branches import branches_as_written
from meshloom.core.moments.current_step import at_step
from meshloom.core.moments.uncompiled import uncompiled
from meshloom.core.random import preserved_draws
from meshloom.optimizer.bfloat16.lowered import has_masters
from meshloom.optimizer.user_optimizer import takes_closure
from meshloom.planner.memory.memory import Memory
from meshloom.program.ir.leaves import leaves_of
from meshloom.program.trace.precision import build_model


def measure_memory(job: Job, chunks: Sequence[Any], *, device: torch.device | str = "cpu") -> Memory:
    """Train two steps on `chunks`, the microbatches of one step, and measure the second.

    device: where the model and the chunks are put. The model is the job's, from its own start.
    """
    where = torch.device(device)
    with preserved_draws(), at_step(0):
        model = build_model(job, None, training=True).to(where)
        chunks = [_moved(chunk, where) for chunk in chunks]
        named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        parameters = [each for _, each in named]
        masters: list[tuple[Tensor, Tensor]] = []  # with their parameters
        if has_masters(job.optimizer):
            copies = {
                name: nn.Parameter(each.detach().float())
                for name, each in named
                if each.dtype == torch.bfloat16
            }
            masters = [(copies[name], each) for name, each in named if name in copies]
            named = [(name, copies.get(name, each)) for name, each in named]
        made, decay = without_averages(job.optimizer(named))
        optimizers = as_list(made)
        averages = [each.detach().clone() for each in parameters] if decay is not None else []

        def backward(loss: Any) -> None:
            (loss[0] if isinstance(loss, tuple) else loss).sum().backward()

        def step(optimizer: Any) -> None:
            for master, parameter in masters:
                master.grad = None if parameter.grad is None else parameter.grad.float()
            update(optimizer)
            for master, parameter in masters:
                parameter.data.copy_(master.detach())
                master.grad = None

        def update(optimizer: Any) -> None:
            def evaluate() -> Tensor:
                _forget(parameters)
                losses = [job.loss(model, chunk) for chunk in chunks]
                for loss in losses:
                    backward(loss)
                first = losses[0]
                return (first[0] if isinstance(first, tuple) else first).detach()

            optimizer.step(evaluate) if takes_closure(optimizer) else optimizer.step()

        for chunk in chunks:
            backward(job.loss(model, chunk))
        for each in optimizers:
            step(each)
        _forget(parameters)
        states = [
            leaf
            for each in optimizers
            for leaf in tree_leaves(list(each.state.values()))
            if isinstance(leaf, Tensor)
        ] + [*averages, *(master for master, _ in masters)]
        standing = {
            "parameters": list(model.parameters()),
            "buffers": list(model.buffers()),
            "optimizer": states,
            "batch": [leaf for chunk in chunks for leaf in leaves_of(chunk).tensors.values()],
        }
        watch = LiveBytes(tensor for tensors in standing.values() for tensor in tensors)
        kept, all_activations = 0, set[int]()
        with watch, branches_as_written(), uncompiled():
            for chunk in chunks:
                watch.phase = "forward"
                before = set(watch.alive)
                loss = job.loss(model, chunk)
                activations = {number: size for number, size in watch.alive.items() if number not in before}
                kept = max(kept, sum(activations.values()))
                all_activations |= activations.keys()
                watch.phase = "backward"
                backward(loss)
                del loss
            watch.phase = "update"
            for each in optimizers:
                step(each)
    gradients = [each.grad for each in parameters if each.grad is not None]
    known = all_activations | {watch.number_of(each) for each in gradients}
    return Memory(
        **{kind: _bytes(tensors) for kind, tensors in standing.items()},  # pyright: ignore[reportArgumentType]
        gradients=_bytes(gradients),
        kept=kept,
        temporaries=sum(size for number, size in watch.at_peak.items() if number not in known),
        peaks=watch.peaks,
    )


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive, each memory once, from the operator that first shows it
    on.

    standing: tensors that exist already. peaks: phase -> most bytes. at_peak: what was allocated since and
        alive at the largest number of bytes.
    """

    def __init__(self, standing: Iterable[Tensor]) -> None:
        super().__init__()
        self.phase = ""
        self.alive: dict[int, int] = {}  # number -> bytes, of what was allocated since
        self.at_peak: dict[int, int] = {}
        self.peaks: dict[str, int] = {}
        self._numbers: dict[int, int] = {}  # address of the storage -> number
        self._references: dict[int, Any] = {}
        self._count = 0
        self._known = {storage._cdata: storage.nbytes() for each in standing for storage in [_storage(each)]}
        self._bytes = sum(self._known.values())

    def number_of(self, tensor: Tensor) -> int | None:
        return self._numbers.get(_storage(tensor)._cdata)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        value = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                self._add(leaf.untyped_storage())
        return value

    def _add(self, storage: Any) -> None:
        address: int = storage._cdata
        if address not in self._known and address not in self._numbers:
            self._count += 1
            number = self._numbers[address] = self._count
            self.alive[number] = storage.nbytes()
            self._bytes += storage.nbytes()
            self._references[number] = weakref.ref(storage, lambda _: self._remove(address, number))
        if self._bytes > max(self.peaks.values(), default=0):
            self.at_peak = dict(self.alive)
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self._bytes)

    def _remove(self, address: int, number: int) -> None:
        self._bytes -= self.alive.pop(number)
        del self._numbers[address], self._references[number]


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of their distinct memories."""
    return sum(
        {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values()
    )


def _storage(tensor: Tensor) -> Any:
    return tensor.untyped_storage()


def _forget(parameters: Iterable[Tensor]) -> None:
    for each in parameters:
        each.grad = None


def _moved(chunk: Any, device: torch.device) -> Any:
    leaves = leaves_of(chunk)
    return leaves.rebuild([leaf.to(device) for leaf in leaves.tensors.values()])
