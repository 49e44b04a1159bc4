"""A cache on disk, between runs: the key of an entry is the text of everything that it depends on.

    DIRECTORY/reading-PLACE-DIGEST      magic | hash of all that follows | length of the header | header | content

PLACE identifies what the entry is of; DIGEST is a hash of its key, which the header has line by line, for
people to read. A file is not trusted for its name: its hash and the whole key are compared, and only this user may be able to write
the file and the directory. A failed read or write is not an error.
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

MAX_BYTES = 2**30  # of all entries together
_MAGIC = b"meshloom kept 2\n"
_HASH_BYTES, _LENGTH_BYTES = 32, 8
_STALE_SECONDS = 3600.0  # age of an incomplete file that is removed


@dataclass(frozen=True)
class CacheEntry:
    """The result of a look-up.

    content: None if there is no valid entry. why: the reason. refused: whether a file is not trusted.
    """

    content: bytes | None
    why: str = ""
    refused: bool = False


class Cache:
    """The cache in one directory, which need not exist. max_bytes: the least recently used are evicted."""

    def __init__(self, directory: Path, max_bytes: int = MAX_BYTES) -> None:
        self.directory = directory
        self._max_bytes = max_bytes

    def get(self, kind: str, place: str, parts: Mapping[str, str]) -> CacheEntry:
        """The entry with equal dependencies. place: what it is of, as text. parts: their texts by name."""
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
            return CacheEntry(None, f"{path} is not trusted ({_reason(error)})", refused=True)
        with suppress(OSError):
            os.utime(path)
        return CacheEntry(content)

    def put(self, kind: str, place: str, parts: Mapping[str, str], content: bytes) -> str | None:
        """Store an entry; the reason if that fails."""
        lines = {name: text.split("\n") for name, text in parts.items()}
        header = f"{json.dumps({'parts': lines}, indent=1)}\n".encode()
        body = len(header).to_bytes(_LENGTH_BYTES, "little") + header + content
        data = _MAGIC + _hash(body) + body
        if len(data) > self._max_bytes:
            return f"{len(data)} bytes are more than the limit of {self._max_bytes}"
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
        """Remove an entry."""
        with suppress(OSError):
            self._path(kind, place, parts).unlink()

    def _path(self, kind: str, place: str, parts: Mapping[str, str]) -> Path:
        return self.directory / f"{kind}-{digest_of(place)[:16]}-{digest_of(json.dumps(dict(parts)))[:32]}"

    def _why_not_ours(self) -> str:
        """Why the directory cannot be trusted; "" if it can. Raises `FileNotFoundError`."""
        found = self.directory.stat()
        if found.st_uid != os.geteuid():
            return f"{self.directory} belongs to another user"
        return f"others may write into {self.directory}" if found.st_mode & 0o022 else ""

    def _what_changed(self, kind: str, place: str, parts: Mapping[str, str]) -> str:
        """The dependencies that differ from the newest entry of the same place, as a clause."""
        entries = self.directory.glob(f"{kind}-{digest_of(place)[:16]}-*")
        try:
            there = _parts(_read(max(entries, key=lambda each: each.stat().st_mtime)))
        except (OSError, ValueError, _ForeignError):  # none, or no valid one
            return "no earlier run has stored it"
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
            if total <= self._max_bytes:
                break
            with suppress(OSError):
                path.unlink()
            total -= size


def digest_of(text: str | bytes) -> str:
    """A hash, in hexadecimal."""
    return _hash(text.encode() if isinstance(text, str) else text).hex()


class _ForeignError(Exception):
    """A file that this cache has not written."""


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_HASH_BYTES).digest()


def _read(path: Path) -> bytes:
    """The body of a file that only this user can write."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise _ForeignError("others may write it")
        data = file.read()
    start = len(_MAGIC) + _HASH_BYTES
    if data[: len(_MAGIC)] != _MAGIC or data[len(_MAGIC) : start] != _hash(data[start:]):
        raise _ForeignError("it is damaged, or was not written by this version")
    return data[start:]


def _parts(body: bytes) -> dict[str, str]:
    try:
        parts = json.loads(body[_LENGTH_BYTES : _content_start(body)])["parts"]
        return {name: "\n".join(lines) for name, lines in parts.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise _ForeignError(str(error)) from error


def _content(body: bytes, parts: Mapping[str, str]) -> bytes:
    if _parts(body) != dict(parts):
        raise _ForeignError("its dependencies are not those of its name")
    return body[_content_start(body) :]


def _content_start(body: bytes) -> int:
    return _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "little")


def _write(path: Path, data: bytes) -> None:
    """Write atomically, even if this process is killed; of concurrent writers, one wins."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _reason(error: Exception) -> str:
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else str(error)
