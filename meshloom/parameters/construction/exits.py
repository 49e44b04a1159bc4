"""What a recording must see besides operators: values that leave a tensor as an array or a list, deep copies,
and `trunc_normal_`, which decides by what it has drawn how often it draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from meshloom.parameters.construction.tape import NotRecordableError, address
from meshloom.program.ir.replaced import replaced


class RecordedValues(Protocol):
    """What is asked of a recording here."""

    def has_values(self, tensor: Tensor) -> bool: ...

    def computed(self, tensor: Tensor) -> Tensor: ...

    def truncated_normal(
        self, function: Callable[..., Tensor], tensor: Tensor, *bounds: float, generator: Any
    ) -> Tensor: ...


class Exits(TorchFunctionMode):
    """The ways out of a tensor that no operator sees: as an array, a list, pickled."""

    def __init__(self, recording: RecordedValues) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _WAYS_OUT or args[0].layout != torch.strided or self._recording.has_values(args[0]):
            return func(*args, **kwargs)
        if func in _REFUSED:
            raise NotRecordableError(f"it calls Tensor.{func.__name__}")
        if func is Tensor.__deepcopy__:
            return self._deep_copy(args[0], args[1])
        with _disable_current_modes():
            values = self._recording.computed(args[0].detach())
            found = func(values, *args[1:], **kwargs)
        if isinstance(found, numpy.ndarray):
            found.flags.writeable = False  # it is not the tensor's memory
        return found

    def _deep_copy(self, tensor: Tensor, memo: dict[Any, Any]) -> Tensor:
        """Like torch's: views of one storage stay so."""
        if id(tensor) in memo:
            return memo[id(tensor)]
        if not tensor.is_leaf or type(tensor) is not Tensor or tensor.is_conj() or tensor.is_neg():
            raise NotRecordableError("it copies a tensor that was computed with gradients")
        storage = tensor.untyped_storage()
        copied: dict[int, Tensor] = memo.setdefault("meshloom", {})
        if address(storage) not in copied:
            with torch.no_grad():
                flat = tensor.detach().as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
                copied[address(storage)] = flat.clone()
        with torch.no_grad():
            found = (
                copied[address(storage)]
                .view(tensor.dtype)
                .as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            )
            found = found.detach()
        memo[id(tensor)] = found.requires_grad_(tensor.requires_grad)
        vars(found).update(vars(tensor))
        return found


_READ = {Tensor.numpy, Tensor.tolist, Tensor.__array__}
_REFUSED = {Tensor.__reduce_ex__, Tensor.share_memory_, Tensor.__dlpack__, Tensor.storage, Tensor.map_}
_WAYS_OUT = {*_READ, *_REFUSED, Tensor.__deepcopy__}


def without_functions() -> AbstractContextManager[None]:
    """A context in which torch calls no function modes."""
    return torch._C.DisableTorchFunction()  # pyright: ignore[reportPrivateUsage]


@contextmanager
def tracing_refused() -> Iterator[None]:
    """A construction that traces (`torch.export`, `make_fx`) is not recorded: the error that an operator would raise inside of the tracer
    ends the process."""

    def enter(mode: Any) -> None:
        raise NotRecordableError("it traces operators without values")

    with replaced(FakeTensorMode, "__enter__", enter):
        yield


@contextmanager
def truncated_normal_whole(recording: RecordedValues) -> Iterator[None]:
    init: Any = torch.nn.init
    function = init._no_grad_trunc_normal_

    def recorded(
        tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
    ) -> Tensor:
        if tensor.is_meta:
            return tensor
        with _disable_current_modes(), without_functions():
            return recording.truncated_normal(function, tensor, mean, std, a, b, generator=generator)

    init._no_grad_trunc_normal_ = recorded
    try:
        yield
    finally:
        init._no_grad_trunc_normal_ = function
