"""Results kept on disk from one run to the next, each under digests of all that it depends on.

    DIRECTORY/reading-PLACE-DIGEST      magic | hash of all that follows | length of the header | header | content

PLACE is what the result is of, DIGEST that of all parts of what it depends on, which stand in the header once
more. Nothing is believed because of its name: the hash and every part are compared, and the file and the
directory have to be this user's alone. What cannot be written or read is no error.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MOST_BYTES = 2**30  # of all entries together
_MAGIC = b"meshloom kept 1\n"
_HASH_BYTES, _LENGTH_BYTES = 32, 8
_STALE_SECONDS = 3600.0  # of a file that was not written to its end


@dataclass(frozen=True)
class CacheEntry:
    """content: None if there is nothing to be believed. why: then the reason; refused: a file was there that
    is not believed."""

    content: bytes | None
    why: str = ""
    refused: bool = False


class Cache:
    """Of one directory, which need not be there. most_bytes: of what is kept there the least used goes
    first."""

    def __init__(self, directory: Path, most_bytes: int = MOST_BYTES) -> None:
        self.directory = directory
        self._most_bytes = most_bytes

    def get(self, kind: str, place: str, parts: Mapping[str, str]) -> CacheEntry:
        """What was kept for equal parts. place: what it is of, as text."""
        path = self._path(kind, place, parts)
        try:
            if why := self._why_not_ours():
                return CacheEntry(None, why, refused=True)
            content = _content(_read(path), parts)
        except FileNotFoundError:
            return CacheEntry(None, self._what_changed(kind, place, parts))
        except (OSError, _ForeignError) as error:
            with suppress(OSError):
                path.unlink()
            return CacheEntry(None, f"{path} is not believed ({_reason(error)})", refused=True)
        with suppress(OSError):
            os.utime(path)
        return CacheEntry(content)

    def put(self, kind: str, place: str, parts: Mapping[str, str], content: bytes) -> str | None:
        """Keep it. What is returned says why it could not be kept."""
        header = json.dumps({"parts": dict(parts)}).encode()
        body = len(header).to_bytes(_LENGTH_BYTES, "little") + header + content
        data = _MAGIC + _hash(body) + body
        if len(data) > self._most_bytes:
            return f"{len(data)} bytes are more than the {self._most_bytes} that may be kept"
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if why := self._why_not_ours():
                return why
            _write(self._path(kind, place, parts), data)
            self._make_room()
        except OSError as error:
            return f"{self.directory} cannot be written ({_reason(error)})"
        return None

    def drop(self, kind: str, place: str, parts: Mapping[str, str]) -> None:
        """Forget it."""
        with suppress(OSError):
            self._path(kind, place, parts).unlink()

    def _path(self, kind: str, place: str, parts: Mapping[str, str]) -> Path:
        return self.directory / f"{kind}-{digest_of(place)[:16]}-{digest_of(json.dumps(dict(parts)))[:32]}"

    def _why_not_ours(self) -> str:
        """Why nothing in the directory can be believed. Raises `FileNotFoundError` if it is not there."""
        found = self.directory.stat()
        if found.st_uid != os.geteuid():
            return f"{self.directory} belongs to another user"
        return f"others may write into {self.directory}" if found.st_mode & 0o022 else ""

    def _what_changed(self, kind: str, place: str, parts: Mapping[str, str]) -> str:
        """Since the newest that was kept for the same place."""
        try:
            kept = sorted(
                self.directory.glob(f"{kind}-{digest_of(place)[:16]}-*"),
                key=lambda each: -each.stat().st_mtime,
            )
            there = _parts(_read(kept[0])) if kept else None
        except (OSError, _ForeignError):
            there = None
        if there is None:
            return "no earlier run has kept it"
        names = [name for name in {**there, **parts} if there.get(name) != parts.get(name)]
        return f"changed since an earlier run: {', '.join(names)}"

    def _make_room(self) -> None:
        files: list[tuple[float, int, Path]] = []
        for each in self.directory.iterdir():
            with suppress(OSError):
                found = each.stat()
                if each.name.startswith(".") and found.st_mtime < time.time() - _STALE_SECONDS:
                    each.unlink()
                elif stat.S_ISREG(found.st_mode):
                    files.append((found.st_mtime, found.st_size, each))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files)[:-1]:
            if total <= self._most_bytes:
                break
            with suppress(OSError):
                path.unlink()
            total -= size


def digest_of(text: str | bytes) -> str:
    """As text."""
    return _hash(text.encode() if isinstance(text, str) else text).hex()


class _ForeignError(Exception):
    """Not what we have written."""


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_HASH_BYTES).digest()


def _read(path: Path) -> bytes:
    """The body of a file of this user's."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise _ForeignError("it is not this user's alone")
        data = file.read()
    start = len(_MAGIC) + _HASH_BYTES
    if data[: len(_MAGIC)] != _MAGIC or data[len(_MAGIC) : start] != _hash(data[start:]):
        raise _ForeignError("it is damaged, or was not written by this version")
    return data[start:]


def _parts(body: bytes) -> dict[str, str]:
    try:
        return json.loads(
            body[_LENGTH_BYTES : _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "little")]
        )["parts"]
    except (ValueError, KeyError, TypeError) as error:
        raise _ForeignError(str(error)) from error


def _content(body: bytes, parts: Mapping[str, str]) -> bytes:
    if _parts(body) != dict(parts):
        raise _ForeignError("it is of something else than its name says")
    return body[_LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "little") :]


def _write(path: Path, data: bytes) -> None:
    """All of it or nothing, also when this process is killed; where two write at once one of them wins."""
    descriptor, name = _new_file(path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if not name:
                # Python follows the link that /proc has only where it is given a directory, too
                with suppress(FileExistsError):
                    os.link(
                        f"/proc/self/fd/{file.fileno()}", path, src_dir_fd=file.fileno(), follow_symlinks=True
                    )
        if name:
            os.replace(name, path)
    except BaseException:
        if name:
            with suppress(OSError):
                os.unlink(name)
        raise


def _new_file(directory: Path) -> tuple[int, str]:
    """A file, and its name; where the system has such, one without a name, of which nothing stays."""
    if hasattr(os, "O_TMPFILE") and os.path.isdir("/proc/self/fd"):
        with suppress(OSError):
            return os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600), ""
    return tempfile.mkstemp(dir=directory, prefix=".new-")


def _reason(error: Exception) -> str:
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else str(error)
