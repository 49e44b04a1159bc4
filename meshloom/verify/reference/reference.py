"""The reference: one device that runs the plan's chunks one after another, as a plain loop.

It shares no code with the exchange, the trainer or the optimizer path; splitting of batches, reading of
samples and the order of an epoch's batches are implemented here a second time. For each step:

    read the global batch, split it into dp * m chunks        (with synchronised batch statistics: m forwards, see `chunks_of_plan.py`)
    for each chunk: buffers as at the start of the step, seed, loss of the chunk, backward of its sum
    buffers = what the chunks wrote, merged in chunk order (`reference_buffers.py`)
    gradient = sum / total weight;  clip;  optimizer step;  scheduler step        (with a loss scale: `masters.py`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from meshloom.core.job import Job
from meshloom.core.moments.numerics import rounded_products
from meshloom.core.plan import Plan
from meshloom.core.random import preserved_draws
from meshloom.parameters.values.keyed_init import call_model
from meshloom.verify.reference.chunk_run import ChunkRun
from meshloom.verify.reference.chunks_of_plan import ReferenceForward, forwards_of
from meshloom.verify.reference.float64_blocks import norm_of_all, subsample_each
from meshloom.verify.reference.from_files import seed_model, with_hooks, with_values
from meshloom.verify.reference.masters import ReferenceMasters, ReferenceScale
from meshloom.verify.reference.observers import CastWatch, ModuleWatch
from meshloom.verify.reference.other_precision import convert_model, default_dtype, most_precise
from meshloom.verify.reference.reference_buffers import Buffers, ReferenceBuffers
from meshloom.verify.reference.reference_optimizers import densify_gradients, made_by, needs_closure, rows_of
from meshloom.verify.reference.samples_of_epoch import read_batches
from meshloom.verify.reference.state_before import StateBefore, same
from meshloom.verify.reference.step_records import Cast, ChunkRecord, StepRecord, settings_of

Gradients = dict[str, Tensor | None]


class Reference:
    """A training run on one device, step by step.

    Until the next step, the last one can be rerun in other ways (`reruns.py`).
    dtype: the precision to run in instead of the job's own.
    shares: (first step, shares of the replicas from that step on), in order, if they change during the run.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        shares: Sequence[tuple[int, Sequence[int]]] = (),
    ) -> None:
        self.job, self.plan, self.dtype = job, plan, dtype
        self._recorded_shares, self.device = shares, torch.device(device)
        with preserved_draws():
            seed_model(job.seed)
            self.model = with_values(convert_model(with_hooks(call_model(job)), self.device, dtype), job)
            if not self.model.training:  # the job returns the whole model in evaluation mode
                self.model.train()
            self.updated = ReferenceMasters(self.model, "" if dtype else plan.precision)
            # single modules in evaluation mode stay in it
            self._modes = [(module, module.training) for module in self.model.modules()]
            self.optimizers, self.schedulers, self.by_metric, self.decay = made_by(job, self.updated.all)
            self._batches_left = enumerate(read_batches(job))
        self.parameters: dict[str, nn.Parameter] = dict(self.model.named_parameters())
        self.buffers = ReferenceBuffers(job, self.model)
        self.precision = most_precise(self.parameters.values())
        self._watch = ModuleWatch(self.model)
        self._casts = CastWatch(self.precision, self._watch)
        self.scale = ReferenceScale(plan)
        self.chunk_run = ChunkRun(
            job, plan, self.model, self.device, dtype, dtype or self.updated.dtype, self._watch, self.scale
        )
        self.autocast = self.chunk_run.autocast
        self.step = -1  # the last one
        self.samples, self.chunks = list[Any](), list[ChunkRecord]()
        self._loss_sum = self._weight = 0.0
        self._start = StateBefore(self.model)  # of the last step
        self.before: dict[str, Tensor] = {}  # parameters before the last update, until the next step
        self.averages: dict[str, Tensor] = {}  # in float64, by name of the parameter, if the job has any

    @property
    def gradients(self) -> Gradients:
        """The averaged gradient of every trainable parameter after `run`: the model's own, not copies."""
        return {name: each.grad for name, each in self.parameters.items() if each.requires_grad}

    @property
    def loss(self) -> float:
        """The mean loss of the last step's global batch."""
        return self._loss_sum / self._weight

    @property
    def casts(self) -> tuple[Cast, ...]:
        """Reductions of precision in the last `run`, and of float32 wherever it is multiplied, by torch's settings."""
        rounded = rounded_products(self.device) if self.precision == torch.float32 else ()
        names = {str(each).removeprefix("torch.") for each in rounded if each}
        return *self._casts.casts, *(
            Cast(place="", dtype=each, in_optimizer=False, in_products=True) for each in sorted(names)
        )

    def run(self) -> None:
        """The first half of a step: forward and backward of all chunks, after which `gradients` are the average. Raises `DataError` if there is no data."""
        with preserved_draws(), self._watch.attached():
            self.step, self.samples = next(self._batches_left)
            for module, training in self._modes:
                module.training = training
            self.before = {}
            self._start = StateBefore(self.model)
            self._casts = CastWatch(self.precision, self._watch)
            self._loss_sum, self._weight, self.chunks = self.evaluate()
            self.scale.look(self.gradients.values())

    def evaluate(
        self, forwards: Iterable[ReferenceForward] | None = None, *, watched: bool = True
    ) -> tuple[float, float, list[ChunkRecord]]:
        """Forward and backward of all chunks, in their order, or of these: loss, weight, and a record of each chunk if it is watched."""
        chunks: list[ChunkRecord] = []
        loss = weight = 0.0
        self.model.zero_grad(set_to_none=True)
        start = self.buffers.snapshot()
        if forwards is None:  # else they gather what they did in the step
            self.chunk_run.together.rows = None
        ends: list[Buffers] = []
        for forward in self.forwards() if forwards is None else forwards:
            self.buffers.load(start)
            result = self.run_forward(forward, watched=watched)
            ends.append(self.buffers.snapshot(start))
            loss, weight = loss + result.loss_sum, weight + result.weight
            chunks += self.chunk_run.records(forward, result, self.step) if watched else ()
        self.divide(weight)
        self.buffers.load(self.buffers.merge(start, ends))
        return loss, weight, chunks

    def go_to(self, step: int) -> None:
        """The next step is the one of this number; parameters, optimizers and schedules are as they are."""
        self._batches_left = enumerate(read_batches(self.job, step), step)

    def replace_gradient(self, name: str, gradient: Tensor | None) -> None:
        """Continue with this gradient in place of its own, which it equals up to rounding."""
        parameter = self.parameters[name]
        if parameter.grad is not None and gradient is not None:
            if parameter.grad.is_sparse:
                parameter.grad = rows_of(gradient, parameter.grad).to(parameter.dtype, copy=True)
            else:
                parameter.grad.copy_(gradient.to_dense())

    def update(self) -> StepRecord:
        """The second half: clip, optimizer, scheduler. Returns the record of the whole step."""
        gradients = subsample_each(self.gradients)
        start = self._start.tensors  # of what forwards may change
        self.before = {
            name: start[name] if name in start else each.detach().clone()
            for name, each in self.updated.all.items()
        }
        # Of the replaced gradients: this compares the norms alone, not the gradients a second time.
        norm = None if self.scale.overflowed else norm_of_all(self.gradients)
        self.updated.take_gradients()
        if self.job.clip_grad_norm is not None and norm is not None:
            _clip(self.updated.all, self.job.clip_grad_norm, norm)
        casts = list(self.casts)
        with preserved_draws(), default_dtype(self.dtype):
            casts += [] if self.scale.overflowed else _step_all(self)
        self.updated.round()
        self.model.zero_grad(set_to_none=True)
        self.scale.end()
        return StepRecord(
            step=self.step, loss=self.loss, weight=self._weight, gradient_norm=norm, gradients=gradients, chunks=self.chunks,
            casts=tuple(dict.fromkeys(casts)), skipped=self.scale.overflowed,
            settings=[settings_of(self.optimizers, [*self.schedulers, *self.by_metric])]
        )  # fmt: skip

    def average(self) -> None:
        """After an update, and what replaces its parameters: average = decay * average + (1 - decay) * parameter."""
        if self.decay is None or self.scale.overflowed:
            return
        for name, each in self.parameters.items():
            if each.requires_grad and name in self.averages:  # in place: it may be a large embedding
                self.averages[name].mul_(self.decay).add_(each.detach(), alpha=1 - self.decay)
            elif each.requires_grad:
                self.averages[name] = each.detach().to(torch.float64, copy=True)

    def forwards(self, synchronised: bool = True) -> Iterator[ReferenceForward]:
        """The forwards of the last step's batch."""
        return forwards_of(self.plan, self.samples, self.shares_now, synchronised)

    @property
    def shares_now(self) -> Sequence[int] | None:
        """Of the replicas in the last step; None: the plan's."""
        return next((each for first, each in reversed(self._recorded_shares) if first <= self.step), None)

    def run_forward(self, forward: ReferenceForward, *, watched: bool = True) -> ChunkRecord:
        """Forward and backward of the last step's `forward`; gradients accumulate. watched: whether casts are noted."""

        def run(each: ReferenceForward, watched: bool) -> ChunkRecord:
            return self.chunk_run.run(each, self.step, self._casts if watched else None, len(self.samples))

        forwards = partial(self.forwards, forward.rows is None)
        return self.chunk_run.together.run(run, forward, watched, forwards)

    def divide(self, weight: float) -> None:
        """Turn what forwards have accumulated into averages, of a weight of 1 into gradient sums."""
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                average = parameter.grad / (weight / self.chunk_run.divisor * self.scale.value)
                parameter.grad = average.coalesce() if average.is_sparse else average  # each row once

    def again(self, forwards: Iterable[ReferenceForward]) -> Iterator[tuple[ReferenceForward, ChunkRecord]]:
        """Each of these in a rerun, with the state before the last step; gradients accumulate."""
        for forward in forwards:
            self._start.put_back()
            yield forward, self.run_forward(forward, watched=False)

    @contextmanager
    def rerun(self) -> Iterator[Gradients]:
        """A context with the state before the last step's forward, and its gradients set aside; the state
        after the step is restored at the end."""
        after, gradients = StateBefore(self.model), self.gradients
        rows = self.chunk_run.together.rows
        with preserved_draws(), self._watch.attached():
            try:
                self._start.put_back()
                self.model.zero_grad(set_to_none=True)
                yield gradients
            finally:
                after.put_back()
                self.chunk_run.together.rows = rows
                for name, gradient in gradients.items():
                    self.parameters[name].grad = gradient


