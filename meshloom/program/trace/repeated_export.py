"""Exports a loss, alone among threads, and refuses what it draws with `random` or numpy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshloom.core.errors import CaptureError
from meshloom.core.job import LossFunction
from meshloom.core.moments.current_step import answered_by
from meshloom.core.moments.uncompiled import uncompiled
from meshloom.core.random import derive, preserved_draws, seed_everything
from meshloom.program.ir.leaves import Leaves
from meshloom.program.ir.lines import WAY_OUT, WAYS_OUT, describe_line
from meshloom.program.ir.nodes import submodule
from meshloom.program.ir.step_input import answered_by_input, step_beside
from meshloom.program.opaque.stand_ins import Recorded
from meshloom.program.trace.attributes import plain_values, put_attribute
from meshloom.program.trace.block_calls import SHORTCUTS, ShortcutError, Shortcuts
from meshloom.program.trace.export import Exported, export
from meshloom.program.trace.frozen import check_draws, line_that_changes
from meshloom.program.trace.precision import default_precision

T = TypeVar("T")
_NUMBERS = (Tensor, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
# torch.export has global state, and so have Python's generators
_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def one_thread() -> Iterator[None]:
    """Around what builds and runs a model for capture: one thread at a time, since it seeds generators that threads share,
    and what the user has compiled as it is written."""
    with _ONE_AT_A_TIME, uncompiled():
        yield


class GatherCapturedError(CaptureError):
    """A loss that waits for other replicas, which no part of a program does."""


@contextmanager
def capturing(dtype: torch.dtype | None) -> Iterator[None]:
    """The context of a capture: one thread, generators restored, `dtype` the default, nothing is gathered."""
    with one_thread(), preserved_draws(), default_precision(dtype), answered_by(gather=_refuse_to_gather):
        yield


def _refuse_to_gather(_: Tensor) -> NoReturn:
    raise GatherCapturedError(
        "meshloom.gather() joins samples of replicas within the loss, and a program computes one replica's part without waiting for others. "
        "Use dp alone, with zero=3 if the model is large."
    )


def with_shortcuts(read: Callable[[Shortcuts], T]) -> T:
    """The result of `read` with all shortcuts, or with as many as it allows."""
    for shortcuts in SHORTCUTS[:-1]:
        with suppress(ShortcutError):
            return read(shortcuts)
    return read(SHORTCUTS[-1])


def export_once(
    model: nn.Module,
    loss: LossFunction,
    leaves: Leaves,
    shortcuts: Shortcuts,
    recorded: Recorded | None = None,
) -> Exported:
    """One export, after which plain attributes are as before. recorded: as in `export`."""

    def read() -> Exported:
        tensors = list(leaves.tensors.values())
        tensors.append(step_beside(tensors))
        return export(model, _loss_of(loss, leaves), tensors, shortcuts, recorded)

    plain = plain_values(model)
    try:
        seed_everything(derive("capture", 0))
        check = check_draws()
        exported = read()
        check(read)
        if exported.switched is not None:
            raise _refuse_switch(model, exported.switched, read)
    finally:
        for (path, name), value in plain.items():
            put_attribute(model, path, name, value)
    return exported


def device_of(model: nn.Module, leaves: Leaves) -> torch.device:
    """The one device of the model and the batch."""
    tensors = (*model.parameters(), *model.buffers(), *leaves.tensors.values())
    devices = list(dict.fromkeys(tensor.device for tensor in tensors))
    if len(devices) != 1:
        raise CaptureError(
            f"The model and the batch lie on {', '.join(map(str, devices))}. Put all of it on one device. {WAY_OUT}"
        )
    return devices[0]


def check_tensors(leaves: Leaves) -> None:
    """Refuse a batch without tensors."""
    if not leaves.tensors:
        raise CaptureError(
            f"The batch holds no tensors (its parts are mappings, lists, tuples, dataclasses or neither), so there is nothing to capture. {WAY_OUT}"
        )


def _loss_of(loss: LossFunction, leaves: Leaves) -> Any:
    def checked(model: nn.Module, tensors: Sequence[Tensor]) -> Any:
        with answered_by_input(tensors[-1]):
            returned = loss(model, leaves.rebuild(tensors[:-1]))
        for each in tree_leaves(returned):
            if not isinstance(each, _NUMBERS):
                raise CaptureError(
                    f"The loss or metric returned a {type(each).__name__}. Return one scalar tensor (the mean over the samples), or (sum, weight)."
                )
        return returned

    return checked


def _refuse_switch(model: nn.Module, path: str, rerun: Callable[[], Any]) -> CaptureError:
    module = submodule(model, path)
    module.training = not module.training  # as it was
    line = describe_line(line_that_changes(rerun, lambda: module.training))
    return CaptureError(
        f"The forward switches {path or 'the model'} between training and evaluation at {line}, and a program has one mode. "
        f"Switch it where the model is built. {WAYS_OUT}"
    ).at(path)
