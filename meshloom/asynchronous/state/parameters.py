"""The state of a server: its slices of the parameters, with the job's optimizer and scheduler over them.

Clipping needs the norm of the whole gradient. The worker, which has all of it, sends that norm with the push,
so all servers scale by the same factor. Server 0 also holds the buffers: integers (counters) add up; of all
others the value of the newest push counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meshloom.asynchronous.state.division import divide_over_servers
from meshloom.checkpoint.checkpoint import Piece
from meshloom.comm.simulated import simulated_groups
from meshloom.core.exchange_refusals import check_averages
from meshloom.core.job import Job
from meshloom.exchange.exchange import Ownership
from meshloom.optimizer.updater import Updater
from meshloom.optimizer.user_optimizer import make_optimizers
from meshloom.parameters.file_weights import fill_from_files
from meshloom.parameters.model import build_model
from meshloom.parameters.sparse_parameters import refuse_sparse_adam


@dataclass(frozen=True, kw_only=True)
class Content:
    """A server's part of a snapshot.

    values: of each of its slices, flat. buffers: by name, of server 0. read, shapes, settings: the
    optimizer's state, as `Updater.load` takes it. pieces: the same state, to be saved.
    """

    values: Sequence[Tensor]
    buffers: Mapping[str, Tensor]
    read: Callable[[str, int, int], Tensor]
    shapes: Mapping[str, Sequence[int]]
    settings: Any
    pieces: Sequence[Piece] = ()

    @staticmethod
    def of_pieces(
        *, values: Sequence[Tensor], buffers: Mapping[str, Tensor], settings: Any, pieces: Sequence[Piece]
    ) -> Content:
        """A content whose optimizer state is read from its saved pieces, one of each key."""
        kept = {each.key: each for each in pieces}
        return Content(
            values=values,
            buffers=buffers,
            read=lambda key, start, stop: kept[key].tensor[start - kept[key].start : stop - kept[key].start],
            shapes={key: each.shape for key, each in kept.items()},
            settings=settings,
            pieces=pieces,
        )


class Parameters:
    """The holdings of server `number` of `num_servers`.

    whole: as for `divide_over_servers`. content: of a snapshot; None: as the job builds it.
    """

    def __init__(
        self, job: Job, number: int, num_servers: int, *, whole: bool, device: torch.device,
        dtype: torch.dtype | None, content: Content | None,
    ) -> None:  # fmt: skip
        self.model = model = build_model(job, device, dtype)
        self._notes: Sequence[str] = ()
        if weights := fill_from_files(job, model):
            self._notes = weights.notes if number == 0 else ()
        named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        self._clip = job.clip_grad_norm
        self._slices = divide_over_servers(named, num_servers, whole=whole)[number]
        self._alone = simulated_groups(1)[0]
        here = {each.name for each in self._slices}
        user = make_optimizers(job, named)
        if user.average is not None:
            check_averages("async", "")
        refuse_sparse_adam(user.optimizers, "in messages of exchange=async")
        self._updater = Updater(
            replace(job, clip_grad_norm=None),  # see `_scale`
            named,
            Ownership(owned=self._slices, owners=self._alone if num_servers > 1 else None),
            local=[(name, each) for name, each in named if name in here],
            user=user,
        )
        self._first = number == 0
        buffers = model.named_buffers() if self._first else ()
        self._buffers = {name: buffer.clone() for name, buffer in buffers}
        if content is not None:
            for slice_, value in zip(self._slices, content.values, strict=True):
                slice_.data().copy_(value)
            for name, buffer in self._buffers.items():
                buffer.copy_(content.buffers[name])
            self._updater.state.load(content.read, content.shapes, content.settings)

    def apply(
        self, gradients: Sequence[Tensor | None], changes: Mapping[str, Tensor] | None, *, loss: float,
        norm: float, rate: float,
    ) -> None:  # fmt: skip
        """One update. gradients: of each slice, flat, scaled in place; None was not used."""
        if self._clip is not None:
            _scale(gradients, norm, self._clip)
        self._updater.update(gradients, loss, rate=rate)
        for name, change in (changes or {}).items():
            buffer = self._buffers[name]
            buffer.add_(change) if _counts(buffer) else buffer.copy_(change)

    def values(self) -> tuple[list[Tensor], dict[str, Tensor] | None]:
        """Copies of each slice and of the buffers, to be sent."""
        buffers = {name: each.clone() for name, each in self._buffers.items()}
        return [each.data().clone() for each in self._slices], buffers if self._first else None

    def snapshot(self) -> Content:
        """A copy of all state."""
        values, buffers = self.values()
        pieces, settings = self._updater.state.save(self_contained=True)
        kept = [replace(each, tensor=each.tensor.clone()) for each in pieces]
        return Content.of_pieces(values=values, buffers=buffers or {}, settings=settings, pieces=kept)

    def notes(self) -> list[str]:
        """What the user should know before the first update."""
        return [*self._notes, *self._updater.notes()]

    def learning_rates(self) -> list[float]:
        """Of every group of every optimizer that has one."""
        return self._updater.learning_rates()


def changes_of(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The buffers that a share has changed: differences of integers, new values of the others."""
    return {
        name: each - before[name] if _counts(each) else each.clone()
        for name, each in after.items()
        if not torch.equal(each, before[name])
    }


def _counts(buffer: Tensor) -> bool:
    return not buffer.is_floating_point() and not buffer.is_complex() and buffer.dtype != torch.bool


def _scale(gradients: Sequence[Tensor | None], norm: float, largest: float) -> None:
    """Scale as `clip` does in a synchronous step: by largest / (norm + 1e-6), at most 1."""
    factor = (largest / (torch.tensor(norm, dtype=torch.float64) + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        if gradient is not None:
            gradient.mul_(factor)
