"""One device that runs the plan's chunks one after another, as a plain loop: what a plan is held against.

It shares no code with the exchange, the trainer or the optimizer path; the cutting of batches, the reading of
samples and
the order of an epoch's batches are written here a second time. For each step:

    read the global batch, cut it into dp * m chunks          (with synchronised batch statistics: m chunks, see `chunks_of_plan.py`)
    for each chunk: buffers as the step found them, seed, loss of the chunk, backward of its sum
    buffers = what the chunks wrote, merged in their order (`merging.py`)
    gradient = sum / total weight;  clip;  optimizer step;  scheduler step
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SparseAdam
from torch.optim.lr_scheduler import ReduceLROnPlateau

from meshloom.core.compiled import named_as_written
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.random import model_seed, preserved_draws, seed_everything
from meshloom.verify.reference.chunk_run import ChunkRun, RanChunk
from meshloom.verify.reference.chunks_of_plan import ReferenceShare, shares_of
from meshloom.verify.reference.merging import Merging
from meshloom.verify.reference.mistakes import thin
from meshloom.verify.reference.observers import CastWatch, ModuleWatch
from meshloom.verify.reference.other_precision import convert_model, default_dtype, most_precise
from meshloom.verify.reference.samples_of_epoch import read_batches
from meshloom.verify.reference.step_records import Cast, ChunkRecord, StepRecord
from meshloom.verify.reference.wide_blocks import norm_of_all

Gradients = dict[str, Tensor | None]


class Reference:
    """One device's training run, a step at a time.

    The last step can be run again in other ways until the next one (`reruns.py`).
    dtype: run in this precision instead of the job's own.
    shares: (first step, shares of the replicas from there on), in order, where a plan's shares change during
        the run.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        shares: Sequence[tuple[int, Sequence[int]]] = (),
    ) -> None:
        self.job = job
        self.plan = plan
        self.dtype = dtype
        self._recorded_shares = shares
        self.device = torch.device(device)
        with preserved_draws():
            seed_everything(model_seed(job.seed))
            self.model = convert_model(named_as_written(job.model()), self.device, dtype)
            if not self.model.training:  # handed over in evaluation mode as a whole
                self.model.train()
            # modules that the job keeps in evaluation mode stay so
            self._modes = [(module, module.training) for module in self.model.modules()]
            built = job.optimizer([each for each in self.model.named_parameters() if each[1].requires_grad])
            self._optimizers = _list_of(built)
            self._schedulers = _list_of(job.scheduler(built)) if job.scheduler else []
            self._batches = read_batches(job)
        self.parameters: dict[str, nn.Parameter] = dict(self.model.named_parameters())
        self._merging = Merging(self.model)
        self.precision = most_precise(self.model)
        self._watch = ModuleWatch(self.model)
        self._chunk_run = ChunkRun(job, self.model, self.device, dtype, self._watch)
        self._casts = CastWatch(self.precision, self._watch)
        self.number = -1  # of the last step
        self.samples: list[Any] = []
        self.chunks: list[ChunkRecord] = []
        self._loss_sum = self._weight = 0.0
        # buffers, and parameters that are not trained, as the last step found them
        self._found: dict[str, Tensor] = {}
        self.before: dict[str, Tensor] = {}  # parameters before the last update, until the next step

    @property
    def gradients(self) -> Gradients:
        """Of every trainable parameter after `run`, averaged: the model's own, not copies."""
        return {
            name: parameter.grad for name, parameter in self.parameters.items() if parameter.requires_grad
        }

    @property
    def loss(self) -> float:
        """Of the last step's global batch."""
        return self._loss_sum / self._weight

    @property
    def casts(self) -> tuple[Cast, ...]:
        """Reductions of precision in the newest `run`."""
        return self._casts.casts

    def run(self) -> None:
        """The first half of a step: forward and backward of all chunks; afterwards `gradients` has the
        average. Raises `DataError` when there is no data."""
        with preserved_draws(), self._watch.attached():
            self.samples = next(self._batches)
            self.number += 1
            for module, training in self._modes:
                module.training = training
            self.before = {}
            self._found = {name: value.detach().clone() for name, value in self._untrained()}
            self._casts = CastWatch(self.precision, self._watch)
            self.chunks = []
            self._loss_sum = self._weight = 0.0
            self.model.zero_grad(set_to_none=True)
            start = self._merging.now()
            wrote: list[tuple[ReferenceShare, dict[str, Tensor]]] = []
            for share in self.shares():
                self._merging.put(start)
                ran = self.run_share(share)
                wrote.append((share, self._merging.now(start)))
                self._loss_sum, self._weight = self._loss_sum + ran.loss_sum, self._weight + ran.weight
                self.chunks += self.records(share, ran)
            self.divide(self._weight)
            self._merging.put(self._merging.merge(start, wrote, self._buffers_after))

    def take_gradient(self, name: str, gradient: Tensor | None) -> None:
        """Go on with this gradient in place of its own, which it equals up to rounding."""
        parameter = self.parameters[name]
        if parameter.grad is not None and gradient is not None:
            if parameter.grad.is_sparse:
                parameter.grad = gradient.detach().to(parameter.device, parameter.dtype, copy=True)
            else:
                parameter.grad.copy_(gradient.to_dense())

    def take_parameter(self, name: str, value: Tensor) -> None:
        """Go on with this value in place of its own, which it equals up to rounding."""
        self.parameters[name].detach().copy_(value)

    def update(self) -> StepRecord:
        """The second half: clip, optimizer, scheduler; the record of the whole step."""
        gradients = thin(self.gradients)
        self.before = {
            name: self._found[name] if name in self._found else each.detach().clone()
            for name, each in self.parameters.items()
        }
        # of those that were taken over, so that it is the norm that is compared, and not once more the
        # gradients
        norm = norm_of_all(self.gradients)
        if self.job.clip_grad_norm is not None:
            _clip(self.model, self.job.clip_grad_norm, norm)
        casts = list(self._casts.casts)
        with preserved_draws(), default_dtype(self.dtype):
            for optimizer in self._optimizers:
                casts += _step(optimizer, self.precision)
            for scheduler in self._schedulers:
                scheduler.step(self.loss) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()
        self.model.zero_grad(set_to_none=True)
        return StepRecord(
            step=self.number,
            loss=self.loss,
            weight=self._weight,
            gradient_norm=norm,
            gradients=gradients,
            chunks=self.chunks,
            casts=tuple(dict.fromkeys(casts)),
        )

    def shares(self, synchronised: bool = True) -> Iterator[ReferenceShare]:
        """Of the last step's batch."""
        changed = [shares for first, shares in self._recorded_shares if first <= self.number]
        return shares_of(self.plan, self.samples, changed[-1] if changed else None, synchronised)

    def run_share(self, share: ReferenceShare) -> RanChunk:
        """Forward and backward of a chunk of the last step; gradients add up."""
        return self._chunk_run.run(share, self.number, self._casts)

    def records(self, share: ReferenceShare, ran: RanChunk) -> Iterator[ChunkRecord]:
        """One record per chunk of the plan that `share` has."""
        return self._chunk_run.records(share, ran, self.number)

    def _buffers_after(self, share: ReferenceShare, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a chunk makes of other buffers; nothing else is changed by it."""
        going_on = {name: value.detach().clone() for name, value in self.model.named_buffers()}
        gradients = [(parameter, parameter.grad) for parameter in self.model.parameters()]
        self._merging.put(buffers)
        self.model.zero_grad(set_to_none=True)
        try:
            self.run_share(share)
            return self._merging.now()
        finally:
            with torch.no_grad():
                for name, value in self.model.named_buffers():
                    if name in going_on and value.shape == going_on[name].shape:
                        value.copy_(going_on[name])
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def divide(self, weight: float) -> None:
        """Gradients become averages."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                average = parameter.grad / weight
                parameter.grad = average.coalesce() if average.is_sparse else average  # each row once

    def _untrained(self) -> Iterator[tuple[str, Tensor]]:
        """What a forward may change: buffers, and parameters that no optimizer does (a teacher's)."""
        yield from (
            (name, parameter)
            for name, parameter in self.model.named_parameters()
            if not parameter.requires_grad
        )
        yield from self.model.named_buffers()

    def restore(self) -> None:
        """Buffers, and parameters that are not trained, are as the last step found them."""
        with torch.no_grad():
            for name, value in self._untrained():
                value.copy_(self._found[name])

    @contextmanager
    def again(self) -> Iterator[Gradients]:
        """Inside, all is as before the last step's forward, and the gradients that it came to are set aside;
        afterwards all is as it was."""
        after = {name: value.detach().clone() for name, value in self._untrained()}
        gradients = self.gradients
        with preserved_draws(), self._watch.attached():
            try:
                self.restore()
                self.model.zero_grad(set_to_none=True)
                yield gradients
            finally:
                with torch.no_grad():
                    for name, value in self._untrained():
                        value.copy_(after[name])
                for name, gradient in gradients.items():
                    self.parameters[name].grad = gradient


def _list_of(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]


def _clip(model: nn.Module, limit: float, norm: float) -> None:
    """As torch.nn.utils.clip_grad_norm_ does."""
    factor = min(1.0, limit / (norm + 1e-6))
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * factor


def _step(optimizer: torch.optim.Optimizer, precision: torch.dtype) -> tuple[Cast, ...]:
    """What the optimizer reduces the precision of."""
    # the others compute the same from dense gradients, if they take sparse ones at all
    if not isinstance(optimizer, SparseAdam):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()
    with CastWatch(precision, optimizer=type(optimizer).__name__) as watch:
        optimizer.step()
    return watch.casts
