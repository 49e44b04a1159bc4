"""A checkpoint on disk, opened: verified first, then read in the requested ranges, under any plan.

Nothing is unpickled. Written by `save`; the layout is described in `format.py`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshloom.checkpoint.format import (
    META,
    VERSIONS,
    Piece,
    checkpoint_directories,
    committed,
    fingerprint_of,
    lies_in,
    named_step,
    piece_name,
    read_meta,
    step_directories,
    weight_files,
)
from meshloom.checkpoint.mapped_tensors import MappedTensors
from meshloom.core.errors import CheckpointError
from meshloom.core.job import Job
from meshloom.core.units import format_count

__all__ = ["Checkpoint", "Piece", "check_same_data", "find", "fingerprint_of"]


def find(directory: Path) -> Path:
    """The checkpoint that `directory` is, or the last one written to the run directory `directory`.

    A checkpoint that was damaged later is also found, unless an intact one is newer: whether to continue from
    an older one is the user's decision.
    """
    if (directory / META).exists():
        return directory
    whole = committed(directory)[:1]
    damaged = [path for path in checkpoint_directories(directory) if read_meta(path) is None]
    newer = [path for path in damaged if not whole or named_step(path) > named_step(whole[0])]
    if newer or whole:
        return max(newer, key=named_step) if newer else whole[0]
    if not directory.is_dir():
        raise CheckpointError(f"There is no directory {directory} to read a checkpoint from.")
    if directory.name.startswith("step-"):
        raise CheckpointError(f"{directory} has no {META}, so it is no whole checkpoint. {_other(directory)}")
    raise CheckpointError(
        f"There is no checkpoint in {directory} (none was saved to the end). Give another directory; a first run starts without --resume."
    )


def passed_over(found: Path) -> str:
    """A line about later checkpoints beside `found` that cannot be distinguished from unfinished ones; "" if
    there are none."""
    later = [
        path
        for path in step_directories(found.parent)
        if not (path / META).exists() and named_step(path) > named_step(found)
    ]
    return (
        f"{later[-1]} has no {META}, so it cannot be read; going on from the one before it, {found}."
        if later
        else ""
    )


class Checkpoint:
    """A complete checkpoint of one step.

    path: its directory. meta: the content of its meta.json. step: updates done. values: those that `save`
    received. plan_text: the plan it was saved under.
    """

    def __init__(self, path: Path, meta: Mapping[str, Any]) -> None:
        self.path = path
        self.meta = meta
        self.step: int = meta["step"]
        self.values: Any = meta["values"]
        self.plan_text: str = meta["plan"]
        self._fingerprint: dict[str, str] = meta["fingerprint"]
        self._pieces: dict[str, Any] = meta["pieces"]
        self._files: dict[str, MappedTensors] = {}  # opened when first read from

    @staticmethod
    def open(path: Path, checksums: bool = True) -> Checkpoint:
        """Opens the checkpoint that `find(path)` finds, after verifying that it is complete.

        checksums: read all files and compare; otherwise sizes only, for callers that compute checksums as
        they read (`resuming.py`).
        """
        path = find(path)
        problem = _problem(path, checksums)
        if problem:
            raise CheckpointError(f"{problem} {_other(path)}")
        meta = read_meta(path)
        assert meta is not None
        return Checkpoint(path, meta)

    def check(self, fingerprint: Mapping[str, str]) -> None:
        """Raises `CheckpointError` with the first parameter that differs between this job and the
        checkpoint."""
        for name, here in fingerprint.items():
            there = self._fingerprint.get(name)
            if there is None:
                raise CheckpointError(
                    f"{self.path} is of another model: it has no parameter {name}, which is {here} in this job."
                )
            if there != here:
                raise CheckpointError(
                    f"{self.path} is of another model: parameter {name} is {there} in it and {here} in this job."
                )
        for name, there in self._fingerprint.items():
            if name not in fingerprint:
                raise CheckpointError(
                    f"{self.path} is of another model: its parameter {name} ({there}) is not in this job."
                )

    def whole_shape(self, name: str) -> tuple[int, ...] | None:
        """Of a parameter or buffer, by its name in `state_dict`; None: it has none of that name."""
        text = self._fingerprint.get(name)
        return None if text is None else tuple(json.loads(text.rpartition(" ")[0]))

    def check_data(self, job: Job) -> None:
        """Raises `CheckpointError` if `job` draws its batches differently from the job that was saved."""
        check_same_data(self.values, {"seed": job.seed, "batch_size": job.batch_size}, "the job")

    def check_steps_left(self, steps: int) -> None:
        """Raises `CheckpointError` if a run of `steps` steps is already finished here."""
        if self.step >= steps:
            raise CheckpointError(
                f"The checkpoint is at step {self.step} and the run has {format_count(steps, 'step')}, so nothing is left. Give more with --steps."
            )

    def keys(self) -> list[str]:
        """The keys that `read` accepts."""
        return list(self._pieces)

    def shape(self, key: str) -> tuple[int, ...]:
        """The full shape of the tensor `key`."""
        return tuple(self._entry(key)["shape"])

    def parts(self, key: str) -> list[tuple[str, int, int]]:
        """The files that hold elements of `key`, with start and stop, in order of start."""
        return [(file, start, stop) for file, start, stop in self._entry(key)["parts"]]

    def damaged(self, file: str) -> str:
        """The error message about a file whose bytes are not those that were written."""
        return f"{_damaged(self.path / file)} {_other(self.path)}"

    def read(self, key: str, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` of the flattened tensor `key`, flat, on the CPU. Only these are read
        from disk, as they are touched."""
        parts: list[Tensor] = []
        position = start
        for file, first, last in self.parts(key):
            if (first <= position < last and position < stop) or (
                first <= start == stop <= last and not parts
            ):
                end = min(stop, last)
                tensor = self._open(file).tensor(piece_name(key, first, last))
                parts.append(tensor[position - first : end - first])
                position = end
        if position != stop or not parts:
            raise CheckpointError(f"{self.path} has no elements {position} to {stop} of {key}.")
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def weights(self) -> dict[str, Tensor]:
        """Parameters and buffers by name, in full shape, on the CPU."""
        stored = self.stored_weights()
        return {name: stored.tensor(name) for name in stored.entries}

    def stored_weights(self) -> MappedTensors:
        """The same, each read as it is touched."""
        return MappedTensors([self.path / name for name in weight_files(self.meta)])

    def _entry(self, key: str) -> Mapping[str, Any]:
        if key not in self._pieces:
            raise CheckpointError(
                f"{self.path} has nothing called {key}. It was saved with another optimizer."
            )
        return self._pieces[key]

    def _open(self, file: str) -> MappedTensors:
        if file not in self._files:
            self._files[file] = MappedTensors([self.path / file])
        return self._files[file]


