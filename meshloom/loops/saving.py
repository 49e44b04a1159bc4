"""`meshloom.save()`: torch's file, written once, whatever ranks hold."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from meshloom.comm.objects import on_rank_0
from meshloom.core.errors import CheckpointError
from meshloom.loops.parallel import as_written
from meshloom.loops.ranks import has_ranks, ranks


def save(obj: Any, path: Any, **options: Any) -> None:
    """`torch.save`, by the main process alone: every rank calls it, and it returns on all when the file is there.

    obj: anything that torch.save takes. path: a file's name. options: torch.save's. The file needs no meshloom to be read. A file of this name stays as it
    is until the new one is complete. Raises `CheckpointError` on all ranks where it cannot be written.
    """
    if not has_ranks() or ranks().plan.mesh.size == 1:
        torch.save(obj, path, **options)
        return
    found = ranks()
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(
            f"ml.save() takes the name of a file, not a {type(path).__name__}: one rank writes for all."
        )
    on_rank_0(found.everyone, lambda: _write(obj, Path(path), options), CheckpointError)


def _write(obj: Any, path: Path, options: dict[str, Any]) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with as_written():
            torch.save(obj, beside, **options)
        beside.replace(path)
    except Exception as error:  # the other ranks wait for this one's answer
        beside.unlink(missing_ok=True)
        raise CheckpointError(f"{path} cannot be written: {error}.") from error
