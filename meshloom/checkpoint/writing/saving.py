"""Saves a checkpoint so that a crash at any moment leaves the previous one intact.

    rank 0      make .saving-step-N      its parts                 meta.json | rename to step-N, remove old ones
    rank r                          |    its parts            |              |
                                  barrier                   barrier   from here on it is the newest

All ranks write to one directory, which they must share. Without meta.json nothing counts, and that is written
when everything else is on disk. The next save removes what a crash left unfinished, and names what it left
complete but unnamed.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshloom.checkpoint.format import (
    META,
    MODEL,
    REMOVED,
    SAVING,
    committed,
    last_order,
    meta_text,
    named_step,
    read_meta,
    step_name,
    stray_file,
    sync_directory,
    write_synced,
)
from meshloom.checkpoint.writing.problems import Problem, attempt, first_problem, sentence_of
from meshloom.comm.group import Group
from meshloom.comm.objects import collect, share
from meshloom.core.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class WrittenFiles:
    """What a rank knows of the files that were written: its problem, if any; size and checksum of files by
    name, each of one rank; the index of pieces and the files of weights, with their index as text, of rank
    0."""

    problem: Problem | None
    files: Mapping[str, Any]
    pieces: Mapping[str, Any]
    weights: Sequence[str] = (MODEL,)
    index: Mapping[str, bytes] = field(default_factory=dict[str, bytes])


# Writes the tensors' files to the second directory, which the first one contains; every rank calls it.
Write = Callable[[Path, Path, Group], WrittenFiles]


def save(
    directory: Path,
    step: int,
    *,
    write: Write,
    values: Any,
    fingerprint: Mapping[str, str],
    plan_text: str,
    group: Group,
    keep: int,
    replaced: Sequence[Path] = (),
    config_files: Mapping[str, bytes] | None = None,
) -> Path:
    """Saves to `directory`/step-..., and removes all but the last `keep` checkpoints. Every rank of `group`
    calls it.

    write: as `parallel` makes it. values: anything that JSON can represent; of rank 0. replaced:
    checkpoints that are removed as well once the new one is complete; of rank 0. config_files: the content of
    other files, by name; of rank 0.

    Raises the same `CheckpointError` on every rank when any of them cannot write; then only older checkpoints
    remain.
    """
    rank = group.rank
    temporary = directory / f"{SAVING}{step_name(step)}"
    problem = attempt(rank, directory, 0, lambda: _prepare(directory, temporary)) if rank == 0 else None
    try:
        problem = first_problem(collect(group, {"problem": problem}))
        written = WrittenFiles(problem=problem, files={}, pieces={})
        if problem is None:
            written = write(directory, temporary, group)
        everyone = collect(group, {"problem": written.problem, "files": written.files})
        problem = first_problem(everyone)
        if rank == 0 and problem is None:
            body = {
                "version": 1 if list(written.weights) == [MODEL] else 2,
                "order": 1 + last_order(directory),
                "step": step,
                "plan": plan_text,
                "fingerprint": dict(fingerprint),
                "values": values,
                "files": {name: facts for each in everyone for name, facts in each["files"].items()},
                "pieces": written.pieces,
            }
            if list(written.weights) != [MODEL]:
                body["weights"] = list(written.weights)
            problem = attempt(
                rank,
                directory,
                0,
                lambda: _commit(
                    directory, temporary, body, {**(config_files or {}), **written.index}, keep, replaced
                ),
            )
        sentence = None
        if rank == 0 and problem is not None:
            _discard(temporary)
            sentence = sentence_of(directory, step, problem)
        sentence = share(group, sentence)
    except BaseException:
        if rank == 0:  # interrupted, or another rank went away
            _discard(temporary)
        raise
    if sentence is not None:
        raise CheckpointError(sentence)
    return directory / step_name(step)


def try_saving(directory: Path, group: Group) -> None:
    """Writes a few bytes to `directory` from every rank, and removes them. Every rank of `group` calls it.

    Raises the same `CheckpointError` on every rank when any of them cannot.
    """
    rank = group.rank
    probe = directory / f"{SAVING}try"  # what a crash leaves of it goes with the next save
    problem = attempt(rank, directory, 0, lambda: _make_probe(directory, probe)) if rank == 0 else None
    try:
        found = first_problem(collect(group, {"problem": problem}))
        if found is None:
            problem = attempt(rank, directory, 0, lambda: _write_probe(probe, rank))
        found = found or first_problem(collect(group, {"problem": problem}))
    finally:
        if rank == 0:
            shutil.rmtree(probe, ignore_errors=True)
    if found is not None:
        raise CheckpointError(
            f"Rank {found['rank']} cannot save in {directory}: {found['reason']}. Give a directory that it can write to."
        )


def check_seen(temporary: Path) -> None:
    """Raises `CheckpointError` if this rank does not see the directory that rank 0 made."""
    if not temporary.is_dir():
        raise CheckpointError(
            f"it does not see {temporary}, which rank 0 made; all ranks must save to one directory that they share"
        )


def _write_probe(probe: Path, rank: int) -> None:
    check_seen(probe)
    write_synced(probe / f"{rank}", b"probe")


def _make_probe(directory: Path, probe: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if probe.exists():
        shutil.rmtree(probe)
    probe.mkdir()


def _prepare(directory: Path, temporary: Path) -> None:
    """Finishes or removes what a crash left, and makes the directory to write to."""
    directory.mkdir(parents=True, exist_ok=True)
    if stray := stray_file(directory):
        raise CheckpointError(stray)
    for path in directory.glob(f"{SAVING}*"):
        if read_meta(path) is not None:
            _name(path, directory)
        else:
            shutil.rmtree(path)
    for path in directory.glob(f"{REMOVED}*"):
        shutil.rmtree(path)
    temporary.mkdir()


def _commit(
    directory: Path,
    temporary: Path,
    body: dict[str, Any],
    config_files: Mapping[str, bytes],
    keep: int,
    replaced: Sequence[Path],
) -> None:
    """Makes the checkpoint count, which it does from the rename of meta.json on."""
    for name, content in config_files.items():
        write_synced(temporary / name, content)
        body["files"][name] = {"bytes": len(content), "crc32": zlib.crc32(content)}
    for name, facts in body["files"].items():
        path = temporary / name
        size = path.stat().st_size if path.exists() else None
        if size != facts["bytes"]:
            found = "is missing" if size is None else f"has {size} bytes instead of {facts['bytes']}"
            raise CheckpointError(
                f"{name}, which another rank wrote, {found}; all ranks must save to one directory that they share"
            )
    part = temporary / f"{META}.part"
    write_synced(part, meta_text(body).encode())
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
