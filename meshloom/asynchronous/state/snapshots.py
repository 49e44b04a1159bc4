"""A server's snapshots on disk, and the two numbers that must survive when it is killed.

    DIRECTORY/server-0/     00000100.safetensors    parameters, buffers, the optimizer's state, and the head's
                            numbers                 next share, next worker's number: a memory-mapped page
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
from safetensors.torch import load_file

from meshloom.asynchronous.state.parameters import Content
from meshloom.checkpoint.format import Piece, sync_directory
from meshloom.checkpoint.tensor_file import write_tensors

ASK_FOR_SNAPSHOT = "ask-for-snapshot"
_SUFFIX = ".safetensors"
_NUMBERS = struct.Struct("<QQ")


class SnapshotFiles(MutableMapping[int, tuple[Any, "Content | None"]]):
    """The snapshots in `directory` by version: the head's state, and the server's content. The one that the run began
    with has no file."""

    def __init__(self, directory: Path, first: tuple[int, Any, Content | None]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.glob(".*"):
            path.unlink()  # left incomplete by a kill
        self._directory = directory
        # what has no file; None for a file
        self._snapshots: dict[int, tuple[Any, Content | None] | None] = {first[0]: first[1:]}
        self._snapshots |= dict.fromkeys(int(path.stem) for path in directory.glob(f"*{_SUFFIX}"))

    def path(self, version: int) -> Path:
        """Of a version's file."""
        return self._directory / snapshot_name(version)

    def __getitem__(self, version: int) -> tuple[Any, Content | None]:
        return self._snapshots[version] or read_snapshot(self.path(version))

    def __setitem__(self, version: int, snapshot: tuple[Any, Content | None]) -> None:
        state, content = snapshot
        assert content is not None
        temporary = self._directory / f".{version}"
        write_snapshot(temporary, state, content)
        temporary.rename(self.path(version))
        sync_directory(self._directory)
        self._snapshots[version] = None

    def __delitem__(self, version: int) -> None:
        if self._snapshots.pop(version) is None:
            self.path(version).unlink()

    def __iter__(self) -> Iterator[int]:
        return iter(self._snapshots)

    def __len__(self) -> int:
        return len(self._snapshots)


class MappedNumbers:
    """Two numbers of a server in a memory-mapped file: they stay, however the process ended."""

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(mmap.PAGESIZE)  # a new file reads as zeros
            self._page = mmap.mmap(file.fileno(), mmap.PAGESIZE)

    @property
    def next_share(self) -> int:
        """The first share for which parameters were never sent."""
        return _NUMBERS.unpack_from(self._page)[0]

    @next_share.setter
    def next_share(self, share: int) -> None:
        _NUMBERS.pack_into(self._page, 0, share, self.next_worker)

    @property
    def next_worker(self) -> int:
        """The first number that no worker has had yet."""
        return _NUMBERS.unpack_from(self._page)[1]

    @next_worker.setter
    def next_worker(self, number: int) -> None:
        _NUMBERS.pack_into(self._page, 0, self.next_share, number)

    def close(self) -> None:
        self._page.close()


def snapshot_name(version: int) -> str:
    """The name of a server's file."""
    return f"{version:08d}{_SUFFIX}"


def due_path(directory: Path, version: int, server: int) -> Path:
    """The second name of server `server`'s snapshot, in the directory of the run."""
    return directory / "due" / f"{version:08d}-{server}{_SUFFIX}"


def write_snapshot(path: Path, state: Any, content: Content) -> None:
    """Write a new file, synced when this returns. state: the head's."""
    said = {
        "state": state,
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


def read_snapshot(path: Path) -> tuple[Any, Content]:
    """The inverse of `write_snapshot`, on the CPU."""
    tensors = load_file(path)
    said = json.loads(tensors["said"].numpy().tobytes())
    pieces = [
        Piece(key, tensors[f"piece-{number}"], start, stop, tuple(shape))
        for number, (key, start, stop, shape) in enumerate(said["pieces"])
    ]
    return said["state"], Content.of_pieces(
        values=[tensors[f"value-{number}"] for number in range(said["values"])],
        buffers={name: tensors[f"buffer-{number}"] for number, name in enumerate(said["buffers"])},
        settings=said["settings"],
        pieces=pieces,
    )
