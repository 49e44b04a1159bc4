"""Buffers stay equal on all replicas, and equal to those of one device that runs all replicas' chunks in order.

Running statistics of normalisation layers and other buffers that a training forward changes are linear recurrences. Each replica
reduces its chunks to one map per buffer, running -> decay * running + added; the maps are gathered once a step and
applied in chunk order on every replica, in the same arithmetic, so that the results have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from meshloom.comm.group import Group
from meshloom.comm.turns import Steps
from meshloom.state.norm_statistics import NormStatistics, norm_buffers, tracks
from meshloom.state.recurrence import Recurrences


class RunningStatistics:
    """The buffers of `model` over a training step.

    group: the replicas, in chunk order: replica r runs chunks r * m to r * m + m - 1. With one replica there is nothing to do; without any
    buffers nothing is communicated.
    synchronised: microbatch j of all replicas is one chunk, and batch norm layers see to their own statistics.
    changing: where a program runs instead of the layers' own forwards, the buffers that it changes, and the only ones here: running statistics are
        followed like the others.
    """

    def __init__(self, model: nn.Module, group: Group, *, synchronised: bool = False, changing: Collection[str] | None = None) -> None:
        self._group = group
        layers = [(name, module) for name, module in model.named_modules() if tracks(module) and not synchronised and changing is None]
        own = [module for module in model.modules() if isinstance(module, _BatchNorm)] if synchronised else []
        self._norms = NormStatistics(layers)
        self._others = Recurrences(model, norm_buffers([module for _, module in layers] + own), joined=synchronised, changing=changing)
        self._active = group.size > 1 and self._norms.length + self._others.length > 0
        self._moving = 0  # elements gathered in the last step because some buffer changed
        self._notes: list[str] = []
        self._noted: set[str] = set()
        tensors = (*model.buffers(), *model.parameters())
        self._device = next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))

    @contextmanager
    def chunk(self, again: Callable[[], Any] | None = None) -> Iterator[None]:
        """Around one chunk's forward and backward; this replica's chunks in order.

        again: runs the chunk's forward anew, with the draws seeded alike, and returns the loss. Called (under no_grad, a few times) when
        a buffer other than running statistics is first seen to change. Without it such a buffer counts as order-dependent.
        """
        if not self._active:
            yield
            return
        # The layers' own forward is back in place when a chunk is run again, and what it changes is put back with the other buffers.
        with self._others.collecting(again), self._norms.collecting():
            yield

    def finish(self) -> Steps[None]:
        """After the step's last chunk: bring every replica's buffers to one device's values."""
        if not self._active:
            return
        facts = torch.tensor(self._others.facts(), dtype=torch.int64, device=self._device)
        parts = yield from self._gather(torch.cat([self._norms.take().to(self._device).view(torch.int64), facts]))
        split = self._norms.length
        with torch.no_grad():
            for name in self._norms.apply(parts[:, :split].contiguous().view(torch.float64)):
                self._note(
                    f"{name} ran in evaluation mode within a training step, where it reads running statistics of before the step, "
                    "not of the chunk before."
                )
        self._others.agree(parts[:, split:].tolist())
        self._moving = self._others.moving_length
        maps = parts[:, :0]
        if self._moving:
            maps = yield from self._gather(self._others.take())
        for name in self._others.apply(maps):
            self._note(
                f"Buffer {name} depends on the order of the chunks (the loss or another buffer reads it, or it is not updated linearly), so several "
                "replicas cannot compute what one device does. The last replica's value is kept."
            )

    def take_notes(self) -> list[str]:
        """What the user should be told, each once; empties the list."""
        notes, self._notes = self._notes, []
        return notes

    def bytes_per_step(self) -> dict[str, int]:
        """Bytes that `finish` hands to all_gather, given the buffers that changed in the last step."""
        return {"all_gather": 8 * (self._norms.length + self._others.length + self._moving)} if self._active else {}

    def _gather(self, part: Tensor) -> Steps[Tensor]:
        """All replicas' `part` [n], as [replicas, n]."""
        everyone = part.new_empty(self._group.size * len(part))
        work = self._group.all_gather(everyone, part)
        yield
        work.wait()
        return everyone.view(self._group.size, -1)

    def _note(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self._notes.append(text)
