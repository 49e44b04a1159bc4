"""Messages between two processes of one program: Python values, whose tensors travel as they lie in memory.

    | length of the values, number of tensors | lengths of tensors | values, pickled | tensor | tensor | ...

Both ends are of the same user: a process believes what it reads.
"""

from __future__ import annotations

import io
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshloom.core.device.flat_bytes import flat_bytes


class ConnectionEndedError(Exception):
    """The other end is gone."""


def send(connection: socket.socket, value: Any) -> None:
    """Sends a value; tensors that it holds arrive on the CPU. Raises `ConnectionEndedError`."""
    buffers: list[pickle.PickleBuffer] = []
    content = io.BytesIO()
    _Pickler(content, protocol=5, buffer_callback=buffers.append).dump(value)
    parts = [content.getbuffer(), *(each.raw() for each in buffers)]
    lengths = [len(each) for each in parts]
    head = struct.pack(f"<Q{len(lengths)}Q", len(lengths), *lengths)
    try:
        for part in (head, *parts):
            connection.sendall(part)
    except OSError as error:
        raise ConnectionEndedError from error


def receive(connection: socket.socket) -> Any:
    """The next value. Raises `ConnectionEndedError`."""
    (count,) = struct.unpack("<Q", _exactly(connection, 8))
    lengths = struct.unpack(f"<{count}Q", _exactly(connection, 8 * count))
    content, *buffers = (_exactly(connection, length) for length in lengths)
    return pickle.loads(content, buffers=buffers)


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        tensor = obj.detach().cpu()
        if tensor.layout == torch.sparse_coo:
            return _sparse, (tensor._indices(), tensor._values(), tensor.shape, tensor.is_coalesced())  # pyright: ignore[reportPrivateUsage]
        flat: Any = flat_bytes(tensor).numpy()
        return _dense, (pickle.PickleBuffer(flat), tensor.dtype, tuple(tensor.shape))


def _dense(buffer: Any, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    flat = torch.frombuffer(buffer, dtype=dtype) if len(buffer) else torch.empty(0, dtype=dtype)
    return flat.view(tuple(shape))


def _sparse(indices: Tensor, values: Tensor, shape: Sequence[int], is_coalesced: bool) -> Tensor:
    return torch.sparse_coo_tensor(
        indices, values, tuple(shape), is_coalesced=is_coalesced, check_invariants=False
    )


def _exactly(connection: socket.socket, length: int) -> bytearray:
    content = bytearray(length)
    left = memoryview(content)
    while len(left):
        try:
            count = connection.recv_into(left)
        except OSError as error:
            raise ConnectionEndedError from error
        if not count:
            raise ConnectionEndedError
        left = left[count:]
    return content
