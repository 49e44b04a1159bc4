"""A server's snapshots on disk, and the two numbers that must survive when it is killed.

    DIRECTORY/server-0/     00000100.safetensors    parameters, buffers, the optimizer's state, and what kind of snapshot it is
                            numbers                 newest update, next worker's number: a memory-mapped page
    DIRECTORY/due/          00000100-0.safetensors  a second name of a snapshot that is to be evaluated or saved as a checkpoint
    DIRECTORY/ask-for-snapshot                      the run is to end: server 0 has a snapshot taken of the newest update

A snapshot is written under another name, synced, and renamed: it exists complete or not at all.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from meshloom.asynchronous.protocol.messages import SnapshotKind
from meshloom.asynchronous.state.parameters import Content
from meshloom.checkpoint.format import Piece, sync_directory
from meshloom.checkpoint.tensor_file import write_tensors

ASK_FOR_SNAPSHOT = "ask-for-snapshot"
_SUFFIX = ".safetensors"
_NUMBERS = struct.Struct("<QQ")


class SnapshotFiles(MutableMapping[int, tuple[SnapshotKind, "Content | None"]]):
    """The snapshots in `directory` by version; the one that the run began with has no file."""

    def __init__(self, directory: Path, first: tuple[int, SnapshotKind, Content | None]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.glob(".*"):
            path.unlink()  # left incomplete by a kill
        self._directory = directory
        self._first: tuple[int, SnapshotKind, Content | None] | None = first
        self._kinds = {int(path.stem): _read_kind(path) for path in directory.glob(f"*{_SUFFIX}")}

    def path(self, version: int) -> Path:
        """Of a version's file."""
        return self._directory / snapshot_name(version)

    def __getitem__(self, version: int) -> tuple[SnapshotKind, Content | None]:
        if version in self._kinds:
            return read_snapshot(self.path(version))
        if self._first is not None and self._first[0] == version:
            return self._first[1:]
        raise KeyError(version)

    def __setitem__(self, version: int, snapshot: tuple[SnapshotKind, Content | None]) -> None:
        kind, content = snapshot
        assert content is not None
        temporary = self._directory / f".{version}"
        write_snapshot(temporary, kind, content)
        temporary.rename(self.path(version))
        sync_directory(self._directory)
        self._kinds[version] = kind

    def __delitem__(self, version: int) -> None:
        if version in self._kinds:
            del self._kinds[version]
            self.path(version).unlink()
        elif self._first is not None and self._first[0] == version:
            self._first = None
        else:
            raise KeyError(version)

    def __iter__(self) -> Iterator[int]:
        first = [self._first[0]] if self._first is not None and self._first[0] not in self._kinds else []
        return iter([*first, *self._kinds])

    def __len__(self) -> int:
        return len(list(iter(self)))


class MappedNumbers:
    """Two numbers of a server in a memory-mapped file: they stay, however the process ended."""

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(mmap.PAGESIZE)  # a new file reads as zeros
            self._page = mmap.mmap(file.fileno(), mmap.PAGESIZE)

    @property
    def newest(self) -> int:
        """The newest update."""
        return _NUMBERS.unpack_from(self._page)[0]

    @newest.setter
    def newest(self, version: int) -> None:
        _NUMBERS.pack_into(self._page, 0, version, self.next_worker)

    @property
    def next_worker(self) -> int:
        """The first number that no worker has had yet."""
        return _NUMBERS.unpack_from(self._page)[1]

    @next_worker.setter
    def next_worker(self, number: int) -> None:
        _NUMBERS.pack_into(self._page, 0, self.newest, number)

    def close(self) -> None:
        self._page.close()


def snapshot_name(version: int) -> str:
    """The name of a server's file."""
    return f"{version:08d}{_SUFFIX}"


def due_path(directory: Path, version: int, server: int) -> Path:
    """The second name of server `server`'s snapshot, in the directory of the run."""
    return directory / "due" / f"{version:08d}-{server}{_SUFFIX}"


def write_snapshot(path: Path, kind: SnapshotKind, content: Content) -> None:
    """Write a new file, synced when this returns."""
    said = {
        "incarnation": kind.incarnation,
        "state": kind.state,
        "values": len(content.values),
        "buffers": list(content.buffers),
        "settings": content.settings,
        "pieces": [[each.key, each.start, each.stop, list(each.shape)] for each in content.pieces],
    }
    text = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)
    tensors = {f"value-{number}": each for number, each in enumerate(content.values)}
    tensors |= {f"buffer-{number}": each for number, each in enumerate(content.buffers.values())}
    tensors |= {f"piece-{number}": each.tensor for number, each in enumerate(content.pieces)}
    write_tensors(path, {"said": text, **tensors})


def read_snapshot(path: Path) -> tuple[SnapshotKind, Content]:
    """The inverse of `write_snapshot`, on the CPU."""
    tensors = load_file(path)
    said = json.loads(tensors["said"].numpy().tobytes())
    pieces = [
        Piece(key, tensors[f"piece-{number}"], start, stop, tuple(shape))
        for number, (key, start, stop, shape) in enumerate(said["pieces"])
    ]
    return SnapshotKind(incarnation=said["incarnation"], state=said["state"]), Content.of_pieces(
        values=[tensors[f"value-{number}"] for number in range(said["values"])],
        buffers={name: tensors[f"buffer-{number}"] for number, name in enumerate(said["buffers"])},
        settings=said["settings"],
        pieces=pieces,
    )


def _read_kind(path: Path) -> SnapshotKind:
    with safe_open(path, framework="pt") as file:
        said: Any = json.loads(file.get_tensor("said").numpy().tobytes())
    return SnapshotKind(incarnation=said["incarnation"], state=said["state"])
