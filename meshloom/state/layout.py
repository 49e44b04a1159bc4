"""How a checkpoint lies on disk.

    OUT/step-00000100/
        model.safetensors                      parameters and buffers in full shape under the user's names
        state-00000-of-00004.safetensors       rank 0's part of the optimizer's state, as flat pieces
        ...
        state-00003-of-00004.safetensors
        meta.json                              written last: with it the checkpoint is whole

While it is written its name is `.saving-step-00000100`; one that is being removed is called `.removed-step-...`. Tied
parameters stand in model.safetensors once under each name, as copies, so that it loads with
`model.load_state_dict(safetensors.torch.load_file(path), strict=True)`.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshloom.errors import CheckpointError

VERSION = 1
MODEL = "model.safetensors"
META = "meta.json"
SAVING = ".saving-"
REMOVED = ".removed-"

# What the format calls a dtype.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` of a flattened tensor of `shape`, which is known as `key`: `tensor` [stop - start]."""

    key: str
    tensor: Tensor
    start: int
    stop: int
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.tensor.shape == (self.stop - self.start,), f"{self.key}: {tuple(self.tensor.shape)} for {self.start} to {self.stop}"

    @property
    def name(self) -> str:
        """The piece's name within its file."""
        return piece_name(self.key, self.start, self.stop)


def piece_name(key: str, start: int, stop: int) -> str:
    """What the piece of `key` is called in a file."""
    return f"{key}[{start}:{stop}]"


def step_name(step: int) -> str:
    """The directory of a checkpoint."""
    return f"step-{step:08d}"


def state_name(rank: int, num_ranks: int) -> str:
    """The file of one rank's pieces."""
    return f"state-{rank:05d}-of-{num_ranks:05d}.safetensors"


def describe(tensor: Tensor) -> str:
    """Shape and dtype, as fingerprints and errors have them.

    >>> describe(torch.ones(64, 10)), describe(torch.tensor(1))
    ('64 x 10 float32', 'scalar int64')
    """
    return f"{' x '.join(map(str, tensor.shape)) or 'scalar'} {str(tensor.dtype).removeprefix('torch.')}"


def fingerprint_of(named_parameters: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """What must be equal for a checkpoint to belong to a job: names, shapes and dtypes of its parameters."""
    return {name: describe(parameter) for name, parameter in named_parameters}


def amount(num_bytes: int) -> str:
    """A number of bytes for a person.

    >>> amount(999), amount(123_456_789)
    ('999 bytes', '123.5 MB')
    """
    for size, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Write a new safetensors file to the disk itself; its size and checksum.

    By hand rather than by the library, which refuses tensors that share memory (tied ones, slices of one bucket) and would have
    the file read again for its checksum. Tensors go one by one, those of wider elements first so that all are aligned.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{name} is of type {type(tensor).__name__}, and a checkpoint holds tensors only")
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {}
    position = 0
    for name, tensor in ordered:
        if tensor.dtype not in DTYPES:
            raise CheckpointError(f"{name} is {tensor.dtype}, and a checkpoint holds only {', '.join(DTYPES.values())}")
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [position, position + tensor.nbytes]}
        position += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    checksum = size = 0
    with path.open("xb") as file:
        for part in (len(text).to_bytes(8, "little"), text, *(tensor for _, tensor in ordered)):
            data = memoryview(part) if isinstance(part, bytes) else tensor_bytes(part)
            file.write(data)
            checksum = zlib.crc32(data, checksum)
            size += len(data)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "crc32": checksum}


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The elements in row-major order; little-endian, as are all machines that torch runs on."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    elements: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return memoryview(elements)


def sync_directory(path: Path) -> None:
    """Bring the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def meta_text(body: Mapping[str, Any]) -> str:
    """What meta.json says, with its own checksum."""
    return json.dumps({"crc32": _checksum(body), "checkpoint": body}, indent=1)


def read_meta(path: Path) -> dict[str, Any] | None:
    """What the meta.json of the checkpoint in `path` says; None where there is none or it is damaged."""
    try:
        meta = json.loads((path / META).read_text())
        return meta["checkpoint"] if meta["crc32"] == _checksum(meta["checkpoint"]) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _checksum(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body).encode())


def committed(directory: Path) -> list[Path]:
    """The checkpoints in a run directory that were written to their end, the one written last first.

    Last written rather than highest step: a run that went back to an earlier step writes lower ones later.
    """
    return [path for _, path in sorted(_orders(directory), reverse=True)]


def last_order(directory: Path) -> int:
    """The number of the checkpoint in a run directory that was written last; they are numbered as they are written, from 1."""
    return max((order for order, _ in _orders(directory)), default=0)


def step_directories(directory: Path) -> list[Path]:
    """Everything in a run directory that is called like a checkpoint, whole or not, and what a crash left whole but unnamed; lowest step first."""
    found = {*directory.glob("step-*"), *checkpoint_directories(directory)}
    return sorted((path for path in found if path.is_dir()), key=named_step)


def named_step(path: Path) -> str:
    """The name of a checkpoint's directory, which says its step, also while it is being written: names sort as steps do."""
    return path.name.removeprefix(SAVING)


def _orders(directory: Path) -> list[tuple[int, Path]]:
    return [(meta["order"], path) for path in checkpoint_directories(directory) if (meta := read_meta(path)) is not None]


def checkpoint_directories(directory: Path) -> list[Path]:
    """What has a meta.json in a run directory. One that was killed between that and its renaming is a checkpoint too."""
    return [path for pattern in ("step-*", f"{SAVING}step-*") for path in sorted(directory.glob(pattern)) if (path / META).exists()]
