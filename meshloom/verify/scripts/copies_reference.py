"""A module as one of several plain copies, whose gradients are added up in the simplest way: each writes what it has to a file, and reads
those of all. It shares nothing with the engine, whose mistakes it shows.

After each backward: gradient += sum over copies of (rows of its share / rows of all) * what its backward has added.
"""

from __future__ import annotations

import pickle
import time
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from meshloom.loops.taken_shares import bind

_MOST_SECONDS = 600.0  # of a step, in which one copy waits for another


class PlainCopies:
    """Copy `rank` of `size`, which has the files of all in `directory`."""

    def __init__(self, rank: int, size: int, directory: Path) -> None:
        self._rank, self.size, self._directory = rank, size, directory
        self._number = 0  # of the newest exchange

    def everyones(self, values: Any) -> list[Any]:
        """What each copy has given, in their order."""
        self._number += 1
        written = self._path(self._number, self._rank).with_suffix(".part")
        written.write_bytes(pickle.dumps(values))
        written.rename(written.with_suffix(""))
        found = [_read(self._path(self._number, rank)) for rank in range(self.size)]
        self._path(self._number - 1, self._rank).unlink(
            missing_ok=True
        )  # which all have read before they wrote these
        return found

    def _path(self, number: int, rank: int) -> Path:
        return self._directory / f"{number}-of-{rank}"

    def made(self, module: nn.Module) -> nn.Module:
        """`module`, which is from now on one of the copies."""
        _Copy(self, module)
        return module


class _Copy:
    def __init__(self, copies: PlainCopies, module: nn.Module) -> None:
        self._copies, self._module, self._weight = copies, module, 1 / copies.size
        self._hooked: set[int] = set()
        self._start: dict[str, dict[str, Tensor]] = {}  # statistics of norm layers before a forward
        self._noted: dict[str, tuple[Tensor | None, Tensor]] = {}  # gradient before, and what is added to it
        self._added: dict[str, tuple[Tensor | None, Tensor]] = {}  # the same, of those that have it now
        _COPIES[module] = self
        # before inputs become others
        module.register_forward_pre_hook(_before, with_kwargs=True, prepend=True)
        module.register_forward_hook(_after)

    def bind(self, module: nn.Module, args: Sequence[Any], kwargs: Any) -> None:
        """Before a forward."""
        share = bind((args, kwargs))
        self._start = {
            path: _statistics(each) for path, each in module.named_modules() if _has_statistics(each)
        }
        if torch.is_grad_enabled():
            self._weight = (1.0 if share is None else share.weight) / self._copies.size
            for name, parameter in module.named_parameters():
                if parameter.requires_grad and id(parameter) not in self._hooked:
                    self._hooked.add(id(parameter))
                    parameter.register_hook(partial(self._note, name, parameter))
                    parameter.register_post_accumulate_grad_hook(partial(self._accumulated, name))

    def merge_statistics(self, module: nn.Module) -> None:
        """Of norm layers: as if one had run all shares in order."""
        norms = {
            path: each for path, each in module.named_modules() if each.training and _has_statistics(each)
        }
        left = {path: _statistics(each) for path, each in norms.items()}
        shares = self._copies.everyones(left) if norms else []
        for path, norm in norms.items():
            kept, start = 1 - cast("float", norm.momentum), self._start[path]
            for key, now in norm.named_buffers(recurse=False):
                keeps, merged = (kept if now.is_floating_point() else 1), start[key]
                for each in shares:
                    merged = keeps * merged + (each[path][key] - keeps * start[key])
                now.data.copy_(merged)

    def _note(self, name: str, parameter: nn.Parameter, added: Tensor) -> None:
        before = None if parameter.grad is None else parameter.grad.detach().clone()
        self._noted[name] = before, added.detach().clone()

    def _accumulated(self, name: str, _: Tensor) -> None:
        if not self._added:  # the first of this backward
            torch.autograd.Variable._execution_engine.queue_callback(self._average)  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
        self._added[name] = self._noted.pop(name)

    def _average(self) -> None:
        found, self._added = self._added, {}
        mine = {name: self._weight * added for name, (_, added) in found.items()}
        copies = self._copies.everyones(mine)
        for name, parameter in self._module.named_parameters():
            for at, each in enumerate(each for each in copies if name in each):
                before = found[name][0] if at == 0 and name in found else parameter.grad
                parameter.grad = each[name] if before is None else before + each[name]


_COPIES: weakref.WeakKeyDictionary[nn.Module, _Copy] = weakref.WeakKeyDictionary()


def _before(module: nn.Module, args: Sequence[Any], kwargs: Any) -> None:
    if module in _COPIES:
        _COPIES[module].bind(module, args, kwargs)


def _after(module: nn.Module, *_: object) -> None:
    if module in _COPIES:
        _COPIES[module].merge_statistics(module)


def _has_statistics(module: nn.Module) -> bool:
    return getattr(module, "running_mean", None) is not None and getattr(module, "momentum", None) is not None


def _statistics(norm: nn.Module) -> dict[str, Tensor]:
    return {key: each.detach().clone() for key, each in norm.named_buffers(recurse=False)}


def _read(path: Path) -> Any:
    until = time.monotonic() + _MOST_SECONDS
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(
                f"A copy waited {_MOST_SECONDS:.0f} s for what another one has (exchange {path.name})."
            )
        time.sleep(0.001)
    return pickle.loads(path.read_bytes())  # noqa: S301 # of a process of our own