def replace_value(reference: Reference, name: str, value: Tensor) -> None:
    """Continue with this value of a parameter or buffer in place of the reference's."""
    if name in reference.parameters:
        reference.updated.replace(name, value)
    else:
        reference.model.get_buffer(name).detach().copy_(value)


@contextmanager
def watching(reference: Reference) -> Iterator[None]:
    """A context in which single forwards of the last step's chunks may be run, and nothing is restored but draws."""
    with preserved_draws(), reference._watch.attached():  # pyright: ignore[reportPrivateUsage]
        yield


def changed_buffers(reference: Reference) -> dict[str, Tensor]:
    """Copies of the floating-point buffers that the last step has changed."""
    before = reference._start.tensors  # pyright: ignore[reportPrivateUsage]
    return {
        name: each.detach().clone()
        for name, each in reference.model.named_buffers()
        if (each.is_floating_point() or each.is_complex())
        and not (name in before and same(each, before[name]))
    }


def _clip(parameters: Mapping[str, nn.Parameter], limit: float, norm: float) -> None:
    """As torch.nn.utils.clip_grad_norm_ does."""
    factor = min(1.0, limit / (norm + 1e-6))
    for parameter in parameters.values():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * factor


def _closure_of(reference: Reference) -> Callable[[], float]:
    """What LBFGS calls for the loss: the step's, whose gradients are there, then those of its chunks once more."""
    first = [reference.loss]

    def closure() -> float:
        if first:
            return first.pop()
        loss, weight, _ = reference.evaluate(watched=False)
        limit = reference.job.clip_grad_norm
        if limit is not None:
            _clip(reference.parameters, limit, norm_of_all(reference.gradients))
        return loss / weight

    return closure


def _step_all(reference: Reference) -> list[Cast]:
    """The optimizers and schedulers; the casts in the former."""
    casts: list[Cast] = []
    for optimizer in reference.optimizers:
        densify_gradients(optimizer)
        with CastWatch(
            most_precise(reference.updated.all.values()), optimizer=type(optimizer).__name__
        ) as watch:
            optimizer.step(_closure_of(reference)) if needs_closure(optimizer) else optimizer.step()
        casts += watch.casts
    for scheduler in reference.schedulers:
        scheduler.step(reference.loss) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()
    return casts
