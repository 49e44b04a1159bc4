"""A device beside the CPU, on machines that have none: memory of its own kind, with values.

    torch.zeros(3, device="stand_in")    on the host, in memory that torch holds for a device's
    stand_in + on_cpu                    raises, as on a GPU
    stand_in.item(), stand_in.cpu()      give the value, and listeners hear that the host waited

Every operator of the device goes one way (`SecondDevice.run`): to tensors of the CPU over the same memory, and back.
So results have the CPU's bits. Backward runs in a thread of its own, as a GPU's does.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from meshloom.core.units import round_up
from tests.second_device.autocast import let_autocast_cast

NAME = "stand_in"
aten: Any = torch.ops.aten
_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_ON_CPU: Any = _C.DispatchKeySet(_C.DispatchKey.CPU)
# These make another tensor of the same storage, whatever its device, and nothing else.
_VIEWS = {
    aten.as_strided.default,
    aten.view.default,
    aten.view.dtype,
    aten._reshape_alias.default,
    aten.alias.default,
    aten.unfold.default,
    aten.view_as_real.default,
    aten.view_as_complex.default,
    aten.set_.default,
    aten.set_.source_Tensor,
    aten.set_.source_Storage,
    aten.set_.source_Storage_storage_offset,
}
_COPIES = {aten._copy_from.default, aten._copy_from_and_resize.default}
_INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@dataclass(frozen=True, kw_only=True)
class Wait:
    """The host goes on when the device has come here. what: the operator that it waits for. left: operators that the
    device still has then."""

    what: str
    left: int = 0


def missing() -> str:
    """Why this torch can have no such device; "" if it can."""
    if hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        return ""
    return f"torch {torch.__version__} has no devices written in Python"


class SecondDevice:
    """Of this process; made once, before its first backward, since autograd counts devices then."""

    def __init__(self) -> None:
        registration: Any = backend_registration
        module = registration._DummyBackendModule()
        module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]  # of autocast
        registration._setup_privateuseone_for_python_backend(NAME, module)
        self.device = torch.device(NAME, 0)
        self._listeners: list[Callable[[Wait], None]] = []
        self.pinned: set[int] = set()  # addresses of host memory that is pinned
        self.position = 0  # operators that the device was given
        self.reached = 0  # those that some rank's host knows to be over
        self.step_began = (
            0  # `position` then: who waits in a step for one before that has waited for it already
        )
        self.lane: Any = None  # on which works of groups are waited for; None: where the device computes
        self._library = torch.library.Library("_", "IMPL")
        self._library.fallback(self.run, "PrivateUse1")
        self._library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        self._autocast = let_autocast_cast(NAME)
        _let_data_change_devices()
        _let_storages_be_resized()
        self._convolutions = torch.library.Library("aten", "IMPL")
        convolution = partial(self.run, aten.convolution.default)
        self._convolutions.impl("convolution_overrideable", convolution, "PrivateUse1")
        self._convolutions.impl(
            "convolution_backward_overrideable", self._convolution_backward, "PrivateUse1"
        )

    @contextmanager
    def listening(self, listener: Callable[[Wait], None]) -> Iterator[None]:
        """Tells `listener` of every wait of the host."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def run(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        """What torch calls for every operator that has a tensor or a result on the device."""
        if operator in _VIEWS:
            return operator.redispatch(_ON_CPU, *args, **kwargs)
        self.position += 1
        if operator in _COPIES:
            return self._copy(*args, **kwargs)
        flat, spec = tree_flatten((args, kwargs))
        _check_devices(operator, flat)
        if _reads_values(operator, args):
            self.wait(str(operator))
        ours: dict[int, Tensor] = {}
        for place, each in enumerate(flat):
            if isinstance(each, Tensor) and each.device.type == NAME:
                flat[place] = on_cpu(each)
                ours[id(flat[place])] = each
            elif isinstance(each, torch.device) and each.type == NAME:
                flat[place] = torch.device("cpu")
        args, kwargs = tree_unflatten(flat, spec)
        returned = operator(*_with_tensors(operator, args), **kwargs)
        for each in flat:
            if id(each) in ours and not _lie_alike(each, ours[id(each)]):  # resized: out=, resize_
                _take_place(ours[id(each)], each)
        return tree_map(lambda each: ours.get(id(each), on_device(each)), returned)

    def _convolution_backward(self, gradient: Tensor, x: Tensor, weight: Tensor, *where: Any) -> Any:
        return self.run(aten.convolution_backward.default, gradient, x, weight, [weight.shape[0]], *where)

    def _copy(self, source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        both = source.device.type, target.device.type
        if both == (NAME, "cpu"):
            if not (non_blocking and target.untyped_storage().data_ptr() in self.pinned):
                self._tell(Wait(what="copy to the host"))
        elif both == ("cpu", NAME) and source.numel() and not non_blocking:
            self._tell(Wait(what="copy from the host"))
        here, there = (on_cpu(each) if each.device.type == NAME else each for each in (source, target))
        there.copy_(here)
        return target

    def wait(self, what: str, until: int | None = None) -> None:
        """The host waits for the operator with this number, or for all."""
        until = self.position if until is None else until
        self.reached = max(self.reached, until)
        self._tell(Wait(what=what, left=self.position - until))

    def _tell(self, wait: Wait) -> None:
        for listener in self._listeners:
            listener(wait)


def _let_data_change_devices() -> None:
    """`parameter.data = tensor` of another device: torch allows that between the CPU and GPUs alone."""
    own: Any = torch.Tensor.data

    def set_data(tensor: Tensor, value: Tensor) -> None:
        if NAME in {tensor.device.type, value.device.type} and tensor.device != value.device:
            with torch.no_grad():
                made = torch.Tensor._make_subclass(torch.Tensor, value, tensor.requires_grad)
            _C._swap_tensor_impl(tensor, made)
        else:
            own.__set__(tensor, value)

    def may_be_set(tensor: Tensor, value: Tensor) -> bool:
        return NAME in {tensor.device.type, value.device.type} or compatible(tensor, value)

    importlib.import_module("torch._dynamo.polyfills.loader")  # which looks at the original
    # by which `module.to(device)` decides whether parameters stay the same objects, and tied ones tied
    compatible: Any = torch._has_compatible_shallow_copy_type  # pyright: ignore[reportPrivateUsage]
    torch._has_compatible_shallow_copy_type = may_be_set  # type: ignore[assignment]
    torch.Tensor.data = property(own.__get__, set_data)  # type: ignore[assignment, method-assign]


def _let_storages_be_resized() -> None:
    """`storage.resize_`, which torch leaves to allocators: what a storage lacks is overwritten, and stays."""
    kind: Any = torch.UntypedStorage
    resize, nbytes = kind.resize_, kind.nbytes

    def resized(storage: Any, size: int) -> Any:
        if storage.device.type != NAME:
            return resize(storage, size)
        if size > nbytes(storage):
            raise RuntimeError(f"a storage of {nbytes(storage)} bytes cannot have {size} on this device")
        if size == 0:
            ctypes.memset(storage.data_ptr(), 0xFF, nbytes(storage))  # NaN in every precision
        _sizes[storage._cdata] = size
        return storage

    def num_bytes(storage: Any) -> int:
        known = _sizes.get(storage._cdata) if storage.device.type == NAME else None
        return nbytes(storage) if known is None else known

    kind.resize_, kind.nbytes, kind.size = resized, num_bytes, num_bytes


def _reads_values(operator: Any, args: tuple[Any, ...]) -> bool:
    if operator in _INDEXING:  # a mask becomes indices, as many as it has true elements
        masks = [each for each in args[1] if each is not None and each.dtype in (torch.bool, torch.uint8)]
        fills = operator is not aten.index.Tensor and args[2].numel() == 1  # then it is masked_fill
        return bool(masks) and not (fills and len(masks) == 1)
    return operator is aten._local_scalar_dense.default or bool(_VALUES & set(operator.tags))


def _with_tensors(operator: Any, args: tuple[Any, ...]) -> list[Any]:
    """torch passes numbers for tensors, of which operators with `out=` take none."""
    like = next((each for each in args if isinstance(each, Tensor)), None)
    if like is None or "out" not in operator._overloadname:
        return list(args)
    wanted = operator._schema.arguments[: len(args)]
    return [
        torch.tensor(each, dtype=like.dtype)
        if isinstance(each, int | float) and str(argument.type) == "Tensor"
        else each
        for each, argument in zip(args, wanted, strict=True)
    ]


def _check_devices(operator: Any, flat: list[Any]) -> None:
    """As kernels do: numbers, and indices, may lie on the CPU."""
    tensors = [each for each in flat if isinstance(each, Tensor)]
    apart = [each for each in tensors if each.device.type == "cpu" and each.dim()]
    if not apart or all(each.device.type == "cpu" for each in tensors):
        return
    if operator in _INDEXING and all(each.dtype in (torch.int64, torch.bool) for each in apart):
        return
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but found cpu {[list(each.shape) for each in apart]} beside {NAME} in {operator}"
    )


# --- Tensors of one device over the memory of the other.


def on_cpu(tensor: Tensor) -> Tensor:
    """A tensor of the CPU over the memory of a device's."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    there = _C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), storage.nbytes())
    flat = torch.empty(0, dtype=tensor.dtype)
    return flat.set_(there, tensor.storage_offset(), tensor.size(), tensor.stride())


