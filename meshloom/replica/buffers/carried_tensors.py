"""Tensors that a forward leaves in plain attributes for the next one: the hidden state of a recurrent layer that is trained
over consecutive parts of long sequences, a memory of earlier segments.

    out, hidden = self.rnn(x, self.hidden)
    self.hidden = hidden.detach()

Chunk k of a step finds what chunk k of the step before has left (docs/buffers.md), so that rows of a batch go on with
their own state, under every plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from meshloom.core.modules.carried_attributes import carrying_places, is_carried

_ABSENT = object()


class CarriedTensors:
    """Those of `model`."""

    def __init__(self, model: nn.Module) -> None:
        self._places = carrying_places(model)
        self._initial = [vars(module).get(name, _ABSENT) for _, module, name in self._places]
        # chunk -> what it found in this step, and what it has left
        self._found: dict[int, list[Any]] = {}
        self._left: dict[int, list[Any]] = {}

    @contextmanager
    def chunk(self, index: int) -> Iterator[None]:
        """Around a forward of chunk `index`."""
        if not self._places:
            yield
            return
        self.put_back(index)
        yield
        before = self._found.get(index, self._initial)
        now = [vars(module).get(name, _ABSENT) for _, module, name in self._places]
        self._left[index] = [new if is_carried(new) else old for new, old in zip(now, before, strict=True)]

    def put_back(self, index: int) -> None:
        """As the chunk found them in this step."""
        self._put(self._found.get(index, self._initial))

    def finish(self) -> None:
        """After the step's last chunk. What is not a chunk of a step finds them as they were before the first one."""
        self._found |= self._left
        self._left = {}
        self.clear()

    def clear(self) -> None:
        """As before the first step."""
        self._put(self._initial)

    def _put(self, values: list[Any]) -> None:
        for (_, module, name), value in zip(self._places, values, strict=True):
            now = vars(module).get(name, _ABSENT)
            if now is value or not (now is _ABSENT or is_carried(now)):
                continue  # numbers, texts and others are not carried
            if value is _ABSENT:
                del vars(module)[name]
            else:
                vars(module)[name] = value
