"""`meshloom.save()`: torch's file, written once, whatever ranks hold."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from pickle import PickleError
from typing import Any, cast

import torch
from torch import Tensor, nn

from meshloom.comm.objects import on_rank_0
from meshloom.core.errors import CODE_ERRORS, CheckpointError
from meshloom.loops.parallel import as_written, whole
from meshloom.loops.part_tensor import PartTensor, whole_tensor
from meshloom.loops.ranks import has_ranks, ranks


def save(obj: Any, path: Any, **options: Any) -> None:
    """`torch.save`, by the main process alone: every rank calls it, and it returns on all when the file is there.

    obj: anything that torch.save takes; parts of tensors within it (of models, of optimizers, of averages) are gathered, one after another. path: a
    file's name. options: torch.save's. The file needs no meshloom to be read. A file of this name stays as it is until the new one is complete.
    Raises `CheckpointError` on all ranks where it cannot be written.
    """
    if _is_alone():
        torch.save(obj, path, **options)
        return
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(
            f"ml.save() takes the name of a file, not a {type(path).__name__}: one rank writes for all."
        )
    with ExitStack() as modules:
        gathered = _gathered(obj, modules, keeps=ranks().world.main)
        write_once(lambda: _write(gathered, Path(path), options), path)


def on_main(obj: Any) -> Any:
    """`obj` on the main process, with whole tensors on the CPU in place of parts, gathered one after another; on others with None in their place. Every rank
    calls it."""
    if _is_alone():
        return obj
    return _gathered(obj, ExitStack(), keeps=ranks().world.main)


def write_once(write: Callable[[], None], path: Any) -> None:
    """Call `write`, which makes `path`, on the main process alone, where modules are of their authors' classes; every rank goes on when it has
    returned. Raises `CheckpointError` on all ranks where it fails."""

    if _is_alone():
        write()
        return

    def attempt() -> None:
        try:
            with as_written():
                write()
        except (*CODE_ERRORS, PickleError) as error:  # the other ranks wait for this one's answer
            raise CheckpointError(f"{path} cannot be written: {error}") from error

    on_rank_0(ranks().everyone, attempt, CheckpointError)


def whole_state(model: nn.Module, read: Callable[[Tensor], Any] = on_main) -> dict[str, Any]:
    """The model's state dict with whole tensors, on the main process, or as `read` gives them: of a tensor one object, by all of its names. Every
    rank calls it."""
    state = model.state_dict(keep_vars=True)
    found = {
        id(each): read(each.detach())
        for each in {id(one): one for one in state.values() if isinstance(one, Tensor)}.values()
    }
    for name, each in state.items():
        state[name] = found.get(id(each), each)
    return state


def save_pretrained(self: Any, save_directory: Any, **kwargs: Any) -> None:
    """In the place of a transformers model's own, of which ranks may have parts: by the main process; every rank calls it."""
    state = whole_state(self)
    write_once(
        lambda: self.save_pretrained(save_directory, **{"state_dict": state, **kwargs}), save_directory
    )


def _is_alone() -> bool:
    return not has_ranks() or ranks().plan.mesh.size == 1


def _gathered(x: Any, modules: ExitStack, *, keeps: bool) -> Any:
    """The same with whole tensors in place of parts, and with modules that are whole until `modules` ends. keeps: whether this rank keeps what it
    gathers."""
    if isinstance(x, PartTensor):
        found = whole_tensor(x)
        return found.to("cpu") if keeps else None
    if isinstance(x, nn.Module):
        modules.enter_context(whole(x))
    elif isinstance(x, Mapping):
        changed: Any = copy.copy(cast(Mapping[Any, Any], x))  # of its class, with all else that it has
        for key, value in [*changed.items()]:
            changed[key] = _gathered(value, modules, keeps=keeps)
        return changed
    elif isinstance(x, list | tuple):
        values = [_gathered(each, modules, keeps=keeps) for each in cast(list[Any], x)]
        return type(x)(*values) if hasattr(x, "_fields") else type(x)(values)
    return x


def _write(obj: Any, path: Path, options: dict[str, Any]) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        torch.save(obj, beside, **options)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
