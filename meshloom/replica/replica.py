"""One rank's training step: its chunks forward and backward, the exchange, the update.

The step is a generator: where it waits for other ranks it yields, so that a process runs it to its end and
simulated ranks run
it in lockstep (`comm/steps.py`). Backward runs on the *sum* of each chunk's loss, which is divided once, by
the weight of the
whole global batch, so uneven and empty shares keep the exact mean: before backward where all ranks know that
weight (means over samples), else by `Exchange.finish`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from meshloom.comm.objects import collect
from meshloom.comm.steps import Steps
from meshloom.core.errors import DataError, TrainingError
from meshloom.data.data import Chunk
from meshloom.exchange.exchange import Give
from meshloom.parameters.model import state_of
from meshloom.pipeline.schedules.spans import SpanKind
from meshloom.replica.metrics import MetricSums
from meshloom.replica.saved_replica import SavedReplica
from meshloom.replica.trial_evaluation import naming


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """What a step came to before its update.

    of_owned: gradient of each slice that the exchange owns here; None was not used. loss: mean over the
        global batch. weight: of it. samples: in it.
    """

    step: int
    samples: int
    of_owned: list[Tensor | None]
    loss: float
    weight: float


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step came to: loss (mean over the global batch), its weight, its samples, the gradient's norm if
    clipping is on.

    stopping: whether some rank was asked to stop; the same on all.
    """

    step: int
    loss: float
    weight: float
    samples: int
    gradient_norm: float | None
    stopping: bool = False


class Replica(SavedReplica):
    """How a rank takes part in the steps and evaluations of its replica."""

    def step(self, step: int, chunks: Sequence[Chunk]) -> Steps[StepResult]:
        """Train on this replica's chunks of global batch `step`."""
        return (yield from self.update((yield from self.gradients(step, chunks))))

    def gradients(self, step: int, chunks: Sequence[Chunk]) -> Steps[Gradients]:
        """Forward and backward of this replica's chunks of global batch `step`, and the exchange. Buffers
        change, parameters do not."""
        self._check_frozen()
        if self.pace:
            self.pace.begin()
        self.exchange.begin_step()
        self._tally.begin(self.stop_requests)
        doing = self.seat.activity
        doing.enter("preparing", step)
        filled = [chunk for chunk in chunks if chunk.samples]
        with self._modes.training():
            yield from self.engine.run(filled, self.scope, self._tally, self.recorder)
        doing.enter("exchanging", step)
        if self.pace:
            self.pace.end(sum(chunk.samples for chunk in filled))
        self.arrivals.append(time.monotonic())
        yield
        self._tally.wait()
        if self.stop_requests is not None:
            yield from self.engine.add_up("tp", self._tally.sums[4:])
        total, weight, divisor = self._tally.result(chunks[0].batch)
        if self.exchange.independent:
            divisor = self._tally.own_divisor(chunks[0].batch)
        with self._span("exchange"):
            gradients = yield from self.exchange.finish(divisor)
        yield from self._check_finite(step, filled, total, weight)
        yield from self.scope.finish()
        return Gradients(
            step=step, samples=chunks[0].batch, of_owned=gradients, loss=total / weight, weight=weight
        )

    def update(self, found: Gradients) -> Steps[StepResult]:
        """The second half of a step: clip, update, and make the new parameters known."""
        step, doing = found.step, self.seat.activity
        doing.enter("updating", step)
        self._updating = True  # until all ranks have updated
        with self._span("update"):
            norm = yield from self.updater.update(found.of_owned, found.loss)
        with self._span("exchange"):
            yield from self.exchange.publish()
            if (yield from self.exchange.settle(early=False)):
                self.updater.forget()
            yield from self.engine.refresh_borrowed()
        self._updating = False
        doing.enter("between steps", step + 1)
        return StepResult(
            step=step,
            loss=found.loss,
            weight=found.weight,
            samples=found.samples,
            gradient_norm=norm,
            stopping=self._tally.stopping,
        )

    def evaluate(self, chunks: Iterable[Chunk]) -> Steps[dict[str, float]]:
        """Mean of every metric over all replicas' chunks, in evaluation mode.

        Within a round of local steps it is the mean of the replicas' parameters that is evaluated; afterwards
        each goes on from its own.
        """
        if self.exchange.settled:
            return (yield from self._evaluate(chunks))
        put_back = yield from self.exchange.show_mean()
        try:
            yield from self.engine.refresh_borrowed()
            values = yield from self._evaluate(chunks)
        finally:
            put_back()
        yield from self.engine.refresh_borrowed()
        return values

    def each_gradient(self, found: Gradients, take: Callable[[str, Tensor | None], None]) -> Steps[None]:
        """Hand `take` the averaged gradient of every trainable parameter, whole, one after another: all of
        them on the replica's first rank."""

        def mine(give: Give) -> Steps[None]:
            yield from self.exchange.each_gradient(found.of_owned, give)

        yield from self.engine.gather(mine, take)

    def whole_gradients(self, found: Gradients) -> Steps[dict[str, Tensor | None]]:
        """The same at once, by name, in the model's order."""
        whole: dict[str, Tensor | None] = {}
        yield from self.each_gradient(found, whole.__setitem__)
        return {name: whole[name] for name in state_of(self.model) if name in whole}

    def _evaluate(self, chunks: Iterable[Chunk]) -> Steps[dict[str, float]]:
        assert self.job.evaluate
        metrics = self.job.evaluate.metrics
        tally = MetricSums(metrics, self.seat.device)
        with self._modes.evaluation(), torch.no_grad():
            for chunk in chunks:
                if not chunk.samples:
                    continue
                data = self.scope.data(chunk)
                for name, metric in metrics.items():
                    with naming(name):
                        yield from self.engine.evaluate(data, metric, partial(tally.add, name, chunk))
        yield from self.engine.add_up("pp", tally.sums)
        if self.plan.dp > 1:
            work = self.replicas.all_reduce(tally.sums)
            yield
            work.wait()
        return tally.means()

    def _span(self, kind: SpanKind) -> AbstractContextManager[None]:
        return self.recorder.span(kind) if self.recorder else nullcontext()

    def _check_frozen(self) -> None:
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise TrainingError(
                    f"{name} was frozen when the Trainer was built and now has requires_grad=True. Build a new Trainer after unfreezing."
                )

    def _check_finite(self, step: int, chunks: Sequence[Chunk], total: float, weight: float) -> Steps[None]:
        """Raise the same error on all ranks when the loss of the global batch is no number."""
        if math.isfinite(total) and weight > 0:
            return
        if math.isfinite(total):
            raise DataError(
                f"The weights of all chunks of step {step} sum to {weight:g}, so there is no mean loss. Leave out batches without anything to average over."
            )
        here = yield from self.engine.locate_nan(chunks, self.scope)
        found = yield from collect(self.seat.world, here)
        _, rank, where = min(
            ((each[0], rank, each[1]) for rank, each in enumerate(found) if each),
            default=(0, 0, "the sum over all chunks overflowed"),
        )
        raise TrainingError(
            f"The loss of step {step} is {total / weight if weight else math.nan:g}: rank {rank}, {where}. The parameters were not updated; "
            "lower the learning rate, clip gradients, or look at this batch."
        )
