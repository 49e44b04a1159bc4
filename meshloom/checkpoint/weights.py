"""Weights by name in a file, a directory with an index, or a checkpoint.

weights = open_weights(Path("runs/gpt"))
shard = weights.tensor("head.weight")[:, :384].clone()      the rest of it is not read
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshloom.checkpoint.checkpoint import find
from meshloom.checkpoint.format import INDEX, META, MODEL, lies_in, read_meta, weight_files
from meshloom.checkpoint.mapped_tensors import MappedTensors
from meshloom.core.errors import CheckpointError


def open_weights(path: Path) -> MappedTensors:
    """The weights that `path` is or holds, by name: a safetensors file, a directory with one or with a
    model.safetensors.index.json, or a checkpoint, or the newest one of a run's directory.

    Raises `CheckpointError` if there are none.
    """
    if path.is_file():
        return MappedTensors([path])
    if not (path / META).exists() and ((path / INDEX).exists() or (path / MODEL).exists()):
        return MappedTensors([path / name for name in _indexed(path)])
    if path.is_dir():
        found = find(path)
        meta = read_meta(found)
        if meta is None:
            raise CheckpointError(f"{found / META} is damaged: it is not what was written.")
        return MappedTensors([found / name for name in weight_files(meta)])
    raise CheckpointError(f"There is no {path} to read weights from.")


def _indexed(directory: Path) -> list[str]:
    """The files of weights in a directory that is no checkpoint; as for transformers, an index is for where
    there is no single file."""
    if (directory / MODEL).exists():
        return [MODEL]
    try:
        index: Any = json.loads((directory / INDEX).read_text())
        names = sorted(set(index["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{directory / INDEX} is no index of weights: it needs a weight_map from names to files."
        ) from error
    for name in names:
        if not lies_in(directory, name):
            raise CheckpointError(
                f"{directory / INDEX} names the file {name}, which is not in its directory."
            )
    return names
