"""Collectives of Python values, of which all ranks of a group call the same one. Each waits twice: for their sizes, then for their bytes.

The tensors that are sent are on the CPU.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import hmac
import io
import json
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from meshloom.comm.group import Group
from meshloom.core.errors import CollectiveError, DataError, MeshloomError

T = TypeVar("T")


def share(group: Group, value: Any, source: int = 0) -> Any:
    """Rank `source`'s JSON value, on every rank (tuples become lists); the others' is ignored.

    >>> from meshloom.comm.simulated import simulated_groups
    >>> from meshloom.comm.turns import in_turns
    >>> in_turns([lambda group=group: share(group, {"step": 3} if group.rank == 0 else None) for group in simulated_groups(2)])
    [{'step': 3}, {'step': 3}]
    """
    return json.loads(share_bytes(group, json.dumps(value).encode(), source))


def share_bytes(group: Group, value: bytes, source: int = 0) -> bytes:
    """Rank `source`'s bytes, on every rank; the others' are ignored."""
    payload = _bytes(value) if group.rank == source else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([payload.numel()])
    group.broadcast(size, source).wait()
    if group.rank != source:
        payload = torch.empty(int(size), dtype=torch.uint8)
    group.broadcast(payload, source).wait()
    return payload.numpy().tobytes()


def on_rank_0(group: Group, compute: Callable[[], T], error: type[MeshloomError]) -> T | None:
    """The result of `compute`, called on rank 0 alone; None on the others. A `MeshloomError` that it raises
    is raised on all ranks, on the others as `error`."""
    result: T | None = None
    failure: MeshloomError | None = None
    if group.rank == 0:
        try:
            result = compute()
        except MeshloomError as raised:
            failure = raised
    message: str | None = share(group, str(failure) if failure else None)
    if message is not None:
        raise failure or error(message)
    return result


def collect(group: Group, value: Any) -> list[Any]:
    """The JSON values of all ranks, in rank order, on every rank."""
    payload = _bytes(json.dumps(value).encode())
    sizes = torch.empty(group.size, dtype=torch.int64)
    group.all_gather(sizes, torch.tensor([payload.numel()])).wait()
    longest = int(sizes.max())
    padded = torch.zeros(longest, dtype=torch.uint8)  # all_gather needs equal sizes
    padded[: payload.numel()] = payload
    gathered = torch.empty(group.size * longest, dtype=torch.uint8)
    group.all_gather(gathered, padded).wait()
    return [
        json.loads(row[:size].numpy().tobytes())
        for row, size in zip(gathered.view(group.size, longest), sizes.tolist(), strict=True)
    ]


def agree(
    group: Group, facts: Mapping[str, Any], way_out: str = "", error: type[MeshloomError] = CollectiveError
) -> None:
    """Raise `error` on every rank if a JSON value of any rank differs from rank 0's; the message names the
    first such rank and value.

    facts: name -> value. way_out: a sentence that ends the message.
    """
    if found := first_unlike(collect(group, dict(facts)), json.dumps):
        raise error(f"Ranks disagree: {found} on rank 0. {way_out}".rstrip())


def first_unlike(everyone: Sequence[Mapping[str, Any]], text: Callable[[Any], str]) -> str | None:
    """The first value of any rank that differs from rank 0's, as `text` shows it: "seed is 1 on rank 2 and 0"; None: there is none.

    everyone: by rank, name -> value.
    """
    for rank, theirs in enumerate(everyone):
        for name in [*everyone[0], *(name for name in theirs if name not in everyone[0])]:
            here, there = (
                text(known[name]) if name in known else "missing" for known in (theirs, everyone[0])
            )
            if here != there:
                return f"{name} is {here} on rank {rank} and {there}"
    return None


def scatter_objects(group: Group, values: Sequence[Any] | None, source: int = 0) -> Any:
    """`values[rank]` of rank `source`, which can be pickled, tensors included; the others pass None.

    Between ranks of one job only, which trust each other. If they have a secret, pickles are signed, and a
    rank unpickles only what another rank has signed for it. Raises `DataError` for what cannot be pickled.
    """
    pickles: list[Tensor] = []
    sizes = [0] * group.size
    if group.rank == source:
        for rank, value in enumerate(values or ()):
            pickles.append(_bytes(_signed(group.secret, source, rank, _pickled(value))))
        sizes = [each.numel() for each in pickles]
        if len(pickles) != group.size:
            raise CollectiveError(
                f"scatter_objects of {len(pickles)} values to {group.size} ranks. Give one value per rank."
            )
    counts = torch.tensor(sizes)
    group.broadcast(counts, source).wait()
    size = int(counts[group.rank])
    received = torch.empty(size, dtype=torch.uint8)
    expected = [size if rank == source else 0 for rank in range(group.size)]
    group.all_to_all(received, torch.cat([received[:0], *pickles]), expected, sizes).wait()
    return pickle.loads(_verified(group.secret, source, group.rank, received.numpy().tobytes()))


def gather_objects(group: Group, value: Any, destination: int = 0) -> list[Any]:
    """The values of all ranks, in rank order, on rank `destination`; [] on the others. Else as `scatter_objects`."""
    mine = _bytes(_signed(group.secret, group.rank, destination, _pickled(value)))
    sizes = torch.empty(group.size, dtype=torch.int64)
    group.all_gather(sizes, torch.tensor([mine.numel()])).wait()
    expected = sizes.tolist() if group.rank == destination else [0] * group.size
    received = torch.empty(sum(expected), dtype=torch.uint8)
    sent = [mine.numel() if rank == destination else 0 for rank in range(group.size)]
    group.all_to_all(received, mine, expected, sent).wait()
    parts = received.split(expected) if group.rank == destination else ()
    return [
        pickle.loads(_verified(group.secret, source, destination, each.numpy().tobytes()))
        for source, each in enumerate(parts)
    ]


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


_TAG = 32  # bytes


def _tag(secret: bytes, source: int, rank: int, value: bytes) -> bytes:
    digest = hashlib.blake2b(value).digest()  # twice as fast as SHA-256, for large batches
    return hmac.digest(secret, b"%d to %d " % (source, rank) + digest, "sha256")


def _signed(secret: bytes, source: int, rank: int, value: bytes) -> bytes:
    return _tag(secret, source, rank, value) + value if secret else value


def _verified(secret: bytes, source: int, rank: int, received: bytes) -> bytes:
    if not secret:
        return received
    tag, value = received[:_TAG], received[_TAG:]
    if not hmac.compare_digest(tag, _tag(secret, source, rank, value)):
        raise CollectiveError(
            f"What rank {rank} of a group received from rank {source} was not signed by it, and is not unpickled: another program has changed a message between ranks."
        )
    return value


class _Pickler(pickle.Pickler):
    """Pickles a view as its elements alone, where torch would add the storage of which it is a view, and its address.

    Of a dataclass or named tuple that cannot be imported (defined in a function), the fields are sent.
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type) and not _is_importable(value):
            return _by_fields(value, value.__module__, value.__qualname__)
        if type(value) is Tensor and value.layout == torch.strided and value.device.type == "cpu":
            sent = value.detach().resolve_conj().resolve_neg()
            if sent.untyped_storage().nbytes() > sent.nbytes:
                sent = sent.clone()
            elements = torch.empty(0, dtype=torch.uint8).set_(sent.untyped_storage())
            at = sent.size(), sent.stride(), sent.storage_offset()
            stored: Any = elements.numpy()  # a buffer, which numpy does not tell before Python 3.12
            return _tensor, (pickle.PickleBuffer(stored), sent.dtype, at, value.requires_grad)
        return NotImplemented


