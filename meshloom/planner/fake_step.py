"""A training step on fake tensors, with the life of every piece of memory that it would make."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshloom.graph.cost_fake import device_asked, fake_buffers, fake_inputs, fake_parameters, fake_tensors, leaves, loss_of, run_nodes, tensors_in
from meshloom.graph.program import Program
from meshloom.graph.sparse_constants import memory_of, storage_of
from meshloom.job import NamedParameters


class FakeStep:
    """Bytes of a step in which the optimizer has its state already. Peaks are without parameters, buffers, batch and optimizer state.

    microbatches: chunks, one after another. bucketed: a gradient is copied into a bucket, which is there already, as soon as it is made.
    peaks, temporaries: phase -> most bytes at one time, and how many of them are neither kept activations nor gradients.
    """

    def __init__(self, program: Program, optimizer: Callable[[NamedParameters], Any], *, microbatches: int = 1, bucketed: bool = False) -> None:
        self._program = program
        self._bucketed = bucketed
        self.peaks: dict[str, int] = {}
        self.temporaries: dict[str, int] = {}
        self.kept_bytes = 0
        with fake_tensors():
            parameters, buffers = fake_parameters(program), fake_buffers(program)
            trainable = [(name, each) for name, each in parameters.items() if each.requires_grad]
            self.parameter_bytes = _bytes_of(parameters.values())
            self.trainable_bytes = _bytes_of(each for _, each in trainable)
            self._life = _Life()
            self._run_chunks(parameters, buffers, [each for _, each in trainable], microbatches)
            self.gradient_bytes = _bytes_of(each.grad for _, each in trainable if each.grad is not None)
            self.optimizer_bytes = self._update(optimizer, trainable)
            self.buffer_bytes, self.constant_bytes = _bytes_of(buffers.values()), _bytes_of(self._constants)

    def _run_chunks(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], trainable: list[Tensor], microbatches: int) -> None:
        self._used: set[int] = set()
        for index, parameter in enumerate(trainable):
            parameter.register_post_accumulate_grad_hook(lambda each, index=index: self._take(each, index))
        inputs = fake_inputs(self._program)
        given = leaves(self._program, dict(parameters), dict(buffers), inputs)
        self._constants = [given[name] for name in self._program.constants]
        self._life.ignore([*given.values()])
        for _ in range(microbatches):
            values: dict[str, Any] = dict(given)
            with self._life:
                self._life.begin("forward")
                for _ in run_nodes(self._program, values, keep=False):
                    pass
                loss = loss_of(self._program, values)
                values.clear()
                kept = self._life.keep(of=trainable)
                self.kept_bytes = max(self.kept_bytes, kept)
                self._life.begin("backward")
                if loss is not None:
                    loss.backward()
            del loss
            for phase in ("forward", "backward"):
                self._note(phase, trainable)

    def _update(self, optimizer: Callable[[NamedParameters], Any], trainable: list[tuple[str, Tensor]]) -> int:
        """Two steps: the first makes the state. Returns the state's bytes."""
        given: Any = trainable
        made = optimizer(list(given))
        optimizers: list[Any] = list(made) if isinstance(made, list | tuple) else [made]
        for index in self._used if self._bucketed else ():  # views of buckets, in reality
            trainable[index][1].grad = torch.empty_like(trainable[index][1])
        gradients = [each.grad for _, each in trainable if each.grad is not None]
        with _Numbers():
            for each in optimizers:
                each.step()
            states = {id(tensor): tensor for each in optimizers for state in each.state.values() for tensor in tensors_in(state)}
            self._life.ignore([*states.values(), *(gradients if self._bucketed else ())])
            with self._life:
                self._life.begin("update")
                for each in optimizers:
                    each.step()
        self._note("update", [each for _, each in trainable])
        return _bytes_of(states.values())

    def _take(self, parameter: Tensor, index: int) -> None:
        self._used.add(index)
        if self._bucketed:
            parameter.grad = None

    def _note(self, phase: str, trainable: list[Tensor]) -> None:
        gradients = [] if self._bucketed else [each.grad for each in trainable if each.grad is not None]
        peak, temporaries = self._life.worst(phase, gradients)
        if peak >= self.peaks.get(phase, 0):
            self.peaks[phase], self.temporaries[phase] = peak, temporaries


