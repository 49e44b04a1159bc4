"""Whether a directory is of `torch.distributed.checkpoint`, told without importing it: that takes a second."""

from __future__ import annotations

from pathlib import Path

METADATA = ".metadata"


def is_torch_directory(path: Path) -> bool:
    """Whether it has what every such directory has."""
    return (path / METADATA).is_file()