def _tensor(elements: bytearray, dtype: torch.dtype, at: tuple[Any, Any, int], requires_grad: bool) -> Tensor:
    stored = torch.frombuffer(elements, dtype=dtype) if elements else torch.empty(0, dtype=dtype)
    return stored.as_strided(*at).requires_grad_(requires_grad)


def _by_fields(kind: Any, module: str, name: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _like_dataclass, (module, name, [field.name for field in dataclasses.fields(kind)])
    if hasattr(kind, "_fields"):
        return collections.namedtuple, (name.rpartition(".")[2], kind._fields)
    return NotImplemented


def _is_importable(kind: type) -> bool:
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is kind


def _like_dataclass(module: str, name: str, fields: Sequence[str]) -> type:
    """A dataclass of that name with these fields alone."""

    def missing(self: Any, attribute: str) -> Any:
        if attribute.startswith("__"):  # probed by protocols
            raise AttributeError(attribute)
        raise DataError(
            f"{name} is defined in a function, so only its fields {', '.join(fields)} are sent to other ranks, and {attribute} is "
            "not one. Define it at the top of a module."
        )

    return dataclasses.make_dataclass(
        name.rpartition(".")[2], fields, namespace={"__getattr__": missing, "__module__": module}
    )


def _pickled(value: Any) -> bytes:
    stream = io.BytesIO()
    try:
        _Pickler(stream, pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception as error:
        raise DataError(
            f"A {type(value).__name__} cannot be sent to another rank ({error}). "
            "Let the dataset or collate return tensors, numbers, text, lists and dicts, or objects of classes that are defined at the top of a module."
        ) from error
    return stream.getvalue()
