"""Encodes the messages of workers, servers and the head as numbers and tensors, and decodes them.

    first tensor     int64: the message's integers, in the order of the table below; -1 stands for None
    second tensor    float64: its other numbers
    the rest         tensors of a server's state: which are present (uint8, 0 or 1), then each of these in slices of `SLICE_BYTES`

A message that does not match the table, or this server's slices of the parameters, is refused with
`MessageError` before it has any effect. The head's state, whose size is not fixed, stays on server 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshloom.asynchronous.messaging.handshake import DIGEST_BYTES, Ask, Hello, Terms, Welcome, WorkerSeconds
from meshloom.asynchronous.protocol.messages import (
    Apply,
    Done,
    DropPush,
    Join,
    Leave,
    ParametersPart,
    Push,
    PushStaged,
    Rejoin,
    ReportRequest,
    Restore,
    SendParameters,
    ServerReport,
    SnapshotKept,
    TakeSnapshot,
)
from meshloom.comm.messaging.wire_format import CODES, FrameLimits, Header, TensorSpec
from meshloom.core.errors import JobError, MessageError
from meshloom.exchange.exchange import Slice

SLICE_BYTES = 4 << 20
MOST_TEXTS = 64  # slices of a text
MOST_SNAPSHOTS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class _Form:
    """A message's kind, and the names of its integers and its other numbers."""

    kind: int
    whole: tuple[str, ...] = ()
    other: tuple[str, ...] = ()