class _Numbers(TorchDispatchMode):
    """Tensors without values that are asked for one (a count of steps) say 2. What is written in place is not computed: it stays what it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 2.0 if args[0].is_floating_point() else 2
        if _is_in_place(func) and args and isinstance(args[0], Tensor):
            return args[0]
        return func(*args, **(kwargs or {}))


@cache
def _is_in_place(func: Any) -> bool:
    """Whether a call writes values into its first operand, gives just that, and changes no shape. An optimizer is mostly such calls."""
    schema = func._schema
    own = schema.arguments[0].alias_info if schema.arguments else None
    given = schema.returns[0].alias_info if len(schema.returns) == 1 else None
    changes_shape = torch.Tag.inplace_view in func.tags or schema.name.endswith("resize_")
    others_stay = not any(each.alias_info is not None and each.alias_info.is_write for each in schema.arguments[1:])
    return own is not None and own.is_write and given is not None and given.is_write and others_stay and not changes_shape


class _Life(TorchDispatchMode):
    """Notes what operators make and when it is freed. A piece is a number; a log holds it when it is made, and its complement when it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self._ignored: list[Tensor] = []  # held, or another piece might get the place of one that is gone, and be ignored for it
        self._sizes: list[int] = []
        self._pieces: dict[int, int | None] = {}  # memory -> piece; None: not looked at
        self._references: dict[int, Any] = {}
        self._alive: dict[int, None] = {}
        self._log: list[int] = []
        self._logs: dict[str, tuple[list[int], list[int]]] = {}
        self._kept: set[int] = set()

    def ignore(self, tensors: Sequence[Tensor]) -> None:
        """They are there all the time."""
        self._ignored.extend(tensors)
        for tensor in tensors:
            piece = self._pieces.get(memory := memory_of(tensor))
            if piece is not None:
                self._alive.pop(piece, None)
                self._references.pop(memory)
            self._pieces[memory] = None

    def begin(self, phase: str) -> None:
        """What is noted from here on belongs to `phase`."""
        self._log = []
        self._logs[phase] = (list(self._alive), self._log)

    def keep(self, *, of: Sequence[Tensor]) -> int:
        """What is alive now is kept for the backward, except gradients of parameters; its bytes."""
        gradients = {self._pieces.get(memory_of(each.grad)) for each in of if each.grad is not None}
        self._kept = {each for each in self._alive if each not in gradients}
        return sum(self._sizes[each] for each in self._kept)

    def worst(self, phase: str, gradients: Sequence[Tensor]) -> tuple[int, int]:
        """Most bytes alive at one time in the phase, and how many of them then are neither kept nor `gradients`."""
        known = self._kept | {piece for each in gradients if (piece := self._pieces.get(memory_of(each))) is not None}
        before, log = self._logs[phase]
        total = sum(self._sizes[each] for each in before)
        other = sum(self._sizes[each] for each in before if each not in known)
        worst = total, other
        for event in log:
            piece, sign = (event, 1) if event >= 0 else (~event, -1)
            total += sign * self._sizes[piece]
            other += sign * self._sizes[piece] if piece not in known else 0
            worst = max(worst, (total, other))
        return worst

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if (device := device_asked(func, args)) is not None:
            return device
        value = func(*args, **(kwargs or {}))
        if func.namespace != "prim":
            for tensor in tensors_in(value):
                self._see(tensor)
        return value

    def _see(self, tensor: Tensor) -> None:
        memory = memory_of(tensor)
        if memory in self._pieces:
            return
        storage = storage_of(tensor)
        piece = len(self._sizes)
        self._sizes.append(storage.nbytes())
        self._pieces[memory] = piece
        self._alive[piece] = None
        self._log.append(piece)

        def freed(_: Any) -> None:
            if self._pieces.get(memory) == piece:
                del self._pieces[memory], self._references[memory]
                del self._alive[piece]
                self._log.append(~piece)

        self._references[memory] = weakref.ref(storage, freed)


def _bytes_of(tensors: Any) -> int:
    """Of their distinct memories."""
    return sum({memory_of(each): storage_of(each).nbytes() for each in tensors}.values())
