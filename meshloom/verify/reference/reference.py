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

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SparseAdam
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import default_collate

from meshloom.core.compiled import named_as_written
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.random import KeyedDraws, chunk_seed, derive, model_seed, preserved_draws, seed_everything
from meshloom.verify.reference.chunks_of_plan import ReferenceShare, as_sum, shares_of
from meshloom.verify.reference.merging import Merging
from meshloom.verify.reference.mistakes import ChunkGradients, Evidence, thin
from meshloom.verify.reference.observers import CastWatch, ModuleWatch, digest_values
from meshloom.verify.reference.other_precision import convert, convert_model, default_dtype, most_precise
from meshloom.verify.reference.samples_of_epoch import read_batches
from meshloom.verify.reference.step_records import Cast, ChunkRecord, ModuleOutput, StepRecord
from meshloom.verify.reference.wide_blocks import apart, norm_of_all

Gradients = dict[str, Tensor | None]

# By how many units in the last place parameters are moved to see what rounding does. A sum of thousands of
# products is off by several; and an event that rounding brings about once in a run, a relu that flips, is met
# often enough to be measured. In half precisions products are summed in float32, which leaves the last
# rounding.
_UNITS = {torch.float64: 16, torch.float32: 16, torch.float16: 2, torch.bfloat16: 2}


@dataclass(frozen=True, kw_only=True)
class _Ran:
    loss_sum: float
    weight: float
    seed: int
    draws: tuple[str, ...]
    modules: tuple[ModuleOutput, ...]


