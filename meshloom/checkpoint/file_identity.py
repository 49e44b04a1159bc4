"""What tells a file of weights from others, without reading all of it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from meshloom.core.errors import WeightsError

_BLOCKS = 32  # evenly spaced ones that the digest covers; the first begins with the header
_BLOCK_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class FileIdentity:
    """A file as it was when its identity was taken. modified: in nanoseconds, on this host alone. digest: of
    its header and of some of its blocks."""

    path: Path
    num_bytes: int
    modified: int
    digest: str

    @staticmethod
    def of(path: Path) -> FileIdentity:
        """That of a safetensors file now. Raises `WeightsError` if it cannot be read."""
        try:
            with path.open("rb") as file:
                there = path.stat()
                header = file.read(8)
                digest = hashlib.sha256(header + file.read(int.from_bytes(header, "little")))
                for number in range(_BLOCKS):
                    file.seek(there.st_size * number // _BLOCKS)
                    digest.update(file.read(_BLOCK_BYTES))
        except (OSError, OverflowError) as error:
            raise WeightsError(f"{path} cannot be read: {error}.") from error
        return FileIdentity(
            path=path,
            num_bytes=there.st_size,
            modified=there.st_mtime_ns,
            digest=digest.hexdigest()[:16],
        )

    @property
    def text(self) -> str:
        """What is equal on hosts that have copies of the file."""
        return f"{self.num_bytes:,} bytes, {self.digest}"

    def check_unchanged(self) -> None:
        """Raises `WeightsError` if the file has been written since."""
        try:
            there = self.path.stat()
        except OSError as error:
            raise WeightsError(f"{self.path} cannot be read any more: {error.strerror or error}.") from error
        if (there.st_size, there.st_mtime_ns) != (self.num_bytes, self.modified):
            raise WeightsError(
                f"{self.path} has changed since this run began: it had {self.num_bytes:,} bytes, and has {there.st_size:,}. "
                "Start again when it is written to the end."
            )
