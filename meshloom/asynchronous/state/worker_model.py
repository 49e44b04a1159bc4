"""The model of a worker: it takes the servers' values; its gradient is split for them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from meshloom.asynchronous.protocol.worker import Computed
from meshloom.asynchronous.state.division import divide_over_servers, needs_whole
from meshloom.core.errors import TrainingError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.data.chunks import Chunk
from meshloom.exchange.exchange import Slice
from meshloom.optimizer.clipping import sum_of_squares
from meshloom.parameters.model import trainable
from meshloom.replica.step_checks import check_limited


class WorkerModel:
    """whole: whether servers hold whole parameters only. division: the slices that each server holds."""

    def __init__(self, job: Job, plan: Plan, model: nn.Module) -> None:
        self.model = model
        check_limited(model, plan)
        named = trainable(model)
        self.whole = needs_whole(job, named, plan.servers)
        self.division = divide_over_servers(named, plan.servers, whole=self.whole)
        self._clips = job.clip_grad_norm is not None
        self._device = next(model.parameters()).device

    def load(self, values: Sequence[Sequence[Tensor]], buffers: Mapping[str, Tensor]) -> None:
        """Take parameters from all servers' slices (in order of servers), and buffers by name."""
        for slices, given in zip(self.division, values, strict=True):
            for slice_, value in zip(slices, given, strict=True):
                slice_.data().copy_(value)
        for name, buffer in self.model.named_buffers():
            buffer.copy_(buffers[name])

    def computed(
        self, worker: int, chunks: Sequence[Chunk], gradients: Mapping[str, Tensor | None],
        changes: Mapping[str, Tensor], loss: float,
    ) -> Computed:  # fmt: skip
        """What is pushed.

        gradients: of every trainable parameter by name; None was not used. changes: of buffers, by name.
        Raises `TrainingError` if a gradient is not finite: its push would make all parameters so.
        """
        norm = float(sum_of_squares(list(gradients.values()), self._device).sqrt())
        if not math.isfinite(norm):
            named = ((name, each) for name, each in gradients.items() if each is not None)
            if broken := [name for name, each in named if not bool(each.isfinite().all())]:
                raise TrainingError(
                    f"The gradient of worker {worker}'s share of batch {chunks[0].step} is not finite, although its loss is {loss:g}: first that of {broken[0]}. "
                    "It was not pushed. Look at what the loss does there (a root or a norm of 0, a division, an overflow), or at this share."
                )

        def part(of: Slice) -> Tensor | None:
            gradient = gradients[of.name]
            return None if gradient is None else gradient.reshape(-1)[of.start : of.stop]

        return Computed(
            gradients=[[part(each) for each in slices] for slices in self.division],
            changes=dict(changes),
            loss=loss,
            norm=norm if self._clips else math.nan,
        )
