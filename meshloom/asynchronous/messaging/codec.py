"""Encodes the messages of workers, servers and the head as text and tensors, and decodes them.

    first tensor     uint8: a message's numbers and texts as JSON, in the order of its fields
    the rest         tensors of a server's state: which are present (uint8, 0 or 1), then each of these in slices of `SLICE_BYTES`

A message whose text is not that of its type, or whose tensors do not match this server's slices of the parameters,
is refused with `MessageError` before it has any effect.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshloom.asynchronous.messaging.handshake import Ask, Hello, RunDescription, Welcome, WorkerSeconds
from meshloom.asynchronous.protocol.messages import (
    Apply,
    Done,
    DropPush,
    Join,
    Leave,
    ParametersPart,
    Push,
    PushStaged,
    Restore,
    SendParameters,
    ServerReport,
    SnapshotKept,
    TakeSnapshot,
)
from meshloom.comm.messaging.connections import Connections
from meshloom.comm.messaging.endpoint import Endpoint
from meshloom.comm.messaging.wire_format import CODES, FrameLimits, Header, TensorSpec
from meshloom.core.errors import JobError, MessageError, PeerLostError
from meshloom.exchange.exchange import Slice

SLICE_BYTES = 4 << 20

_TYPES: dict[int, type] = {
    # worker -> server
    1: Ask,
    2: Hello,
    3: WorkerSeconds,
    4: Join,
    5: Leave,
    6: Push,
    # server -> worker
    11: RunDescription,
    12: Welcome,
    13: ParametersPart,
    15: Done,
    # server -> head
    21: PushStaged,
    22: SnapshotKept,
    23: ServerReport,
    # head -> server
    32: Apply,
    33: SendParameters,
    34: TakeSnapshot,
    35: DropPush,
    36: Restore,
}
_KINDS = {type_: kind for kind, type_ in _TYPES.items()}
# the tens of a kind say who sends it to whom
FROM_WORKERS, TO_WORKERS, FROM_SERVERS, TO_SERVERS = (
    frozenset(kind for kind in _TYPES if kind // 10 == tens) for tens in range(4)
)
_IN_TENSORS = {Push: ("gradients", "changes"), ParametersPart: ("values", "buffers")}
# by a field's annotation; what is of any type is sent between servers alone
_FITS: dict[str, Callable[[Any], bool]] = {
    "int": lambda value: type(value) is int and 0 <= value < 1 << 63,
    "int | None": lambda value: value is None or _FITS["int"](value),
    "float": lambda value: type(value) is float,
    "str": lambda value: type(value) is str,
    "dict[str, Any]": lambda value: type(value) is dict,
    "list[int]": lambda value: type(value) is list and all(map(_FITS["int"], value)),
}


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """The dtypes and shapes of what a server holds. slices: flat. buffers: by name, on server 0."""

    slices: tuple[TensorSpec, ...]
    buffers: Mapping[str, TensorSpec]

    @staticmethod
    def of(division: Sequence[Sequence[Slice]], buffers: Mapping[str, Tensor]) -> list[ServerState]:
        """Of all servers."""
        described = {name: _travelling(each.dtype, tuple(each.shape)) for name, each in buffers.items()}
        return [
            ServerState(
                slices=tuple(_travelling(each.parameter.dtype, (each.stop - each.start,)) for each in slices),
                buffers=described if number == 0 else {},
            )
            for number, slices in enumerate(division)
        ]

    @property
    def num_tensors(self) -> int:
        """The most tensors in a message about it."""
        described = [*self.slices, *self.buffers.values()]
        return 3 + sum(max(1, -(-prod(each.shape) // _elements(each.dtype))) for each in described)


def limits_for(kinds: frozenset[int], holdings: Sequence[ServerState] = ()) -> FrameLimits:
    """The largest messages of these kinds."""
    num_tensors = max([1, *(each.num_tensors for each in holdings)])
    return FrameLimits(kinds=kinds, num_tensors=num_tensors, tensor_bytes=SLICE_BYTES)


def encode(message: Any, holding: ServerState | None = None) -> tuple[Header, list[Tensor]]:
    """Header and tensors, not copied. holding: of the server of a `ParametersPart` or `Push`.

    Raises `JobError` for a text that no message can carry.
    """
    text = json.dumps({name: getattr(message, name) for name in _in_text(type(message))}).encode()
    if len(text) > SLICE_BYTES:
        raise JobError(
            f"exchange=async sends a {type(message).__name__} in {SLICE_BYTES} bytes, and that of this job has {len(text)}. Use another exchange."
        )
    tensors = [torch.frombuffer(bytearray(text), dtype=torch.uint8)]
    if names := _IN_TENSORS.get(type(message)):
        assert holding
        held, buffers = (getattr(message, name) for name in names)
        tensors += _encode_held(held, holding.slices)
        tensors += _encode_held(
            [(buffers or {}).get(name) for name in holding.buffers], [*holding.buffers.values()]
        )
    return Header(kind=_KINDS[type(message)]), tensors


def send_or_drop(
    end: Endpoint | Connections, peer: int, message: Any, holding: ServerState | None = None
) -> None:
    """Send a message to a peer, if it is there. One that has not taken what waits for it is dropped: it could fill the memory."""
    try:
        end.send(peer, *encode(message, holding))
    except MessageError:
        end.drop(peer)
    except PeerLostError:
        pass


def decode(header: Header, tensors: Sequence[Tensor], holding: ServerState | None = None) -> Any:
    """The message. Raises `MessageError` for anything that `encode` would not produce with this holding."""
    type_ = _TYPES.get(header.kind)
    if type_ is None or header != Header(kind=header.kind):
        raise MessageError(f"A message with the header {header}, which is none of an asynchronous run.")
    name, rest = type_.__name__, iter(tensors)
    values = _read_text(type_, next(rest, None))
    if names := _IN_TENSORS.get(type_):
        if holding is None:
            raise MessageError(f"A {name}, which says nothing to this peer.")
        all_there = type_ is ParametersPart
        held = _decode_held(rest, holding.slices, name, all_there=all_there)
        states = _decode_held(rest, [*holding.buffers.values()], name, all_there=all_there)
        by_name = {each: one for each, one in zip(holding.buffers, states, strict=True) if one is not None}
        values |= zip(names, (held, by_name if holding.buffers else None), strict=True)
    if next(rest, None) is not None:
        raise MessageError(f"A {name} with more tensors than it has.")
    return type_(**values)


@cache
def _in_text(type_: type) -> dict[str, str]:
    """The annotations of the fields that are sent as text."""
    return {
        each.name: str(each.type) for each in fields(type_) if each.name not in _IN_TENSORS.get(type_, ())
    }


def _read_text(type_: type, tensor: Tensor | None) -> dict[str, Any]:
    expected = _in_text(type_)
    try:
        if tensor is None or tensor.dtype != torch.uint8 or tensor.ndim != 1:
            raise ValueError
        text = tensor.numpy().tobytes().decode("ascii")
        values = json.loads(text)
        # every message has one encoding
        if not isinstance(values, dict) or [*values] != [*expected] or json.dumps(values) != text:
            raise ValueError
    except (ValueError, RecursionError):
        raise MessageError(f"A {type_.__name__} without its numbers.") from None
    for name, annotation in expected.items():
        if annotation in _FITS and not _FITS[annotation](values[name]):
            raise MessageError(f"A {type_.__name__} with {name}={str(values[name])[:99]}.")
    return values


def _elements(dtype: torch.dtype) -> int:
    """Elements of a slice."""
    return SLICE_BYTES // dtype.itemsize


def _chunks(flat: Tensor) -> list[Tensor]:
    return list(flat.split(_elements(flat.dtype))) if flat.numel() else [flat]


def _travelling(dtype: torch.dtype, shape: tuple[int, ...]) -> TensorSpec:
    if dtype not in CODES:
        raise JobError(
            f"exchange=async sends parameters and buffers in messages, which cannot carry {dtype}. Use another exchange."
        )
    return TensorSpec(dtype=dtype, shape=shape)


def _encode_held(tensors: Sequence[Tensor | None], described: Sequence[TensorSpec]) -> list[Tensor]:
    there = torch.tensor([each is not None for each in tensors], dtype=torch.uint8)
    found: list[Tensor] = []
    for tensor, each in zip(tensors, described, strict=True):
        if tensor is not None:
            assert tuple(tensor.shape) == each.shape and tensor.dtype == each.dtype, (
                f"{tuple(tensor.shape)} {tensor.dtype} for {each}"
            )
            found += _chunks(tensor.detach().to("cpu").contiguous().reshape(-1))
    return [there, *found]


def _decode_held(
    rest: Iterator[Tensor], described: Sequence[TensorSpec], name: str, *, all_there: bool
) -> list[Tensor | None]:
    there = next(rest, None)
    expected = there is not None and there.dtype == torch.uint8 and tuple(there.shape) == (len(described),)
    if there is None or not expected or bool((there > 1).any()):
        raise MessageError(f"A {name} that does not say which of {len(described)} tensors are there.")
    if all_there and not bool(there.all()):
        raise MessageError(f"A {name} that lacks some of {len(described)} tensors.")
    return [
        _decode_one(rest, each, name) if present else None
        for present, each in zip(there.tolist(), described, strict=True)
    ]


def _decode_one(rest: Iterator[Tensor], described: TensorSpec, name: str) -> Tensor:
    left, parts = prod(described.shape), list[Tensor]()
    while left or not parts:
        part, count = next(rest, None), min(left, _elements(described.dtype))
        if part is None or part.dtype != described.dtype or tuple(part.shape) != (count,):
            found = "nothing" if part is None else f"{tuple(part.shape)} of {part.dtype}"
            raise MessageError(
                f"A {name} with {found} where {count} elements of {described.dtype} should be."
            )
        parts.append(part)
        left -= count
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(described.shape)
