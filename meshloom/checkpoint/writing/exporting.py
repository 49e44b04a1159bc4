"""Weights of a checkpoint, written for other programs: complete or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from meshloom.checkpoint.checkpoint import Checkpoint
from meshloom.checkpoint.format import INDEX, SAVING, weight_files
from meshloom.core.errors import CheckpointError

_OWN = ("*.safetensors", "*.json", "*.distcp", ".metadata")  # what directories hold that are written here


def put_in_place(
    checkpoint: Checkpoint, out: Path, write: Callable[[Path], None], *, overwrite: bool
) -> None:
    """Calls `write` with a path beside `out`, and renames what it made to `out`.

    Raises `CheckpointError` if something is there already, unless `overwrite` is given and it is a file, or a
    directory that holds nothing but weights; and if it cannot be written.
    """
    run = checkpoint.path.resolve()
    if out.resolve() in (run, *run.parents) or run in out.resolve().parents:
        raise CheckpointError(f"{out} is or holds the checkpoint itself. Give another path.")
    if (out.exists() or out.is_symlink()) and not overwrite:
        raise CheckpointError(
            f"{out} is there already. Give another path, or --overwrite, which replaces it."
        )
    if out.is_dir():
        kept = {path for pattern in _OWN for path in out.glob(pattern) if path.is_file()}
        other = next((path for path in sorted(out.iterdir()) if path not in kept), None)
        if other is not None:
            raise CheckpointError(f"{out} also holds {other.name}, and is not replaced. Give another path.")
    temporary = out.parent / f"{SAVING}{out.name}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove(temporary)
        write(temporary)
        if out.is_dir():
            _remove(out)
        temporary.rename(out)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error.strerror or error}.") from error
    finally:
        _remove(temporary)


def copy_weight_files(checkpoint: Checkpoint, path: Path) -> None:
    """A directory with the files of weights, their index, and a transformers model's configuration."""
    path.mkdir()
    configurations = [INDEX, "config.json", "generation_config.json"]
    for name in [
        *weight_files(checkpoint.meta),
        *(each for each in configurations if each in checkpoint.meta["files"]),
    ]:
        shutil.copyfile(checkpoint.path / name, path / name)


def save_with_torch(checkpoint: Checkpoint, path: Path) -> None:
    """A file for `torch.load`: the model's state_dict."""
    with path.open("wb") as file:
        torch.save(checkpoint.weights(), file)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
