"""Resuming on all ranks: each reads the slices that it needs, or, if some do not see the directory, rank 0
reads all files and broadcasts their tensors one at a time.

    files                        rank 0                          every rank
    model         ------------>  embed.weight  -- broadcast -->  its shard of embed.weight
    state-0, -1   ------------>  its momentum  -- broadcast -->  its elements of that

Where all see it, checksums come first: each rank computes those of its share of all bytes. In a broadcast
they are computed from the bytes as rank 0 reads them, each once, so damage is detected only after everything
has been sent; every rank then raises the error and discards what it has loaded. Either way a rank needs
memory for its own state and one full tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshloom.checkpoint.checkpoint import Checkpoint
from meshloom.checkpoint.checksums import Sum, of_files, sum_of_share
from meshloom.checkpoint.format import META, piece_name, read_meta, weight_files
from meshloom.checkpoint.tensor_file import DTYPES, TensorEntry, tensor_bytes
from meshloom.checkpoint.tensor_reading import NAMED_DTYPES, TensorReader, empty_bytes
from meshloom.comm.group import Group
from meshloom.comm.objects import collect, on_rank_0, share
from meshloom.core.errors import CheckpointError

Told = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Loader:
    """What a rank does with the tensors that it receives. It keeps no reference to them; it copies.

    weight: a parameter or buffer by name, in full shape; what it does not touch is not read. state: a key,
    its full shape, and what reads elements of it from start to stop, flat. finish: called after the last one.
    """

    weight: Callable[[str, Tensor], None]
    state: Callable[[str, Sequence[int], Callable[[int, int], Tensor]], None]
    finish: Callable[[], None]


def open_together(directory: Path, group: Group) -> Checkpoint:
    """The checkpoint that rank 0 finds in `directory`, on every rank; sizes are verified, checksums not yet.
    Its files can be read on rank 0."""
    opened = on_rank_0(group, lambda: Checkpoint.open(directory, checksums=False), CheckpointError)
    path, meta = share(group, [str(opened.path), opened.meta] if opened else None)
    return opened or Checkpoint(Path(path), meta)


def check_together(group: Group, check: Callable[[], None]) -> None:
    """Raises on every rank what `check` raises on the first rank where it does."""
    _raise_first(group, _attempt(check))


def _untold(done: int, of: int) -> None:
    """Nobody is told how far loading is."""


def load_together(
    checkpoint: Checkpoint, keys: Sequence[str], loader: Loader, group: Group, told: Told = _untold
) -> None:  # fmt: skip
    """Passes all weights and the state of `keys`, equal on all ranks, to every rank's `loader`. told: called with the tensors
    that have been read, and their number.

    Raises the same error on every rank if a file is damaged, or else if some rank cannot load.
    """
    seen = collect(group, read_meta(checkpoint.path) == checkpoint.meta)
    (read_slices if all(seen) else hand_over)(checkpoint, keys, loader, group, told)


def read_slices(
    checkpoint: Checkpoint, keys: Sequence[str], loader: Loader, group: Group, told: Told = _untold
) -> None:  # fmt: skip
    """`load_together` where all ranks see the files."""
    facts = checkpoint.meta["files"]
    sizes = {name: each["bytes"] for name, each in facts.items()}
    sums: list[Sum] = []
    problem = _attempt(lambda: sums.extend(sum_of_share(checkpoint.path, sizes, group.rank, group.size)))
    _raise_first(group, problem)
    everyone = collect(group, sums)
    found = of_files(tuple(each) for theirs in everyone for each in theirs)
    wrong = next((name for name in sorted(facts) if found.get(name, 0) != facts[name]["crc32"]), None)
    damage: str | None = share(group, checkpoint.damaged(wrong) if wrong and not group.rank else None)
    if damage:
        raise CheckpointError(damage)
    _raise_first(group, _attempt(lambda: _read(checkpoint, keys, loader, told)))


def _read(checkpoint: Checkpoint, keys: Sequence[str], loader: Loader, told: Told) -> None:
    weights = checkpoint.stored_weights()
    for name in checkpoint.meta["fingerprint"]:
        if name not in weights.entries:
            raise _absent(checkpoint, name)
    of = len(weights.entries) + len(keys)
    for number, name in enumerate(weights.entries):
        told(number, of)
        loader.weight(name, weights.tensor(name))
    for number, key in enumerate(keys):
        told(len(weights.entries) + number, of)
        loader.state(key, checkpoint.shape(key), partial(checkpoint.read, key))
    loader.finish()


def hand_over(
    checkpoint: Checkpoint, keys: Sequence[str], loader: Loader, group: Group, count: Told = _untold
) -> None:  # fmt: skip
    """`load_together` where only rank 0 need see the files."""
    files = on_rank_0(group, lambda: _Files(checkpoint), CheckpointError)
    told: list[Any] = share(group, files.table(keys) if files else None)
    problem: Exception | None = None
    for number, (kind, name, shape, dtype) in enumerate(told):
        count(number, len(told))
        entry = TensorEntry(name, tuple(shape), NAMED_DTYPES[dtype])
        take = loader.weight if kind == "weight" else partial(_take_state, loader)
        read = partial(files.read, kind, entry) if files else None
        problem = _bring(entry, read, take, group, pass_over=problem is not None) or problem
    damage: str | None = share(group, files.damage() if files else None)
    if damage:
        raise CheckpointError(damage)
    _raise_first(group, problem or _attempt(loader.finish))


def _bring(
    entry: TensorEntry,
    read: Callable[[Tensor], None] | None,
    take: Callable[[str, Tensor], None],
    group: Group,
    *,
    pass_over: bool,
) -> Exception | None:
    """Receives one tensor and passes it to `take`; returns the error, if any. read: fills its bytes, on rank
    0. pass_over: take part in the broadcast only."""
    flat = empty_bytes(entry)
    problem = None if read is None or pass_over else _attempt(partial(read, flat))
    if flat.numel():
        group.broadcast(flat, 0).wait()
    if problem or pass_over:
        return problem
    return _attempt(lambda: take(entry.name, flat.view(entry.dtype).view(entry.shape)))


def _take_state(loader: Loader, key: str, whole: Tensor) -> None:
    loader.state(key, whole.shape, lambda start, stop: whole.reshape(-1)[start:stop])


def _absent(checkpoint: Checkpoint, what: str) -> CheckpointError:
    return CheckpointError(f"{checkpoint.path} has no tensor {what}, of which its {META} speaks.")


class _Files:
    """All files of a checkpoint, on the one rank that reads them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._weights = weight_files(checkpoint.meta)
        self._facts: dict[str, Any] = checkpoint.meta["files"]
        self._absent: str | None = None  # what meta.json speaks of and no file has
        self._readers = {
            name: TensorReader(checkpoint.path / name, facts["bytes"]) for name, facts in self._facts.items()
        }

    def table(self, keys: Sequence[str]) -> list[list[Any]]:
        """The tensors to be sent: kind, name, shape and dtype of each. What cannot be read from a damaged
        file is left out."""
        weights = {name: entry for file in self._weights for name, entry in self._entries(file).items()}
        table = [["weight", each.name, list(each.shape), DTYPES[each.dtype]] for each in weights.values()]
        self._absent = next(
            (name for name in self._checkpoint.meta["fingerprint"] if name not in weights), None
        )
        for key in keys:
            file, start, stop = self._checkpoint.parts(key)[0]
            if entry := self._entries(file).get(piece_name(key, start, stop)):
                table.append(["state", key, list(self._checkpoint.shape(key)), DTYPES[entry.dtype]])
            else:
                self._absent = self._absent or key
        return table

    def read(self, kind: str, entry: TensorEntry, flat: Tensor) -> None:
        """Fills `flat` with the bytes of a tensor."""
        into = tensor_bytes(flat)
        if kind == "weight":
            file = next(file for file in self._weights if entry.name in self._entries(file))
            self._readers[file].read(entry.name, into)
            return
        size, position = entry.dtype.itemsize, 0  # elements so far
        for file, start, stop in self._checkpoint.parts(entry.name):
            if start > position:
                break
            name = piece_name(entry.name, start, stop)
            found = self._entries(file).get(name)
            if found is None or found != TensorEntry(name, (stop - start,), entry.dtype):
                raise CheckpointError(
                    f"{self._checkpoint.path / file} does not hold {name} as {entry.dtype}."
                )
            if start == position:
                self._readers[file].read(name, into[start * size : stop * size])
            elif stop > position:  # some of it was in an earlier piece
                piece = tensor_bytes(empty_bytes(found))
                self._readers[file].read(name, piece)
                into[position * size : stop * size] = piece[(position - start) * size :]
            position = max(position, stop)
        if position * size != len(into):
            raise CheckpointError(
                f"{self._checkpoint.path} has no elements {position} to {len(into) // size} of {entry.name}."
            )

    def damage(self) -> str | None:
        """The error about the first file whose bytes are not those that were written; reads the rest of each
        file."""
        for name, reader in sorted(self._readers.items()):
            try:
                intact = reader.checksum() == self._facts[name]["crc32"]
            except EOFError:
                intact = False
            except CheckpointError as error:
                return str(error)
            if not intact:
                return self._checkpoint.damaged(name)
        return str(_absent(self._checkpoint, self._absent)) if self._absent else None

    def _entries(self, file: str) -> Mapping[str, TensorEntry]:
        return self._readers[file].entries if file in self._readers else {}


def _attempt(action: Callable[[], None]) -> Exception | None:
    """The exception that `action` raises, held until all ranks know of it."""
    try:
        with torch.no_grad():
            action()
    except Exception as error:
        return error
    return None


def _raise_first(group: Group, problem: Exception | None) -> None:
    """Raises on every rank the problem of the first rank that has one; other problems may be consequences of
    it."""
    mine = (str(problem) or type(problem).__name__) if problem else None
    everyone = collect(group, mine)
    said = next((each for each in everyone if each is not None), None)
    if problem is not None and mine == said:
        raise problem
    if said is not None:
        raise CheckpointError(said)