_FORMS: dict[type, _Form] = {
    # worker -> server
    Ask: _Form(kind=1),
    Hello: _Form(kind=2, whole=("worker",)),
    WorkerSeconds: _Form(kind=3, whole=("worker",), other=("seconds", "computing", "reading")),
    Join: _Form(kind=4, whole=("worker",)),
    Leave: _Form(kind=5, whole=("worker",)),
    Push: _Form(kind=6, whole=("worker", "share"), other=("loss", "norm")),
    # server -> worker
    Terms: _Form(kind=11),
    Welcome: _Form(kind=12, whole=("worker",)),
    ParametersPart: _Form(kind=13, whole=("server", "share", "version")),
    Rejoin: _Form(kind=14, whole=("share",)),
    Done: _Form(kind=15),
    # server -> head
    PushStaged: _Form(kind=21, whole=("server", "worker", "share"), other=("loss", "norm")),
    SnapshotKept: _Form(kind=22, whole=("server", "version")),
    ServerReport: _Form(kind=23, whole=("server", "asked", "next_share")),
    # head -> server
    ReportRequest: _Form(kind=31, whole=("number",)),
    Apply: _Form(kind=32, whole=("share", "version"), other=("loss", "norm", "rate")),
    SendParameters: _Form(kind=33, whole=("worker", "share", "version")),
    TakeSnapshot: _Form(kind=34, whole=("version", "forget_before")),
    DropPush: _Form(kind=35, whole=("share",)),
    Restore: _Form(kind=36, whole=("version",)),
}
_TYPES = {form.kind: type_ for type_, form in _FORMS.items()}
_NONE = {(Hello, "worker"), (Rejoin, "share"), (ServerReport, "asked")}  # there -1 is None, elsewhere itself
# the tens of a kind say who sends it to whom
FROM_WORKERS, TO_WORKERS, FROM_SERVERS, TO_SERVERS = (
    frozenset(kind for kind in _TYPES if kind // 10 == tens) for tens in range(4)
)


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
        return 4 + sum(max(1, -(-prod(each.shape) // _elements(each.dtype))) for each in described)


def limits_for(kinds: frozenset[int], holdings: Sequence[ServerState] = ()) -> FrameLimits:
    """The largest messages of these kinds."""
    num_tensors = max([2 + MOST_TEXTS, *(each.num_tensors for each in holdings)])
    return FrameLimits(kinds=kinds, num_tensors=num_tensors, tensor_bytes=SLICE_BYTES)


def encode(message: Any, holding: ServerState | None = None) -> tuple[Header, list[Tensor]]:
    """Header and tensors, not copied. holding: of the server of a `ParametersPart` or `Push`."""
    form = _FORMS[type(message)]
    whole = [-1 if (value := getattr(message, name)) is None else value for name in form.whole]
    tensors = [
        torch.tensor(whole, dtype=torch.int64),
        torch.tensor([getattr(message, name) for name in form.other], dtype=torch.float64),
    ]
    match message:
        case Push():
            assert holding
            changes: Mapping[str, Tensor] = message.changes or {}
            changed = [changes.get(name) for name in holding.buffers]
            tensors += _encode_held(message.gradients, holding.slices)
            tensors += _encode_held(changed, [*holding.buffers.values()])
        case ParametersPart():
            assert holding
            buffers = [message.buffers[name] for name in holding.buffers]
            tensors += _encode_held(message.values, holding.slices)
            tensors += _encode_held(buffers, [*holding.buffers.values()])
        case ServerReport():
            tensors.append(torch.tensor([*message.snapshots], dtype=torch.int64))
        case Terms():
            if message.text:
                tensors += _chunks(torch.frombuffer(bytearray(message.text.encode()), dtype=torch.uint8))
        case Hello():
            tensors.append(torch.frombuffer(bytearray(message.digest), dtype=torch.uint8))
        case _:
            pass
    return Header(kind=form.kind), tensors


def decode(header: Header, tensors: Sequence[Tensor], holding: ServerState | None = None) -> Any:
    """The message. Raises `MessageError` for anything that `encode` would not produce with this holding."""
    type_ = _TYPES.get(header.kind)
    if type_ is None or header != Header(kind=header.kind):
        raise MessageError(f"A message with the header {header}, which is none of an asynchronous run.")
    form, name = _FORMS[type_], type_.__name__
    if len(tensors) < 2:
        raise MessageError(f"A {name} without its numbers.")
    whole = _numbers(tensors[0], len(form.whole), torch.int64, name)
    other = _numbers(tensors[1], len(form.other), torch.float64, name)
    fields: dict[str, Any] = dict(zip((*form.whole, *form.other), (*whole, *other), strict=True))
    for each, value in zip(form.whole, whole, strict=True):
        if value < (-1 if (type_, each) in _NONE else 0):
            raise MessageError(f"A {name} with {each}={value}.")
        if value == -1 and (type_, each) in _NONE:
            fields[each] = None
    rest = iter(tensors[2:])
    if type_ is Push or type_ is ParametersPart:
        if holding is None:
            raise MessageError(f"A {name}, which says nothing to this peer.")
        all_there = type_ is ParametersPart
        held = _decode_held(rest, holding.slices, name, all_there=all_there)
        states = _decode_held(rest, [*holding.buffers.values()], name, all_there=all_there)
        by_name = {each: one for each, one in zip(holding.buffers, states, strict=True) if one is not None}
        names = ("gradients", "changes") if type_ is Push else ("values", "buffers")
        fields |= zip(names, (held, by_name if holding.buffers else None), strict=True)
    elif type_ is ServerReport:
        fields["snapshots"] = dict.fromkeys(_versions(next(rest, None)))
    elif type_ is TakeSnapshot:
        fields["state"] = None
    elif type_ is Terms:
        fields["text"] = _text(rest)
    elif type_ is Hello:
        fields["digest"] = _digest(next(rest, None))
    if next(rest, None) is not None:
        raise MessageError(f"A {name} with more tensors than it has.")
    return type_(**fields)


def _numbers(tensor: Tensor, count: int, dtype: torch.dtype, name: str) -> list[Any]:
    if tensor.dtype != dtype or tuple(tensor.shape) != (count,):
        raise MessageError(
            f"A {name} with {tuple(tensor.shape)} numbers of {tensor.dtype} instead of {count} of {dtype}."
        )
    return tensor.tolist()


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


def _versions(tensor: Tensor | None) -> list[int]:
    if tensor is None or tensor.dtype != torch.int64 or tensor.ndim != 1 or len(tensor) > MOST_SNAPSHOTS:
        raise MessageError("A ServerReport whose snapshots are no versions.")
    if tensor.numel() and int(tensor.min()) < 0:
        raise MessageError("A ServerReport with snapshots of numbers below 0.")
    return tensor.tolist()


def _text(rest: Iterator[Tensor]) -> str:
    parts = list(rest)
    are_bytes = all(part.dtype == torch.uint8 and part.ndim == 1 for part in parts)
    if not are_bytes or len(parts) > MOST_TEXTS:
        raise MessageError("Terms that are no text.")
    if any(len(part) < SLICE_BYTES for part in parts[:-1]) or not all(map(len, parts)):
        raise MessageError("Terms whose text is cut otherwise.")
    try:
        return b"".join(part.numpy().tobytes() for part in parts).decode()
    except UnicodeDecodeError:
        raise MessageError("Terms that are no text.") from None


def _digest(tensor: Tensor | None) -> bytes:
    if tensor is None or tensor.dtype != torch.uint8 or tuple(tensor.shape) != (DIGEST_BYTES,):
        raise MessageError(f"A Hello without a digest of {DIGEST_BYTES} bytes.")
    return tensor.numpy().tobytes()
