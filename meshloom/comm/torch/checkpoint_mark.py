"""Which directories `torch.distributed.checkpoint` has written, told without its modules: importing them takes a second."""

from __future__ import annotations

from pathlib import Path

METADATA = ".metadata"


def is_torch_checkpoint(path: Path) -> bool:
    """Whether `path` is such a directory."""
    return (path / METADATA).is_file()
