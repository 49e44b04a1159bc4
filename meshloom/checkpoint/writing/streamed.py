"""Writes a checkpoint's files from several hosts: every file by one rank, weights by rank 0 as they arrive.

    rank 0      model, state-0
    rank r      state-r

Several hosts cannot write into one file: over a network file system their bytes would overwrite each other's
pages. Ranks of one host write as `parallel.py` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from meshloom.checkpoint.format import MODEL, Piece, state_name
from meshloom.checkpoint.tensor_file import Stream, TensorEntry, TensorFile, widest_first
from meshloom.checkpoint.writing.problems import Problem, attempt
from meshloom.checkpoint.writing.saving import Write, WrittenFiles, check_seen
from meshloom.comm.group import Group
from meshloom.comm.objects import collect

Identity = tuple[str, int, int, tuple[int, ...], int]  # key, start, stop, shape, bytes


def streamed(
    weights: Mapping[str, Tensor] | Stream, pieces: Sequence[Piece], streams: Sequence[Stream] = ()
) -> Write:
    """Writes a file of weights by rank 0, and a file of state by each rank.

    weights: by name, in full shape; of rank 0. Those of other ranks are ignored, but if they are a stream all
    ranks take part in it. pieces: this rank's pieces of the optimizer's state. A piece that several ranks
    have is written by one of them. streams: the sources of pieces that have no elements yet, one after
    another.
    """

    def write(directory: Path, temporary: Path, group: Group) -> WrittenFiles:
        everyone = collect(group, [_identity(piece) for piece in pieces])
        writers = _writers(
            [
                [(key, start, stop, tuple(shape), size) for key, start, stop, shape, size in each]
                for each in everyone
            ]
        )
        files: dict[str, Any] = {}
        mine = {piece.name: piece.tensor for piece in pieces if writers[_identity(piece)] == group.rank}
        problem = write_file(
            directory, temporary, state_name(group.rank, group.size), mine, streams, group, files
        )
        coming = [weights] if isinstance(weights, Stream) else []
        tensors = (
            {each.name: each.on_meta() for each in weights.entries}
            if isinstance(weights, Stream)
            else weights
        )
        found = write_file(
            directory, temporary, MODEL if group.rank == 0 else None, tensors, coming, group, files
        )
        return WrittenFiles(problem=problem or found, files=files, pieces=_index(writers, group.size))

    return write


def write_file(
    directory: Path,
    temporary: Path,
    name: str | None,
    at_hand: Mapping[str, Any],
    streams: Sequence[Stream],
    group: Group,
    files: dict[str, Any],
) -> Problem | None:
    """Writes one file of this rank and adds its facts to `files`; returns the problem, if any, for the other
    ranks. name: None: this rank only takes part in streams.

    at_hand: by name; tensors on the meta device come from the streams. A rank that cannot write stays with
    the others to the end of the streams.
    """
    needed = sum(getattr(tensor, "nbytes", 0) for tensor in at_hand.values())
    coming = [each for stream in streams for each in stream.entries if each.name in at_hand]
    made: list[_File] = []
    problem: Problem | None = None

    def do(action: Callable[[], None]) -> None:
        nonlocal problem
        problem = problem or attempt(group.rank, directory, needed, action)

    def begin() -> None:
        check_seen(temporary)
        made.append(_File(temporary / str(name), at_hand, coming))

    try:
        if name is not None:
            do(begin)
        for stream in streams:
            stream.run(
                lambda key, tensor: do(lambda: made[0].take(key, tensor)) if name is not None else None
            )
        if name is not None:
            do(lambda: files.update({name: made[0].close()}))
    finally:
        for file in made:
            file.abandon()
    return problem


def _identity(piece: Piece) -> Identity:
    return piece.key, piece.start, piece.stop, tuple(piece.shape), piece.tensor.nbytes


def _writers(everyone: Sequence[Sequence[Identity]]) -> dict[Identity, int]:
    """The rank that writes each piece: of those that have it, the one with the least to write so far."""
    holders: dict[Identity, list[int]] = {}
    for rank, identities in enumerate(everyone):
        for identity in identities:
            holders.setdefault(identity, []).append(rank)
    load = [0] * len(everyone)
    writers: dict[Identity, int] = {}
    for identity, ranks in holders.items():
        writers[identity] = min(ranks, key=load.__getitem__)
        load[writers[identity]] += identity[-1]
    return writers


def _index(writers: Mapping[Identity, int], num_ranks: int) -> dict[str, Any]:
    """By key: the full shape, and the places of its pieces as [file, start, stop]."""
    index: dict[str, Any] = {}
    for (key, start, stop, shape, _), rank in sorted(writers.items(), key=lambda item: item[0][:3]):
        index.setdefault(key, {"shape": list(shape), "parts": []})["parts"].append(
            [state_name(rank, num_ranks), start, stop]
        )
    return index


class _File:
    """A file of tensors at hand and of tensors that come from streams, the latter in the order in which they
    come, otherwise with wider elements first."""

    def __init__(self, path: Path, at_hand: Mapping[str, Any], coming: Sequence[TensorEntry]) -> None:
        self._coming = {each.name for each in coming}
        self._here = {name: tensor for name, tensor in at_hand.items() if name not in self._coming}
        here = widest_first([TensorEntry.of(name, tensor) for name, tensor in self._here.items()])
        self._left: list[TensorEntry] = []
        for each in coming:
            while here and here[0].dtype.itemsize >= each.dtype.itemsize:
                self._left.append(here.pop(0))
            self._left.append(each)
        self._left += here
        self._file = TensorFile(path, self._left)

    def take(self, name: str, tensor: Tensor) -> None:
        """The next tensor of a stream; tensors that belong before it are written before it. A tensor that
        another rank writes is ignored."""
        if name in self._coming:
            self._add_here()
            self._left.pop(0)
            self._file.add(name, tensor)

    def close(self) -> dict[str, int]:
        """The file's size and checksum."""
        self._add_here()
        return self._file.close()

    def abandon(self) -> None:
        """Discards the file."""
        self._file.abandon()

    def _add_here(self) -> None:
        while self._left and self._left[0].name in self._here:
            name = self._left.pop(0).name
            self._file.add(name, self._here.pop(name))