class Reference:
    """One device's training run, a step at a time.

    The last step can be run again in other ways (`evidence`, `whole_batch`) until the next one.
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
            named = [
                (name, parameter)
                for name, parameter in self.model.named_parameters()
                if parameter.requires_grad
            ]
            built = job.optimizer(named)
            self._optimizers = list(built) if isinstance(built, list | tuple) else [built]
            schedulers = job.scheduler(built) if job.scheduler else []
            self._schedulers = list(schedulers) if isinstance(schedulers, list | tuple) else [schedulers]
            self._batches = read_batches(job)
        self.parameters: dict[str, nn.Parameter] = dict(self.model.named_parameters())
        self._merging = Merging(self.model)
        self.precision = most_precise(self.model)
        self._watch = ModuleWatch(self.model)
        self._casts = CastWatch(self.precision, self._watch)
        self._number = -1  # of the last step
        self._samples: list[Any] = []
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
    def number(self) -> int:
        """Of the last step."""
        return self._number

    @property
    def loss(self) -> float:
        """Of the last step's global batch."""
        return self._loss_sum / self._weight

    @property
    def tied(self) -> dict[str, list[str]]:
        """Parameters that the module holds under several names: first name -> the others."""
        first: dict[int, str] = {}
        tied: dict[str, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if (known := first.setdefault(id(parameter), name)) != name:
                tied.setdefault(known, []).append(name)
        return tied

    @property
    def casts(self) -> tuple[Cast, ...]:
        """Reductions of precision in the newest `run`."""
        return self._casts.casts

    def run(self) -> None:
        """The first half of a step: forward and backward of all chunks; afterwards `gradients` has the
        average. Raises `DataError` when there is no data."""
        with preserved_draws(), self._watch.attached():
            self._samples = next(self._batches)
            self._number += 1
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
            for share in self._shares():
                self._merging.put(start)
                ran = self._run(share)
                wrote.append((share, self._merging.now(start)))
                self._loss_sum, self._weight = self._loss_sum + ran.loss_sum, self._weight + ran.weight
                self.chunks += self._chunk_records(share, ran)
            self._divide(self._weight)
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
            # as torch.nn.utils.clip_grad_norm_ does
            factor = min(1.0, self.job.clip_grad_norm / (norm + 1e-6))
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad * factor
        casts = list(self._casts.casts)
        with preserved_draws(), default_dtype(self.dtype):
            for optimizer in self._optimizers:
                # the others compute the same from dense gradients, if they take sparse ones at all
                if not isinstance(optimizer, SparseAdam):
                    _make_dense(optimizer)
                with CastWatch(self.precision, optimizer=type(optimizer).__name__) as in_optimizer:
                    optimizer.step()
                casts += in_optimizer.casts
            for scheduler in self._schedulers:
                scheduler.step(self.loss) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()
        self.model.zero_grad(set_to_none=True)
        return StepRecord(
            step=self._number,
            loss=self.loss,
            weight=self._weight,
            gradient_norm=norm,
            gradients=gradients,
            chunks=self.chunks,
            casts=tuple(dict.fromkeys(casts)),
        )

    @contextmanager
    def whole_batch(self) -> Iterator[tuple[Gradients, StepRecord]]:
        """Between `run` and `update`, the step's batch as one chunk: the averaged gradients by chunks, and
        the record of it, while `gradients` are its own."""
        with self._again() as chunked:
            share = ReferenceShare(key=0, samples=self._samples, members=[(0, self._samples)])
            ran = self._run(share)
            self._divide(ran.weight)
            yield (
                chunked,
                StepRecord(
                    step=self._number,
                    loss=ran.loss_sum / ran.weight,
                    weight=ran.weight,
                    gradient_norm=None,
                    gradients={},
                    chunks=list(self._chunk_records(share, ran)),
                ),
            )

    def moved(self) -> dict[str, float]:
        """Between `run` and `update`, by name, how far the averaged gradients go when the parameters are
        moved at random by some units of rounding.

        The step once more: ||gradient where each element of a parameter is w (1 + u), |u| <= units * eps  -  gradient||, eps that of the
        least precise values in the model. Rounding errors are such moves, as far as what comes of them can
        tell (backward error analysis).
        """
        with self._again() as own, self._moved_parameters():
            weight = 0.0
            for share in self._shares():
                self._restore()
                weight += self._run(share).weight
            self._divide(weight)
            return {
                name: apart(there, here)
                for name, there in self.gradients.items()
                if there is not None and (here := own[name]) is not None
            }

    @contextmanager
    def _moved_parameters(self) -> Iterator[None]:
        """Trainable parameters are moved inside, and as they were afterwards."""
        low = [dtype for cast in self.casts if isinstance(dtype := getattr(torch, cast.dtype), torch.dtype)]
        farthest = max(_UNITS.get(dtype, 1) * torch.finfo(dtype).eps for dtype in (self.precision, *low))
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        kept = [parameter.detach().clone() for parameter in trained]
        generator = torch.Generator(self.device).manual_seed(derive(self.job.seed, "moved", self._number))
        try:
            with torch.no_grad():
                for parameter in trained:
                    flat = torch.view_as_real(parameter) if parameter.is_complex() else parameter
                    moves = torch.empty(
                        flat.shape,
                        dtype=torch.float32 if flat.element_size() < 4 else flat.dtype,
                        device=flat.device,
                    )
                    flat.copy_(moves.uniform_(-farthest, farthest, generator=generator).add_(1).mul_(flat))
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(trained, kept, strict=True):
                    parameter.copy_(value)

    def facts(self, norms: Mapping[str, float], previous: Gradients | None = None) -> Evidence:
        """What is known without running anything again. norms: of the step's averaged gradients. previous:
        those of the step before, thinned."""
        return Evidence(
            plan=self.plan, norms=norms, previous=previous, tied=self.tied, clip=self.job.clip_grad_norm
        )

    def evidence(self, facts: Evidence) -> Evidence:
        """Between `run` and `update`, the step again, chunk by chunk and in ways that would be wrong, to find
        out what another run did."""
        chunks: list[ChunkGradients] = []
        chunk_norms: list[float] = []
        replica_norms: dict[int, float] = {}
        sums: dict[str, Tensor] = {}
        with self._again():
            for share in self._shares():
                self._restore()
                self.model.zero_grad(set_to_none=True)
                ran = self._run(share)
                gradients = self.gradients
                indices = [index for index, _ in share.members]
                chunks.append(ChunkGradients(chunks=indices, weight=ran.weight, gradients=thin(gradients)))
                if facts.clip is None:
                    continue
                chunk_norms.append(norm_of_all(gradients))
                replica = indices[0] // self.plan.microbatches
                before = sums if replica in replica_norms else {}  # chunks of a replica follow each other
                sums = {
                    name: before[name] + each if name in before else each
                    for name, each in gradients.items()
                    if each is not None
                }
                replica_norms[replica] = norm_of_all(sums)
        has_buffers = next(self.model.buffers(), None) is not None
        return replace(
            facts,
            chunks=chunks,
            chunk_norms=chunk_norms,
            replica_norms=replica_norms,
            unsynchronised=self.gradients_of(synchronised=False) if self.plan.sync_batch_norm else None,
            chained=self.gradients_of(chained=True) if has_buffers and self.plan.num_chunks > 1 else None,
        )

    def gradients_of(self, *, synchronised: bool = True, chained: bool = False) -> Gradients:
        """The step's averaged gradients, thinned, computed in a way that would be wrong; between `run` and
        `update`.

        synchronised=False: batch statistics of each replica's own samples, whatever the plan says.
        chained: every chunk of a replica reads the buffers that the one before wrote, instead of those of
            before the step.
        """
        m = self.plan.microbatches
        with self._again():
            weight, replica = 0.0, -1
            for share in self._shares(synchronised):
                if not chained or share.members[0][0] // m != replica:
                    replica = share.members[0][0] // m
                    self._restore()
                weight += self._run(share).weight
            self._divide(weight)
            return thin(self.gradients)

    def _shares(self, synchronised: bool = True) -> Iterator[ReferenceShare]:
        """Of the last step's batch."""
        changed = [shares for first, shares in self._recorded_shares if first <= self._number]
        return shares_of(self.plan, self._samples, changed[-1] if changed else None, synchronised)

    def _run(self, share: ReferenceShare) -> _Ran:
        batch = convert(self._collate(share.samples, share.key), self.device, self.dtype)
        seed_everything(chunk_seed(self.job.seed, self._number, share.key))
        draws: list[str] = []
        started_with = torch.initial_seed()
        self._watch.start()
        # Around backward too: checkpointing runs forwards again there, on both sides, and must draw the same.
        with default_dtype(self.dtype), self._casts, KeyedDraws(share.rows, draws):
            loss_sum, weight = as_sum(self.job.loss(self.model, batch), len(share.samples))
            loss_sum.backward()
        modules = self._watch.stop()
        return _Ran(
            loss_sum=float(loss_sum.detach()),
            weight=float(weight),
            seed=started_with,
            draws=tuple(draws),
            modules=modules,
        )

    def _buffers_after(self, share: ReferenceShare, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a chunk makes of other buffers; nothing else is changed by it."""
        going_on = {name: value.detach().clone() for name, value in self.model.named_buffers()}
        gradients = [(parameter, parameter.grad) for parameter in self.model.parameters()]
        self._merging.put(buffers)
        self.model.zero_grad(set_to_none=True)
        try:
            self._run(share)
            return self._merging.now()
        finally:
            with torch.no_grad():
                for name, value in self.model.named_buffers():
                    if name in going_on and value.shape == going_on[name].shape:
                        value.copy_(going_on[name])
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def _chunk_records(self, share: ReferenceShare, ran: _Ran) -> Iterator[ChunkRecord]:
        """One record per chunk of the plan; the first of those that share a forward carries its loss, draws
        and modules."""
        for index, samples in share.members:
            first = index == share.members[0][0]
            yield ChunkRecord(
                index=index,
                samples=len(samples),
                weight=ran.weight if first else 0.0,
                loss_sum=ran.loss_sum if first else 0.0,
                data=digest_values(self._collate(samples, index)),
                seed=ran.seed,
                draws=ran.draws if first else (),
                modules=ran.modules if first else (),
            )

    def _collate(self, samples: Sequence[Any], index: int) -> Any:
        with preserved_draws():
            seed_everything(derive(self.job.seed, "collate", self._number, index))
            return (self.job.collate or default_collate)(list(samples))

    def _divide(self, weight: float) -> None:
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

    def _restore(self) -> None:
        with torch.no_grad():
            for name, value in self._untrained():
                value.copy_(self._found[name])

    @contextmanager
    def _again(self) -> Iterator[Gradients]:
        """Inside, all is as before the last step's forward, and the gradients that it came to are set aside;
        afterwards all is as it was."""
        after = {name: value.detach().clone() for name, value in self._untrained()}
        gradients = self.gradients
        with preserved_draws(), self._watch.attached():
            try:
                self._restore()
                self.model.zero_grad(set_to_none=True)
                yield gradients
            finally:
                with torch.no_grad():
                    for name, value in self._untrained():
                        value.copy_(after[name])
                for name, gradient in gradients.items():
                    self.parameters[name].grad = gradient


def _make_dense(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
