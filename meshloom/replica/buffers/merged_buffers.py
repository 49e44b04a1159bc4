"""Buffers stay equal on all replicas: every chunk reads them as the step found them, and writes are merged.

Each replica reduces its chunks to one map per buffer, b -> decay * b + added; the maps are gathered once a
step and applied in chunk order on every replica, in the same arithmetic, so that the results have the same
bits. Of running statistics and other linear recurrences that is what one device has that runs all chunks in
order; for the others see docs/buffers.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from meshloom.comm.group import Group
from meshloom.comm.steps import Steps
from meshloom.core.device.readback import Readback, Readbacks, on_device
from meshloom.core.units import plural
from meshloom.program.ir.nodes import is_within
from meshloom.program.ir.written_parameters import named_buffers, writes_norms
from meshloom.replica.buffers.chunk_writes import ChunkWrites
from meshloom.replica.buffers.norm_statistics import NormStatistics, norm_buffers, tracks
from meshloom.replica.buffers.recurrence import Unite
from meshloom.telemetry.traffic import ExpectedBytes, Traffic

RULE = "what the chunks write is merged in their order (docs/buffers.md)."


class RunningStatistics:
    """The buffers of `model` over a training step.

    group: the replicas, in chunk order: replica r runs chunks r * m to r * m + m - 1; None: there is one.
    With one chunk a step (several=False) there is nothing to do; without any buffers nothing is communicated.
    One replica's running statistics follow each other by themselves. synchronised: microbatch j of all
    replicas is one chunk, and batch norm layers see to their own statistics.
    changing: where a program runs instead of the layers' own forwards, the buffers that it changes, and the
        only ones here. followed: those of them that only follow each other (running statistics). opaque: the paths of
        modules whose own forwards the program runs. compiled: layers' forwards are compiled.
    unite: among ranks that compute a chunk together (`find_recurrences`).
    rerunning: the context in which chunks run again once all have run; all replicas enter it together.
    """

    def __init__(
        self, model: nn.Module, group: Group | None, *, several: bool = True, synchronised: bool = False,
        changing: Collection[str] | None = None, followed: Collection[str] = (), opaque: Collection[str] = (),
        compiled: bool = False, unite: Unite = lambda flags: flags, rerunning: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:  # fmt: skip
        self._group = group if group is not None and group.size > 1 else None
        # where a loss copies running statistics (a teacher's), layers do not see to their own
        alone = not writes_norms(model)
        replaced = not synchronised and changing is None and alone

        def is_opaque(name: str) -> bool:
            return any(is_within(name, path) for path in opaque)

        layers = [
            (name, module)
            for name, module in model.named_modules()
            if tracks(module) and (replaced or (alone and is_opaque(name)))
        ]
        own = [module for module in model.modules() if isinstance(module, _BatchNorm)] if synchronised else []
        self._norms = NormStatistics(layers if self._group else [], compiled=compiled)
        handled = norm_buffers([module for _, module in layers] + own)
        if changing is not None and not self._group and alone:
            changing = {each for each in changing if each not in followed or is_opaque(each)}
        here = (
            [name for name, each in named_buffers(model) if not each.is_meta] if changing is not None else []
        )
        perhaps = [name for name in here if name not in followed and is_opaque(name)]
        self._others = ChunkWrites(
            model, handled, joined=synchronised, changing=changing, perhaps=perhaps, unite=unite
        )
        self._active = several and self._norms.length + self._others.length > 0
        self._rerunning = rerunning
        self._moving = 0  # elements gathered in the last step because some buffer changed
        self._notes: list[str] = []
        self._noted: set[str] = set()
        tensors = (*model.buffers(), *model.parameters())
        self._device = next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))
        self._readbacks = Readbacks(self._device)
        self._evaluated: Readback | None = None

    @contextmanager
    def chunk(self, rerun: Callable[[], Any] | None = None) -> Iterator[None]:
        """Around one chunk's forward and backward; this replica's chunks in order.

        rerun: runs the chunk's forward again with the same random draws and returns the loss. Called a few
        times when a buffer other than running statistics first changes. Without it that is no recurrence.
        """
        if not self._active:
            yield
            return
        # The layers' own forward is back in place when a chunk is run again, and what it changes is put back
        # with the other buffers.
        with self._others.collecting(rerun), self._norms.collecting():
            yield

    def finish(self) -> Steps[None]:
        """After the step's last chunk: bring every replica's buffers to one device's values."""
        if not self._active:
            return
        self._note_evaluated()  # of the step before
        facts = on_device(self._others.facts(), torch.int64, self._device)
        statistics = self._norms.take().to(self._device).view(torch.int64)
        parts = yield from self._gather(torch.cat([statistics, facts]))
        split = self._norms.length
        if split:
            with torch.no_grad():
                headers = self._norms.apply(parts[:, :split].contiguous().view(torch.float64))
            self._evaluated = self._readbacks.read(headers)
            if not self._evaluated.waits:
                self._note_evaluated()
        read = self._others.agree(parts[:, split:].tolist() if self._others.length else [])
        if read:
            more = f" and {len(read) - 3} more" if len(read) > 3 else ""
            names = f"{plural('buffer', len(read))} {', '.join(read[:3])}{more}"
            them = "it" if len(read) == 1 else "them"
            self._note(f"Every chunk of a step reads {names} as the step found {them}; {RULE}")
        self._moving = self._others.moving_length
        maps = parts[:, :0]
        if self._moving:
            with self._rerunning() if self._others.runs_again else nullcontext():
                mine = self._others.take()
            maps = yield from self._gather(mine)
        if reshaped := self._others.reshaped:
            shapes = yield from self._gather(reshaped.shapes(self._device))
            values = yield from self._gather(reshaped.values(shapes))
            reshaped.put(shapes, values)
            self._moving += shapes.shape[1] + values.shape[1]
        for name in self._others.apply(maps):
            self._note(
                f"Buffer {name} depends on the samples, and with sync_batch_norm each replica has seen a part of the chunk's: the last replica's "
                "value is kept."
            )

    def take_notes(self) -> list[str]:
        """What the user should be told, each once; empties the list. What layers did in a step on a GPU is told after the
        next one: nobody waits for it."""
        notes, self._notes = self._notes, []
        return notes

    def expected_bytes(self) -> ExpectedBytes:
        """Of `finish`, given the buffers that changed in the last step."""
        if not self._active or self._group is None:
            return ExpectedBytes()
        length = self._norms.length + self._others.length + self._moving
        return ExpectedBytes(per_step=Traffic.along("dp", all_gather=8 * length))

    def _gather(self, part: Tensor) -> Steps[Tensor]:
        """All replicas' `part` [n], as [replicas, n]."""
        if self._group is None:
            return part.view(1, -1)
        everyone = part.new_empty(self._group.size * len(part))
        work = self._group.all_gather(everyone, part)
        yield
        work.wait()
        return everyone.view(self._group.size, -1)

    def _note_evaluated(self) -> None:
        headers, self._evaluated = self._evaluated, None
        for name in self._norms.evaluated(headers.values()) if headers else ():
            self._note(
                f"{name} ran in evaluation mode within a training step, where it reads running statistics of before the step, "
                "not of the chunk before."
            )

    def _note(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self._notes.append(text)
