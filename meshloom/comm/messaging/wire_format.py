"""The wire format of messages: a fixed header, then the raw bytes of each tensor, one frame each.

    header frame    48 bytes: magic, format, kind, worker, number of tensors, sequence, answers, step, version
                    per tensor: dtype, number of dims, bytes, size of each dim
    tensor frames   the elements in C order

All numbers are little-endian. Every message has exactly one encoding. Nothing is unpickled or evaluated.
Anything malformed is refused with `MessageError`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from meshloom.core.device.flat_bytes import flat_bytes
from meshloom.core.errors import MessageError

MAGIC = b"MLM\n"
FORMAT = 1
DTYPES: dict[int, torch.dtype] = {
    1: torch.float64,
    2: torch.float32,
    3: torch.float16,
    4: torch.bfloat16,
    5: torch.float8_e4m3fn,
    6: torch.float8_e5m2,
    10: torch.int64,
    11: torch.int32,
    12: torch.int16,
    13: torch.int8,
    14: torch.uint8,
    15: torch.bool,
    16: torch.uint16,
    17: torch.uint32,
    18: torch.uint64,
    20: torch.complex64,
    21: torch.complex128,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
MOST_DIMS = 16
_FIXED = struct.Struct("<4sHHIIQQQQ")  # 48 bytes
_TENSOR = struct.Struct("<BBQ")
_WIDTH_BITS = {"kind": 16, "worker": 32, "sequence": 64, "answers": 64, "step": 64, "version": 64}

Buffer: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True, kw_only=True)
class Header:
    """The fields of a message, which mean nothing to the transport.

    kind: of the message (16 bits). worker: the sender or receiver (32 bits).
    sequence: the sender's count of messages. answers: the sequence number of the one that this one answers.
    step: the sender's. version: of the parameters concerned.
    """

    kind: int
    worker: int = 0
    sequence: int = 0
    answers: int = 0
    step: int = 0
    version: int = 0

    def __post_init__(self) -> None:
        for name, bits in _WIDTH_BITS.items():
            if not 0 <= getattr(self, name) < 1 << bits:
                raise MessageError(
                    f"A message cannot have {name}={getattr(self, name)}: it has {bits} bits and no sign."
                )


@dataclass(frozen=True, kw_only=True)
class FrameLimits:
    """The largest messages that a peer accepts and sends, known in advance. Larger frames end the connection
    before memory is allocated for them.

    kinds: of messages. num_tensors: in one message. tensor_bytes: of one tensor.
    """

    kinds: frozenset[int]
    num_tensors: int
    tensor_bytes: int

    def __post_init__(self) -> None:
        if not 0 <= self.num_tensors < 1 << 16 or self.tensor_bytes < 0:
            raise MessageError(
                f"A message cannot have num_tensors={self.num_tensors} of tensor_bytes={self.tensor_bytes}. At most 65535 tensors travel in one."
            )

    @property
    def header_bytes(self) -> int:
        return _FIXED.size + self.num_tensors * (_TENSOR.size + 8 * MOST_DIMS)

    @property
    def frame_bytes(self) -> int:
        return max(self.header_bytes, self.tensor_bytes)


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A tensor's dtype and shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_frames(header: Header, tensors: Sequence[Tensor], limits: FrameLimits) -> list[Buffer]:
    """The header's bytes, then each tensor's memory (copied only if it is not contiguous).

    Raises `MessageError` beyond the limits, and for tensors of devices or dtypes that cannot be sent.
    """
    described = [_describe(tensor) for tensor in tensors]
    check_limits(limits, header, described)
    return [write_header(header, described), *(_memory(tensor) for tensor in tensors)]


def read_frames(frames: Sequence[Buffer], limits: FrameLimits) -> tuple[Header, list[Tensor]]:
    """Header and tensors, which use the frames' memory. Raises `MessageError` if malformed."""
    if not frames:
        raise MessageError("A message without a header.")
    header, described = read_header(frames[0], limits)
    if len(frames) != 1 + len(described):
        raise MessageError(f"A message of {len(frames) - 1} tensors whose header describes {len(described)}.")
    return header, [_tensor(each, frame) for each, frame in zip(described, frames[1:], strict=True)]


def write_header(header: Header, tensors: Sequence[TensorSpec]) -> bytes:
    """The header frame.

    >>> len(write_header(Header(kind=3), [TensorSpec(dtype=torch.float32, shape=(2, 3))]))
    74
    """
    kind, worker, *counters = astuple(header)
    parts = [_FIXED.pack(MAGIC, FORMAT, kind, worker, len(tensors), *counters)]
    for each in tensors:
        parts.append(_TENSOR.pack(CODES[each.dtype], len(each.shape), each.num_bytes))
        parts.append(struct.pack(f"<{len(each.shape)}Q", *each.shape))
    return b"".join(parts)


