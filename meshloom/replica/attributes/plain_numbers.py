"""Numbers in plain attributes of modules that forwards set: `self.calls += 1`, a temperature that falls.

They follow the rule of buffers (docs/buffers.md): every chunk of a step finds them as they were before it. After the step
they are, on every replica, what the last chunk made of them that changed them, so a counter counts steps.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

from meshloom.comm.group import Group
from meshloom.comm.steps import Steps
from meshloom.core.errors import TrainingError
from meshloom.core.modules.class_code import names_set, set_by
from meshloom.telemetry.traffic import ExpectedBytes, Traffic

Place = tuple[str, nn.Module, str]  # path of a module, and name of its attribute
_UNCHANGED, _WHOLE, _REAL = range(3)
_BITS = 64  # of one number that is sent


class PlainNumbers:
    """Those of `model`. losses: functions that may set some. group: the replicas, in order of their chunks. names: of the
    attributes, with the paths of their modules."""

    def __init__(self, model: nn.Module, losses: Iterable[Callable[..., Any]], group: Group) -> None:
        self._group = group
        places = list(_places(model, losses))
        self._places = [(module, name) for _, module, name in places]
        self.names = [f"{path}.{name}" if path else name for path, _, name in places]
        self._start: list[Any] | None = None  # before the step, once a chunk of it has begun
        self._latest: dict[
            int, Any
        ] = {}  # number of a place -> what the last chunk made of it that changed it
        self._sent = 0  # bytes
        self._resumed: set[str] = set()  # from a checkpoint, and left alone since
        self._changed: set[str] = set()  # by some step of this run, on any replica

    @contextmanager
    def chunk(self) -> Iterator[None]:
        """Around one chunk's forward; this replica's in order."""
        self.put_back()
        yield
        for number, ((module, name), before) in enumerate(zip(self._places, self._start or (), strict=True)):
            now = vars(module).get(name)
            if type(now) in (int, float) and (type(now) is not type(before) or now != before):
                self._latest[number] = now

    def put_back(self) -> None:
        """As they were before the step."""
        if self._start is None:
            self._start = self._now()
        self._put(self._start)

    def finish(self) -> Steps[None]:
        """After the step's last chunk."""
        if not self._places:
            return
        self.put_back()
        rows = [_encoded(self._latest.get(number)) for number in range(len(self._places))]
        mine = torch.tensor(rows, dtype=torch.int64)
        everyone = mine[None]
        if self._group.size > 1:
            everyone = mine.new_empty(self._group.size, *mine.shape)
            work = self._group.all_gather(everyone.view(-1), mine.view(-1))
            self._sent += mine.nbytes
            yield
            work.wait()
        for replica in everyone.tolist():
            for (module, name), path, row in zip(self._places, self.names, replica, strict=True):
                if row[0] != _UNCHANGED:
                    vars(module)[name] = _decoded(*row)
                    self._changed.add(path)
        self._start, self._latest = None, {}

    def changed(self) -> Iterator[tuple[str, float, bool]]:
        """Between steps, those that steps have changed: name with the path of the module, value, and whether only steps before a
        checkpoint have."""
        for (module, name), path in zip(self._places, self.names, strict=True):
            if path in self._changed or path in self._resumed:
                yield path, vars(module)[name], path not in self._changed

    def resume(self, values: Mapping[str, float]) -> None:
        """Before the first step: those of a checkpoint, by name."""
        for (module, name), path in zip(self._places, self.names, strict=True):
            if path in values:
                vars(module)[name] = values[path]
                self._resumed.add(path)

    def expected_bytes(self) -> ExpectedBytes:
        """Bytes so far."""
        return ExpectedBytes(so_far=Traffic.along("dp", all_gather=self._sent))

    def _now(self) -> list[Any]:
        return [vars(module).get(name) for module, name in self._places]

    def _put(self, values: list[Any]) -> None:
        for (module, name), value in zip(self._places, values, strict=True):
            if vars(module).get(name) is not value:
                vars(module)[name] = value


def _places(model: nn.Module, losses: Iterable[Callable[..., Any]]) -> Iterator[Place]:
    """Attributes that hold numbers, of names that code of the model's classes, but for constructors, or of the losses sets."""
    names = {name for kind in set(map(type, model.modules())) for name in names_set(kind)}
    for loss in losses:
        while isinstance(loss, partial):
            loss = loss.func
        function = getattr(loss, "__func__", loss)
        if isinstance(function, FunctionType):
            names |= set(set_by(function.__code__))
    for path, module in model.named_modules() if names else ():
        for name, value in vars(module).items():
            if name in names and type(value) in (int, float):
                yield path, module, name


def _encoded(value: float | None) -> tuple[int, int, int]:
    """What it is, and up to 128 bits of it, as two signed numbers. Raises `TrainingError` for more.

    >>> [_decoded(*_encoded(each)) for each in (3, -2.5, 2**64 - 1, -(2**100))], _encoded(None)
    ([3, -2.5, 18446744073709551615, -1267650600228229401496703205376], (0, 0, 0))
    """
    if value is None:
        return _UNCHANGED, 0, 0
    if isinstance(value, int):
        high, low = divmod(value, 1 << _BITS)
        if not -(1 << _BITS - 1) <= high < 1 << _BITS - 1:
            raise TrainingError(
                f"A forward sets an attribute to a whole number of {value.bit_length()} bits, and replicas send each other at most {2 * _BITS - 1}. "
                "Keep it as a tensor in a buffer, or as several numbers."
            )
        return _WHOLE, _signed(low), high
    return _REAL, struct.unpack("<q", struct.pack("<d", value))[0], 0


def _decoded(kind: int, low: int, high: int) -> float:
    if kind == _WHOLE:
        return (high << _BITS) + low % (1 << _BITS)
    return struct.unpack("<d", struct.pack("<q", low))[0]


def _signed(low: int) -> int:
    return low - (1 << _BITS) if low >= 1 << _BITS - 1 else low