def on_device(value: Any) -> Any:
    """A copy on the device of a CPU's tensor, in as much memory and as it lies there; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    storage = value.untyped_storage()
    made = _C._acc.create_empty_tensor([0], value.dtype)
    if not storage.nbytes():
        return aten.as_strided.default.redispatch(_ON_CPU, made, value.size(), value.stride(), 0)
    there = _copied(storage).untyped_storage()
    where = value.storage_offset(), value.size(), value.stride()
    return aten.set_.source_Storage_storage_offset.redispatch(_ON_CPU, made, there, *where)


def _lie_alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and (not one.numel() or one.data_ptr() == other.data_ptr())


def _take_place(ours: Tensor, resized: Tensor) -> None:
    made = on_device(resized)
    where = made.storage_offset(), made.size(), made.stride()
    aten.set_.source_Storage_storage_offset.redispatch(_ON_CPU, ours, made.untyped_storage(), *where)


_sizes: dict[int, int] = {}  # of storages that were resized, by their addresses


class _Device(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _Dtype(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Dtype),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _ManagedTensor(ctypes.Structure):
    """`DLManagedTensor` of DLPack, by which torch takes memory of any device, with what frees it."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_EXTENSION_DEVICE = 12  # kDLExtDev
_ALIGNED_BYTES = 64
_HEAD_BYTES = 128  # a block of memory begins with what describes it, and is freed with it
_CAPSULE_NAME = b"dltensor"  # torch keeps a pointer to it
_libc: Any = ctypes.CDLL(None)
_libc.aligned_alloc.restype, _libc.aligned_alloc.argtypes = (
    ctypes.c_void_p,
    [ctypes.c_size_t, ctypes.c_size_t],
)
_FREE = ctypes.cast(
    _libc.free, ctypes.c_void_p
).value  # none of Python's: torch frees while errors are on their way
_capsule: Any = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def _copied(storage: torch.UntypedStorage) -> Tensor:
    """All bytes of a CPU's storage on the device; uint8 [bytes]."""
    num_bytes = storage.nbytes()
    start = _libc.aligned_alloc(_ALIGNED_BYTES, round_up(_HEAD_BYTES + num_bytes, _ALIGNED_BYTES))
    ctypes.memmove(start + _HEAD_BYTES, storage.data_ptr(), num_bytes)
    sizes = (ctypes.c_int64 * 2).from_address(start + ctypes.sizeof(_ManagedTensor))
    sizes[:] = num_bytes, 1
    size, stride = (ctypes.pointer(ctypes.c_int64.from_buffer(sizes, 8 * number)) for number in range(2))
    flat = _Tensor(start + _HEAD_BYTES, _Device(_EXTENSION_DEVICE, 0), 1, _Dtype(1, 8, 1), size, stride, 0)
    managed = _ManagedTensor(flat, None, _FREE)
    ctypes.memmove(start, ctypes.addressof(managed), ctypes.sizeof(managed))
    made = torch.from_dlpack(_capsule(start, _CAPSULE_NAME, None))
    storage_here: Any = made.untyped_storage()
    _sizes.pop(storage_here._cdata, None)
    return made
