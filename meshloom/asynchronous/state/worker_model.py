"""The model on which workers compute the gradient of a share, at the parameters that they were given.

Simulated workers share one model: each share begins with all parameters and buffers as they were given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from meshloom.asynchronous.protocol.worker import Computed
from meshloom.asynchronous.state.division import divide_over_servers, needs_whole
from meshloom.asynchronous.state.parameters import changes_of
from meshloom.comm.steps import run_in_steps
from meshloom.core.errors import DataError, TrainingError
from meshloom.core.job import Job, as_sum
from meshloom.core.modes import Modes
from meshloom.core.plan import Plan
from meshloom.core.random import KeyedDraws, chunk_seed, seed_everything
from meshloom.data.data import Chunk, to_device
from meshloom.exchange.alone import Alone
from meshloom.exchange.exchange import Slice
from meshloom.optimizer.clipping import sum_of_squares
from meshloom.parameters.model import build_model, trainable
from meshloom.replica.buffers.merged_buffers import RunningStatistics
from meshloom.replica.loss_sums import LossSums
from meshloom.replica.metrics import MetricSums
from meshloom.replica.not_finite import find_not_finite
from meshloom.replica.trial_evaluation import naming


class Computing(Protocol):
    """On what a worker computes: `WorkerReplica`, or several ranks (`worker_team.py`)."""

    @property
    def model(self) -> torch.nn.Module: ...
    @property
    def division(self) -> Sequence[Sequence[Slice]]: ...
    def load(self, values: Sequence[Sequence[Tensor]], buffers: Mapping[str, Tensor]) -> None: ...
    def compute(self, worker: int, chunks: Sequence[Chunk]) -> Computed: ...
    def evaluate(self, chunks: Iterable[Chunk]) -> dict[str, float]: ...


class WorkerReplica:
    """model: the job's. whole: whether servers hold whole parameters only."""

    def __init__(self, job: Job, plan: Plan, device: torch.device, dtype: torch.dtype | None) -> None:
        self.model = build_model(job, device, dtype)
        self._modes = Modes(self.model)
        self._job = job
        self._plan = plan
        self._device = device
        self._dtype = dtype
        named = trainable(self.model)
        self.whole = needs_whole(job, named, plan.servers)
        self.division = divide_over_servers(named, plan.servers, whole=self.whole)
        self._names = [name for name, _ in named]
        self._gradients = Alone(named)
        self._tally = LossSums(device)
        self._statistics = RunningStatistics(self.model, None, several=plan.microbatches > 1)

    def load(self, values: Sequence[Sequence[Tensor]], buffers: Mapping[str, Tensor]) -> None:
        """Take parameters from all servers' slices (in order of servers), and buffers by name."""
        for slices, given in zip(self.division, values, strict=True):
            for slice_, value in zip(slices, given, strict=True):
                slice_.data().copy_(value)
        for name, buffer in self.model.named_buffers():
            buffer.copy_(buffers[name])

    def compute(self, worker: int, chunks: Sequence[Chunk]) -> Computed:
        """Mean gradient of a share at what was loaded. Raises `TrainingError` if its loss is no number."""
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self._gradients.begin_step()
        self._tally.begin()
        for chunk in chunks:
            data = self._data(chunk)
            with ExitStack() as around:
                around.enter_context(self._modes.training())
                around.enter_context(self._statistics.chunk(partial(self._again, chunk)))
                self._begin(chunk, around)
                root, _, _ = self._tally.add(self._job.loss(self.model, data), chunk)
                root.backward()
        run_in_steps([self._statistics.finish()])
        total, weight, divisor = self._tally.result(chunks[0].batch)
        self._check_finite(worker, chunks, total, weight)
        gradients = run_in_steps([self._gradients.finish(divisor)])[0]
        computed = self.computed(
            worker,
            chunks,
            dict(zip(self._names, gradients, strict=True)),
            changes_of(before, dict(self.model.named_buffers())),
            total / weight,
        )
        self._gradients.begin_step()  # what was computed belongs to the push now
        return computed

    def computed(
        self,
        worker: int,
        chunks: Sequence[Chunk],
        gradients: Mapping[str, Tensor | None],
        changes: Mapping[str, Tensor],
        loss: float,
    ) -> Computed:
        """What is pushed. gradients: of every trainable parameter by name, None was not used. changes: of
        buffers, by name.

        Raises `TrainingError` if a gradient is no number: with it one push would make the parameters of all
        workers so.
        """
        norm = float(sum_of_squares(list(gradients.values()), self._device).sqrt())
        if not math.isfinite(norm):
            broken = [
                name
                for name, each in gradients.items()
                if each is not None and not bool(each.isfinite().all())
            ]
            if broken:
                raise TrainingError(
                    f"The gradient of {_share(worker, chunks)} is not finite, although its loss is {loss:g}: first that of {broken[0]}. It was not pushed. "
                    "Look at what the loss does there (a root or a norm of 0, a division, an overflow), or at this share."
                )
        return Computed(
            gradients=[
                [self._cut(gradients[each.name], each.start, each.stop) for each in slices]
                for slices in self.division
            ],
            changes=dict(changes),
            loss=loss,
            norm=norm if self._job.clip_grad_norm is not None else math.nan,
        )

    def evaluate(self, chunks: Iterable[Chunk]) -> dict[str, float]:
        """Mean of every metric over the chunks, in evaluation mode, at what was loaded."""
        assert self._job.evaluate
        metrics = self._job.evaluate.metrics
        sums = MetricSums(metrics, self._device)
        with self._modes.evaluation(), torch.no_grad():
            for chunk in chunks:
                data = self._data(chunk)
                for name, metric in metrics.items():
                    with naming(name):
                        sums.add(name, chunk, metric(self.model, data))
        return sums.means()

    @staticmethod
    def _cut(gradient: Tensor | None, start: int, stop: int) -> Tensor | None:
        return None if gradient is None else gradient.reshape(-1)[start:stop]

    def _begin(self, chunk: Chunk, around: ExitStack) -> None:
        seed_everything(chunk_seed(self._job.seed, chunk.step, chunk.index))
        if self._plan.keyed_draws:
            around.enter_context(KeyedDraws())

    def _data(self, chunk: Chunk) -> object:
        return to_device(chunk.data, self._device, self._dtype)

    def _again(self, chunk: Chunk) -> Tensor:
        with ExitStack() as around:
            self._begin(chunk, around)
            return as_sum(self._job.loss(self.model, self._data(chunk)), chunk.samples, needs_gradient=False)[
                0
            ]

    def _check_finite(self, worker: int, chunks: Sequence[Chunk], total: float, weight: float) -> None:
        share = _share(worker, chunks)
        if math.isfinite(total) and weight > 0:
            return
        if math.isfinite(total):
            raise DataError(
                f"The weights of {share} sum to {weight:g}, so there is no mean loss. Leave out samples without anything to average over."
            )
        if broken := next(
            (name for name, each in self.model.named_parameters() if not bool(each.isfinite().all())), None
        ):
            raise TrainingError(
                f"The loss of {share} is {total / weight if weight else math.nan:g}, because an update before it has made {broken} infinite or no number. "
                "Lower the learning rate, or clip gradients."
            )
        where = (
            find_not_finite(self.model, chunks, partial(self._again)) or "the sum over all chunks overflowed"
        )
        raise TrainingError(
            f"The loss of {share} is {total / weight if weight else math.nan:g}: {where}. Lower the learning rate, clip gradients, or look at this share."
        )


def _share(worker: int, chunks: Sequence[Chunk]) -> str:
    return f"worker {worker}'s share of batch {chunks[0].step}"
