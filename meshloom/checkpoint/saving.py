"""Saves a checkpoint so that a crash at any moment leaves the previous one intact.

    rank 0      make .saving-step-N      model, state-0                meta.json | rename to step-N, remove old ones
    rank r                          |    state-r                  |              |
                                  barrier                       barrier   from here on it is the newest

All ranks write to one directory, which they must share. Without meta.json nothing counts, and that is written
when everything else is on disk. The next save removes what a crash left unfinished, and names what it left
complete but unnamed.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshloom.checkpoint.format import (
    META,
    MODEL,
    REMOVED,
    SAVING,
    Piece,
    committed,
    last_order,
    meta_text,
    named_step,
    read_meta,
    state_name,
    step_name,
    sync_directory,
)
from meshloom.checkpoint.tensor_file import Stream, TensorEntry, TensorFile, widest_first
from meshloom.comm.group import Group
from meshloom.comm.objects import collect, share
from meshloom.comm.steps import Steps
from meshloom.core.errors import CheckpointError
from meshloom.core.units import format_bytes

Identity = tuple[str, int, int, tuple[int, ...], int]  # key, start, stop, shape, bytes


def save(
    directory: Path,
    step: int,
    *,
    weights: Mapping[str, Tensor] | Stream,
    pieces: Sequence[Piece],
    streams: Sequence[Stream] = (),
    values: Any,
    fingerprint: Mapping[str, str],
    plan_text: str,
    group: Group,
    keep: int,
    replaced: Sequence[Path] = (),
) -> Steps[Path]:
    """Saves to `directory`/step-..., and removes all but the last `keep` checkpoints. Every rank of `group`
    calls it.

    replaced: checkpoints that are removed as well once the new one is complete; of rank 0. weights: by name,
    in full shape; of rank 0. Those of other ranks are ignored, but if they are a stream all ranks take part
    in it. pieces: this rank's pieces of the optimizer's state. A piece that several ranks have is written by
    one of them. streams: the sources of pieces that have no elements yet, one after another. values: anything
    that JSON can represent; of rank 0.

    Raises the same `CheckpointError` on every rank when any of them cannot write; then only older checkpoints
    remain.
    """
    rank = group.rank
    temporary = directory / f"{SAVING}{step_name(step)}"
    problem = _attempt(rank, directory, 0, lambda: _prepare(directory, temporary)) if rank == 0 else None
    try:
        everyone = yield from collect(
            group, {"problem": problem, "pieces": [_identity(piece) for piece in pieces]}
        )
        writers = _writers(
            [
                [(key, start, stop, tuple(shape), size) for key, start, stop, shape, size in each["pieces"]]
                for each in everyone
            ]
        )
        problem = _first_problem(everyone)
        files: dict[str, Any] = {}
        if problem is None:
            mine = {piece.name: piece.tensor for piece in pieces if writers[_identity(piece)] == rank}
            problem = yield from _write(
                directory, temporary, state_name(rank, group.size), mine, streams, group, files
            )
            coming = [weights] if isinstance(weights, Stream) else []
            tensors = (
                {each.name: each.on_meta() for each in weights.entries}
                if isinstance(weights, Stream)
                else weights
            )
            found = yield from _write(
                directory, temporary, MODEL if rank == 0 else None, tensors, coming, group, files
            )
            problem = problem or found
        everyone = yield from collect(group, {"problem": problem, "files": files})
        problem = _first_problem(everyone)
        if rank == 0 and problem is None:
            body = {
                "version": 1,
                "order": 1 + last_order(directory),
                "step": step,
                "plan": plan_text,
                "fingerprint": dict(fingerprint),
                "values": values,
                "files": {name: facts for each in everyone for name, facts in each["files"].items()},
                "pieces": _index(writers, group.size),
            }
            problem = _attempt(
                rank, directory, 0, lambda: _commit(directory, temporary, body, keep, replaced)
            )
        sentence = None
        if rank == 0 and problem is not None:
            _discard(temporary)
            sentence = _sentence(directory, step, problem)
        sentence = yield from share(group, sentence)
    except BaseException:
        if rank == 0:  # interrupted, or another rank went away
            _discard(temporary)
        raise
    if sentence is not None:
        raise CheckpointError(sentence)
    return directory / step_name(step)


def try_saving(directory: Path, group: Group) -> Steps[None]:
    """Writes a few bytes to `directory` in the same way as `save`, and removes them. Every rank of `group`
    calls it.

    Raises the same `CheckpointError` on every rank when any of them cannot.
    """
    rank = group.rank
    probe = directory / f"{SAVING}try"  # what a crash leaves of it goes with the next save
    problem = _attempt(rank, directory, 0, lambda: _make_probe(directory, probe)) if rank == 0 else None
    try:
        found = _first_problem((yield from collect(group, {"problem": problem})))
        if found is None:
            problem = yield from _write(
                directory, probe, state_name(rank, group.size), {"probe": torch.zeros(1)}, [], group, {}
            )
        found = found or _first_problem((yield from collect(group, {"problem": problem})))
    finally:
        if rank == 0:
            shutil.rmtree(probe, ignore_errors=True)
    if found is not None:
        raise CheckpointError(
            f"Rank {found['rank']} cannot save in {directory}: {found['reason']}. Give a directory that it can write to."
        )


def _make_probe(directory: Path, probe: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if probe.exists():
        shutil.rmtree(probe)
    probe.mkdir()


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


def _prepare(directory: Path, temporary: Path) -> None:
    """Finishes or removes what a crash left, and makes the directory to write to."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.glob(f"{SAVING}*"):
        if read_meta(path) is not None:
            _name(path, directory)
        else:
            shutil.rmtree(path)
    for path in directory.glob(f"{REMOVED}*"):
        shutil.rmtree(path)
    temporary.mkdir()


