"""The layout of a checkpoint on disk.

    OUT/step-00000100/
        model.safetensors                      parameters and buffers in full shape under the user's names
        state-00000-of-00001.safetensors       the optimizer's state, as flat tensors
        config.json                            of a transformers model, as it reads it
        meta.json                              written last: it makes the checkpoint complete

Files of more than 5 GB are several, model-00001-of-00003.safetensors with model.safetensors.index.json, and
state-00000-of-00003.safetensors. State may be in pieces of the flat tensors.

While it is being written its name is `.saving-step-00000100`; one that is being removed is called
`.removed-step-...`. Tied parameters are in model.safetensors once under each name, as copies, so that it
loads with `model.load_state_dict(safetensors.torch.load_file(path), strict=True)`.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from meshloom.comm.pieces import Runs

VERSIONS = (1, 2)  # 2: weights in several files, which meta.json names
MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"
META = "meta.json"
TORCHS_META = ".metadata"  # in a directory that torch.distributed.checkpoint has written
STATE = "optimizer/"  # what keys of the optimizer's state begin with
MASTER = "master of bfloat16"  # key in the state of a parameter: its copy in the precision of its updates
AVERAGE = "average of the parameter"  # the same: its moving average
SAVING = ".saving-"
REMOVED = ".removed-"
_STEP = re.compile(r"step-\d+")


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` of the flattened tensor `key` of `shape`: `tensor` [stop - start].

    held: the runs of indices of each dim that make a block of it; then the elements are the block's.
    """

    key: str
    tensor: Tensor
    start: int
    stop: int
    shape: tuple[int, ...]
    held: tuple[Runs | None, ...] | None = None

    def __post_init__(self) -> None:
        assert self.tensor.shape == (self.stop - self.start,), (
            f"{self.key}: {tuple(self.tensor.shape)} for {self.start} to {self.stop}"
        )

    @property
    def name(self) -> str:
        """The piece's name within its file."""
        return piece_name(self.key, self.start, self.stop)


def piece_name(key: str, start: int, stop: int) -> str:
    """The name of the piece of `key` in a file."""
    return f"{key}[{start}:{stop}]"


def step_name(step: int) -> str:
    """The name of a checkpoint's directory."""
    return f"step-{step:08d}"


def model_name(number: int, num_files: int) -> str:
    """The name of a file of weights, as transformers names it."""
    return MODEL if num_files == 1 else f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"


def state_name(number: int, num_files: int) -> str:
    """The name of a file of optimizer state."""
    return f"state-{number:05d}-of-{num_files:05d}.safetensors"


def weight_files(meta: Mapping[str, Any]) -> list[str]:
    """The names of the files that hold a checkpoint's weights."""
    return list(meta.get("weights", [MODEL]))


def lies_in(path: Path, name: str) -> bool:
    """Whether the file `name` is in directory `path`. What comes from an untrusted source could name other
    files."""
    file = path / name
    return name not in ("", ".", "..") and Path(name).name == name and file.resolve().parent == path.resolve()


def describe(tensor: Tensor) -> str:
    """Shape and dtype, as fingerprints and errors have them.

    >>> import torch
    >>> describe(torch.ones(64, 10)), describe(torch.tensor(1))
    ('64 x 10 float32', 'scalar int64')
    """
    return f"{' x '.join(map(str, tensor.shape)) or 'scalar'} {str(tensor.dtype).removeprefix('torch.')}"


def fingerprint_of(named_parameters: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """What must be equal for a checkpoint to belong to a job: names, shapes and dtypes of its parameters."""
    return {name: describe(parameter) for name, parameter in named_parameters}


def sync_directory(path: Path) -> None:
    """Flushes the names in a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, content: bytes) -> None:
    """Writes a new file, to the disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def meta_text(body: Mapping[str, Any]) -> str:
    """The content of meta.json, with its own checksum."""
    return json.dumps({"crc32": _checksum(body), "checkpoint": body}, indent=1)


def read_meta(path: Path) -> dict[str, Any] | None:
    """The content of the meta.json of the checkpoint in `path`; None if it is missing or damaged."""
    try:
        meta = json.loads((path / META).read_text())
        return meta["checkpoint"] if meta["crc32"] == _checksum(meta["checkpoint"]) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _checksum(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body).encode())


def committed(directory: Path) -> list[Path]:
    """The complete checkpoints in a run directory, the last one written first.

    The last one written need not have the highest step: a run that was resumed from an earlier step writes
    lower ones later.
    """
    return [path for _, path in sorted(_orders(directory), reverse=True)]


def last_order(directory: Path) -> int:
    """The number of the checkpoint in a run directory that was written last; they are numbered from 1 in the
    order of writing."""
    return max((order for order, _ in _orders(directory)), default=0)


def step_directories(directory: Path) -> list[Path]:
    """All directories in a run directory with a checkpoint's name, complete or not, and those that a crash
    left complete but unnamed; lowest step first."""
    found = {*directory.glob("step-*"), *checkpoint_directories(directory)}
    return sorted(
        (path for path in found if path.is_dir() and _STEP.fullmatch(named_step(path))), key=named_step
    )


def stray_file(directory: Path) -> str:
    """Why nothing is saved in a run directory, in a sentence: a file has a name that directories of checkpoints have; "": there is none."""
    patterns = (f"{SAVING}*", f"{REMOVED}*", "step-*")
    stray = next(
        (
            path
            for pattern in patterns
            for path in sorted(directory.glob(pattern))
            if not path.is_dir() and (pattern != patterns[-1] or _STEP.fullmatch(path.name))
        ),
        None,
    )
    return f"{stray} is a file, and directories of checkpoints have such names; move it away" if stray else ""


def named_step(path: Path) -> str:
    """The name of a checkpoint's directory, which contains its step, also while it is being written: names
    sort by step."""
    return path.name.removeprefix(SAVING)


def _orders(directory: Path) -> list[tuple[int, Path]]:
    return [
        (meta["order"], path)
        for path in checkpoint_directories(directory)
        if (meta := read_meta(path)) is not None
    ]


def checkpoint_directories(directory: Path) -> list[Path]:
    """The directories in a run directory that have a meta.json. One that was killed before its renaming is a
    checkpoint too."""
    return [
        path
        for pattern in ("step-*", f"{SAVING}step-*")
        for path in sorted(directory.glob(pattern))
        if (path / META).exists()
    ]