def check_same_data(there: Mapping[str, Any], here: Mapping[str, Any], whose: str) -> None:
    """Raises `CheckpointError` with the first setting of `here` whose value differs in `there`, a
    checkpoint's values. whose: the owner of `here`, for the message."""
    for name, value in here.items():
        if there[name] != value:
            raise CheckpointError(
                f"The checkpoint was written with {name}={there[name]} and {whose} has {name}={value}: the data would not go on where it stopped. "
                f"Set {name}={there[name]}, or start a new run."
            )


def _problem(path: Path, checksums: bool) -> str | None:
    """Why the checkpoint in `path` is not complete; None: it is."""
    meta = read_meta(path)
    if meta is None:
        return f"{path / META} is damaged: it is not what was written."
    if meta["version"] not in VERSIONS:
        return f"{path} has version {meta['version']} of the format, and this meshloom reads versions up to {VERSIONS[-1]}."
    named = {
        *weight_files(meta),
        *meta["files"],
        *(file for piece in meta["pieces"].values() for file, _, _ in piece["parts"]),
    }
    for name in sorted(named):
        if not lies_in(path, name):
            return f"{path / META} names the file {name}, which does not lie in this directory: a checkpoint has no files elsewhere."
    for name, facts in meta["files"].items():
        file = path / name
        if not file.exists():
            return f"{file} is missing."
        if file.stat().st_size != facts["bytes"]:
            return f"{file} is truncated or overwritten: it has {file.stat().st_size} bytes, and {facts['bytes']} were written."
        if checksums and _checksum(file) != facts["crc32"]:
            return _damaged(file)
    return None


def _damaged(file: Path) -> str:
    return f"{file} is damaged: it has as many bytes as were written, but not the same ones."


def _checksum(file: Path) -> int:
    checksum = 0
    with file.open("rb") as opened:
        while block := opened.read(2**20):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _other(path: Path) -> str:
    whole = next(
        (each for each in committed(path.parent) if each != path and _problem(each, checksums=True) is None),
        None,
    )
    return (
        f"The newest other whole checkpoint is {whole}."
        if whole
        else f"There is no other whole checkpoint in {path.parent}."
    )