def _write(
    directory: Path,
    temporary: Path,
    name: str | None,
    at_hand: Mapping[str, Any],
    streams: Sequence[Stream],
    group: Group,
    files: dict[str, Any],
) -> Steps[dict[str, Any] | None]:
    """Writes one file of this rank and adds its facts to `files`; returns the problem, if any, for the other
    ranks. name: None: this rank only takes part in streams.

    at_hand: by name; tensors on the meta device come from the streams. A rank that cannot write stays with
    the others to the end of the streams.
    """
    needed = sum(getattr(tensor, "nbytes", 0) for tensor in at_hand.values())
    coming = [each for stream in streams for each in stream.entries if each.name in at_hand]
    made: list[_File] = []
    problem: dict[str, Any] | None = None

    def do(action: Callable[[], None]) -> None:
        nonlocal problem
        problem = problem or _attempt(group.rank, directory, needed, action)

    def begin() -> None:
        if not temporary.is_dir():
            raise CheckpointError(
                f"it does not see {temporary}, which rank 0 made; all ranks must save to one directory that they share"
            )
        made.append(_File(temporary / str(name), at_hand, coming))

    try:
        if name is not None:
            do(begin)
        for stream in streams:
            yield from stream.run(
                lambda key, tensor: do(lambda: made[0].take(key, tensor)) if name is not None else None
            )
        if name is not None:
            do(lambda: files.update({name: made[0].close()}))
    finally:
        for file in made:
            file.abandon()
    return problem


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


def _commit(
    directory: Path, temporary: Path, body: Mapping[str, Any], keep: int, replaced: Sequence[Path]
) -> None:
    """Makes the checkpoint count, which it does from the rename of meta.json on."""
    for name, facts in body["files"].items():
        path = temporary / name
        size = path.stat().st_size if path.exists() else None
        if size != facts["bytes"]:
            found = "is missing" if size is None else f"has {size} bytes instead of {facts['bytes']}"
            raise CheckpointError(
                f"{name}, which another rank wrote, {found}; all ranks must save to one directory that they share"
            )
    part = temporary / f"{META}.part"
    with part.open("x") as file:
        file.write(meta_text(body))
        file.flush()
        os.fsync(file.fileno())
    sync_directory(temporary)
    part.rename(temporary / META)
    sync_directory(temporary)
    _name(temporary, directory)
    others = [path for path in replaced if path.is_dir() and named_step(path) != named_step(temporary)]
    for path in dict.fromkeys([*others, *committed(directory)[keep:]]):
        _remove(path, directory)


def _name(temporary: Path, directory: Path) -> None:
    """Gives a complete checkpoint its name, in place of an older one of the same step."""
    target = directory / temporary.name.removeprefix(SAVING)
    replaced = _set_aside(target, directory) if target.exists() else None
    temporary.rename(target)
    sync_directory(directory)
    if replaced:
        shutil.rmtree(replaced)


def _remove(path: Path, directory: Path) -> None:
    aside = _set_aside(path, directory)
    sync_directory(directory)
    shutil.rmtree(aside)


def _set_aside(path: Path, directory: Path) -> Path:
    """Renames the directory first, so that a removal that is killed does not leave what looks like a
    checkpoint."""
    aside = directory / f"{REMOVED}{path.name}"
    path.rename(aside)
    return aside


def _discard(temporary: Path) -> None:
    if read_meta(temporary) is None:  # with it, it is whole, and the next save will name it
        shutil.rmtree(temporary, ignore_errors=True)


def _attempt(rank: int, directory: Path, needed: int, action: Any) -> dict[str, Any] | None:
    """Runs `action`; returns the problem, if any, for the other ranks."""
    try:
        action()
    except (OSError, CheckpointError) as error:
        reason, full = str(error), False
        if isinstance(error, OSError) and error.strerror:
            reason = error.strerror + (f" ({error.filename})" if error.filename else "")
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        return {"rank": rank, "reason": reason, "needed": needed, "free": _free(directory) if full else None}
    return None


def _free(directory: Path) -> int | None:
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return None


def _first_problem(everyone: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    return next((each["problem"] for each in everyone if each["problem"] is not None), None)


def _sentence(directory: Path, step: int, problem: Mapping[str, Any]) -> str:
    room = (
        f" It needs {format_bytes(problem['needed'])} there, and {format_bytes(problem['free'])} are free."
        if problem["free"] is not None
        else ""
    )
    older = committed(directory)
    previous = (
        f"The checkpoint before it is whole: {older[0]}." if older else "There is no earlier checkpoint."
    )
    return f"Rank {problem['rank']} cannot save step {step} in {directory}: {problem['reason']}.{room} {previous}"
