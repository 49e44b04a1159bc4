"""Observers of a chunk or an optimizer step: digests of data and draws, outputs of modules, and losses of
precision. They change nothing that is computed."""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshloom.core.device.flat_bytes import flat_bytes
from meshloom.verify.reference.float64_blocks import float64_blocks, ramp_of
from meshloom.verify.reference.step_records import Cast, ModuleOutput


def digest_values(values: Any) -> str:
    """A hash of nested tensors, arrays and plain values: equal for equal values, on any device.

    >>> digest_values({"x": torch.ones(2)}) == digest_values({"x": torch.ones(2)}) != digest_values({"x": torch.zeros(2)})
    True
    """
    digest = hashlib.blake2b(digest_size=8)
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.is_nested:
            digest.update(f"parts {digest_values(list(leaf.detach().unbind()))}".encode())
        elif isinstance(leaf, Tensor):
            dense = leaf.detach().to_dense() if leaf.layout != torch.strided else leaf.detach()
            digest.update(f"{dense.dtype}{tuple(dense.shape)}".encode())
            written: Any = flat_bytes(dense.cpu()).numpy() if dense.numel() else b""
            digest.update(written)
        elif isinstance(leaf, numpy.ndarray) and leaf.dtype != object:
            digest.update(f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes())
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
            digest.update(f"{type(leaf).__name__} of {list(fields)}: {digest_values(fields)}".encode())
        elif isinstance(leaf, Mapping):
            digest.update(f"{type(leaf).__name__} of {digest_values(dict(leaf))}".encode())  # type: ignore[arg-type]
        else:
            digest.update(_bytes_of(leaf))
    return digest.hexdigest()


def _bytes_of(value: Any) -> bytes:
    attributes = getattr(value, "__dict__", {})
    # pickled tensors contain more than their values
    if any(isinstance(each, Tensor) for each in tree_leaves(dict(attributes))):
        return f"{type(value)} {digest_values(dict(attributes))}".encode()
    with suppress(pickle.PickleError, TypeError, AttributeError, RuntimeError, ValueError):
        return pickle.dumps(value)
    return str(type(value)).encode()  # what cannot be pickled (a lambda, a file) has at least a type


def generators_now(device: torch.device) -> str:
    """A digest of where torch's, `random`'s and numpy's generators are. device: torch's of this one, too."""
    of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    of_random = pickle.dumps(random.getstate())  # as a whole: it has 625 numbers
    return digest_values([torch.get_rng_state(), of_device, of_random, numpy.random.get_state()])


class ModuleWatch:
    """Records the output of every module, in order of execution, between `start` and `stop`.

    >>> watch = ModuleWatch(nn.Sequential(nn.Identity()))
    >>> with watch.attached():
    ...     watch.start()
    ...     _ = watch.model(torch.tensor([1.0, 2.0]))
    >>> [(output.name, output.total, output.square) for output in watch.stop()]
    [('0', 3.0, 5.0), ('', 3.0, 5.0)]
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._outputs: list[ModuleOutput] = []
        self._calls: dict[str, int] = {}
        self._running: list[str] = []  # names of the modules whose forward is running, innermost last
        self._on = False

    @property
    def place(self) -> str:
        """Name of the innermost running module; '' for the root module and code outside of the model."""
        return self._running[-1] if self._running else ""

    @contextmanager
    def attached(self) -> Iterator[ModuleWatch]:
        """A context in which the hooks are registered."""
        with ExitStack() as hooked:
            for name, module in self.model.named_modules():
                if not isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                    hooked.callback(module.register_forward_pre_hook(partial(self._enter, name)).remove)
                    hooked.callback(module.register_forward_hook(partial(self._leave, name)).remove)
            yield self

    def start(self) -> None:
        """Begin a chunk."""
        self._outputs, self._calls, self._running, self._on = [], {}, [], True

    def stop(self) -> tuple[ModuleOutput, ...]:
        """End the chunk: the outputs since `start`."""
        self._on = False
        return tuple(self._outputs)

    def _enter(self, name: str, module: nn.Module, inputs: Any) -> None:
        if self._on and not torch.compiler.is_compiling():  # what runs inside compiled code is not observed
            self._running.append(name)

    def _leave(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not self._on or torch.compiler.is_compiling():
            return
        while self._running and self._running.pop() != name:
            pass  # a submodule that was left by an exception, since caught
        call = self._calls[name] = self._calls.get(name, 0) + 1
        self._outputs.append(summary(name, call - 1, output))


def summary(name: str, call: int, output: Any) -> ModuleOutput:
    """What is noted of a call's output."""
    total, square, ramp, count = 0.0, 0.0, 0.0, 0
    with torch.no_grad():
        for leaf in tree_leaves(output):
            if not isinstance(leaf, Tensor) or _is_transformed(leaf):
                continue
            if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
                ramp += ramp_of(leaf)
                for values in float64_blocks(leaf):
                    total += values.sum().item()
                    square += values.square().sum().item()
                    count += values.numel()
    return ModuleOutput(name=name, call=call, total=total, square=square, count=count, ramp=ramp)


def _is_transformed(leaf: Tensor) -> bool:
    """Whether it is a wrapper tensor of a `torch.func` transform, which has no values of its own."""
    functorch: Any = torch._C._functorch  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    return functorch.is_functorch_wrapped_tensor(leaf)


class CastWatch(TorchDispatchMode):
    """Records operations that take a tensor of at least `precision` and return a less precise
    floating-point tensor, with the module that `ModuleWatch` reports."""

    def __init__(
        self, precision: torch.dtype, modules: ModuleWatch | None = None, optimizer: str | None = None
    ) -> None:
        super().__init__()
        self._bits = torch.finfo(precision).bits
        self._modules, self._optimizer = modules, optimizer
        self._seen: dict[Cast, None] = {}
        self._in_loss = False

    @contextmanager
    def computing_loss(self) -> Iterator[None]:
        """Context of a loss, without its backward: what is of a backward in it is of gradients that it takes itself."""
        self._in_loss = True
        try:
            yield
        finally:
            self._in_loss = False

    @property
    def casts(self) -> tuple[Cast, ...]:
        """The recorded casts, each place and dtype once."""
        return tuple(self._seen)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        low = [dtype for dtype in _precisions(output) if torch.finfo(dtype).bits < self._bits]
        if low and any(torch.finfo(dtype).bits >= self._bits for dtype in _precisions(args)):
            for dtype in low:
                self._note(dtype)
        return output

    def _note(self, dtype: torch.dtype) -> None:
        place = self._optimizer or (self._modules.place if self._modules else "")
        in_backward = torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        cast = Cast(
            place=place, dtype=str(dtype).removeprefix("torch."), in_optimizer=self._optimizer is not None,
            in_gradients=self._in_loss and in_backward
        )  # fmt: skip
        self._seen.setdefault(cast)


class SingleSamples(TorchDispatchMode):
    """Around backward: right gradients of batch norm of a single sample, as plans' programs have. torch's kernel for CPUs takes a sample and its gradient
    for alike in memory where one has its channels last and the other does not."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.native_batch_norm_backward.default and _is_single(args[0], args[1]):
            args = [*(each.contiguous() for each in args[:2]), *args[2:]]
        return func(*args, **(kwargs or {}))


def _is_single(gradient: Tensor, x: Tensor) -> bool:
    return x.device.type == "cpu" and x.ndim > 3 and len(x) == 1 and gradient.stride() != x.stride()


def _precisions(values: Any) -> list[torch.dtype]:
    return [
        leaf.dtype for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
