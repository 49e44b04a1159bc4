"""Weights of a checkpoint, and the optimizer's state, written for other programs: complete or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshloom.checkpoint.checkpoint import Checkpoint
from meshloom.checkpoint.copied_weights import CopiedWeights
from meshloom.checkpoint.format import INDEX, MASTER, SAVING, weight_files
from meshloom.checkpoint.json_values import to_json
from meshloom.checkpoint.optimizer_export import by_name, optimizer_states
from meshloom.checkpoint.tensor_file import write_tensors
from meshloom.checkpoint.writing.config_files import CONFIG
from meshloom.checkpoint.writing.file_layout import HeldSpan, layout_of
from meshloom.checkpoint.writing.parallel import create_files, write_parts
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


def save_weight_files(
    checkpoint: Checkpoint, path: Path, *, optimizer: bool, copies: CopiedWeights | None
) -> None:  # fmt: skip
    """A directory with the files of weights, their index, and a transformers model's configuration; optimizer: the
    state's tensors as optimizer.safetensors, name/key, and everything else of it as optimizer.json.

    copies: the weights, in files of their own; None: the checkpoint's files.
    """
    path.mkdir()
    configurations = [CONFIG, "generation_config.json", *([] if copies else [INDEX])]
    for name in [
        *([] if copies else weight_files(checkpoint.meta)),
        *(each for each in configurations if each in checkpoint.meta["files"]),
    ]:
        shutil.copyfile(checkpoint.path / name, path / name)
    if copies:
        _write_weights(copies, path)
    if copies and copies.kind == MASTER and (path / CONFIG).exists():
        content = json.loads((path / CONFIG).read_text()) | {"dtype": "float32"}
        (path / CONFIG).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    if optimizer:
        states = optimizer_states(checkpoint)
        values = {
            f"{name}/{key}": value
            for each in states
            for name, found in each.state.items()
            for key, value in found.items()
        }
        write_tensors(
            path / "optimizer.safetensors",
            {name: value for name, value in values.items() if isinstance(value, Tensor)},
        )
        others = {name: to_json(value) for name, value in values.items() if not isinstance(value, Tensor)}
        content = {
            "step": checkpoint.step,
            "optimizers": checkpoint.values["updater"]["optimizers"],
            "values": others,
        }
        (path / "optimizer.json").write_text(json.dumps(content, indent=1) + "\n")


def save_with_torch(
    checkpoint: Checkpoint, path: Path, *, optimizer: bool, copies: CopiedWeights | None
) -> None:  # fmt: skip
    """A file for `torch.load`: the model's state_dict, with copies in place of parameters if given. optimizer: under
    "model", beside "optimizer", what its `load_state_dict` takes (a list for several), and "step"."""
    content: dict[str, Any] = copies.whole() if copies else checkpoint.weights()
    if optimizer:
        states = [each.numbered() for each in optimizer_states(checkpoint)]
        content = {
            "model": content,
            "optimizer": states[0] if len(states) == 1 else states,
            "step": checkpoint.step,
        }
    with path.open("wb") as file:
        torch.save(content, file)


def nested_state(
    checkpoint: Checkpoint, *, optimizer: bool, copies: CopiedWeights | None
) -> dict[str, Any]:  # fmt: skip
    """For `torch.distributed.checkpoint`: "model", with copies in place of parameters if given; optimizer: and
    "optimizer" by parameters' names, and what it takes to go on from here, under "meshloom"."""
    content: dict[str, Any] = {"model": copies.whole() if copies else checkpoint.weights()}
    if optimizer:
        content["optimizer"] = by_name(checkpoint)
        content["meshloom"] = json.dumps({"step": checkpoint.step, "values": checkpoint.values})
    return content


def _write_weights(weights: CopiedWeights, path: Path) -> None:
    """As safetensors, in files as large as a checkpoint's, with one tensor at a time in memory."""
    spans = {name: HeldSpan.whole("weight", entry) for name, entry in weights.entries.items()}
    layout = layout_of(spans.values())
    create_files(path, layout.files)
    for name, span in spans.items():
        write_parts(path, layout, [(span, weights.tensor(name).reshape(-1))])
    for name, content in layout.index().items():
        (path / name).write_bytes(content)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