def read_header(frame: Buffer, limits: FrameLimits) -> tuple[Header, list[TensorSpec]]:
    """Header, and dtypes and shapes of its tensors. Raises `MessageError` if malformed or beyond limits."""
    if not _FIXED.size <= len(frame) <= limits.header_bytes:
        raise MessageError(f"A header of {len(frame)} bytes; it has {_FIXED.size} to {limits.header_bytes}.")
    magic, form, kind, worker, num_tensors, sequence, answers, step, version = _FIXED.unpack_from(frame)
    if magic != MAGIC:
        raise MessageError(f"A message that starts with {magic!r} is not of meshloom.")
    if form != FORMAT:
        raise MessageError(
            f"A message of format {form}; this version of meshloom reads format {FORMAT}. Use the same version everywhere."
        )
    if num_tensors > limits.num_tensors:
        raise MessageError(f"A message of {num_tensors} tensors; {limits.num_tensors} are expected at most.")
    header = Header(kind=kind, worker=worker, sequence=sequence, answers=answers, step=step, version=version)
    described: list[TensorSpec] = []
    offset = _FIXED.size
    for _ in range(num_tensors):
        each, offset = _read_described(frame, offset)
        described.append(each)
    if offset != len(frame):
        raise MessageError(f"A header with {len(frame) - offset} bytes more than it describes.")
    check_limits(limits, header, described)
    return header, described


def check_limits(limits: FrameLimits, header: Header, tensors: Sequence[TensorSpec]) -> None:
    """Raise `MessageError` for a message beyond the limits."""
    if header.kind not in limits.kinds:
        known = ", ".join(map(str, sorted(limits.kinds)))
        raise MessageError(f"A message of kind {header.kind}; known are {known}.")
    if len(tensors) > limits.num_tensors:
        raise MessageError(
            f"A message of {len(tensors)} tensors; {limits.num_tensors} are expected at most. Send several messages."
        )
    largest = max((each.num_bytes for each in tensors), default=0)
    if largest > limits.tensor_bytes:
        raise MessageError(
            f"A tensor of {largest} bytes; {limits.tensor_bytes} are expected at most. Send it in slices."
        )


def _read_described(frame: Buffer, offset: int) -> tuple[TensorSpec, int]:
    """The description that starts at `offset`, and where it ends."""
    if len(frame) - offset < _TENSOR.size:
        raise MessageError("A header that ends within the description of a tensor.")
    code, num_dims, num_bytes = _TENSOR.unpack_from(frame, offset)
    offset += _TENSOR.size
    if code not in DTYPES:
        raise MessageError(f"A tensor of dtype code {code}, which does not exist.")
    if num_dims > MOST_DIMS:
        raise MessageError(f"A tensor of {num_dims} dims; {MOST_DIMS} are allowed.")
    if len(frame) - offset < 8 * num_dims:
        raise MessageError("A header that ends within the shape of a tensor.")
    described = TensorSpec(dtype=DTYPES[code], shape=struct.unpack_from(f"<{num_dims}Q", frame, offset))
    # torch computes strides in 63 bits
    if prod(max(size, 1) for size in described.shape) * described.dtype.itemsize >= 1 << 62:
        raise MessageError(f"A tensor of shape {described.shape}, which no memory could hold.")
    if described.num_bytes != num_bytes:
        raise MessageError(f"A tensor of {num_bytes} bytes whose shape and dtype make {described.num_bytes}.")
    return described, offset + 8 * num_dims


def _describe(tensor: Tensor) -> TensorSpec:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise MessageError(
            f"A {tensor.layout} tensor on {tensor.device} cannot be sent: messages take dense tensors on the CPU. Use .cpu()."
        )
    if tensor.dtype not in CODES:
        raise MessageError(
            f"A tensor of {tensor.dtype} cannot be sent. Convert it, for example with .view(torch.uint8)."
        )
    if tensor.ndim > MOST_DIMS:
        raise MessageError(
            f"A tensor of {tensor.ndim} dims cannot be sent: {MOST_DIMS} are allowed. Reshape it."
        )
    return TensorSpec(dtype=tensor.dtype, shape=tuple(tensor.shape))


def _memory(tensor: Tensor) -> memoryview:
    """The tensor's elements as bytes; it keeps the tensor alive."""
    array: Any = flat_bytes(tensor).numpy()
    return memoryview(array)


def _tensor(described: TensorSpec, frame: Buffer) -> Tensor:
    if len(frame) != described.num_bytes:
        raise MessageError(f"A tensor of {len(frame)} bytes whose header says {described.num_bytes}.")
    if not described.num_bytes:
        return torch.empty(described.shape, dtype=described.dtype)
    elements = torch.frombuffer(frame, dtype=torch.uint8)
    if described.dtype == torch.bool and int(elements.max()) > 1:
        raise MessageError("A bool tensor with elements that are neither 0 nor 1.")
    if elements.data_ptr() % described.dtype.itemsize:  # small frames may start anywhere
        elements = elements.clone()
    return elements.view(described.dtype).reshape(described.shape)
