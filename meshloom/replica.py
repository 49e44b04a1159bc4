"""One rank's training step: its chunks forward and backward, the exchange, the update.

The step is a generator: where it waits for other ranks it yields, so that a process runs it to its end and simulated ranks run
it in lockstep (`comm/turns.py`). Backward runs on the *sum* of each chunk's loss, which is divided once, by the weight of the
whole global batch, so uneven and empty shares keep the exact mean: before backward where all ranks know that weight (means over
samples), else by `Exchange.finish`.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshloom.comm.group import Group
from meshloom.comm.record import RecordedGroup
from meshloom.comm.turns import Steps
from meshloom.comm.values import agree, collect, on_first
from meshloom.errors import DataError, JobError, TrainingError
from meshloom.exchange.all_reduce import AllReduce
from meshloom.exchange.alone import Alone
from meshloom.exchange.batch_norm import bytes_per_chunk, synchronise_batch_norm
from meshloom.exchange.exchange import Exchange
from meshloom.exchange.zero import ZeroOne
from meshloom.graph.division import Division
from meshloom.graph.landing import InPlace
from meshloom.graph.pieces import place
from meshloom.job import Job, LossFunction
from meshloom.loss import as_sum
from meshloom.mesh import Axis, Place
from meshloom.plan import Plan, chunk_sizes
from meshloom.random import KeyedDraws, Rows, chunk_seed, seed_everything
from meshloom.state.buffers import RunningStatistics
from meshloom.state.checkpoint import Piece
from meshloom.state.data import Chunk, to_device
from meshloom.state.digest import digest
from meshloom.state.model import build_model, copy_from_first, facts, state_of
from meshloom.state.not_finite import watch_finite
from meshloom.state.optimizer import Updater
from meshloom.state.samples import first_batches
from meshloom.state.shards import Shards


class Seat(Protocol):
    """Where a replica sits: its number and coordinates, its device, and the groups it talks in."""

    @property
    def rank(self) -> int: ...
    @property
    def place(self) -> Place: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def groups(self) -> Mapping[Axis, RecordedGroup]: ...
    @property
    def statistics(self) -> RecordedGroup: ...  # the ranks along dp again; for what is exchanged inside forward and backward
    @property
    def world(self) -> Group: ...  # all ranks, CPU tensors; for decisions and reports, not counted as traffic of the plan
    @property
    def team(self) -> Group | None: ...  # the ranks along tp, likewise, if there are several
    @property
    def readers(self) -> Group: ...  # the ranks along dp, likewise


class Observer(Protocol):
    """Who looks on while a step runs (verification does)."""

    def watch(self, chunk: Chunk, model: nn.Module) -> AbstractContextManager[list[str] | None]:
        """Entered around a chunk's forward and backward; yields a list to receive the digests of its random draws."""
        ...

    def chunk_done(self, chunk: Chunk, weight: float, loss_sum: float) -> None:
        """A chunk went forward and backward."""
        ...

    def averaged(self, gradients: dict[str, Tensor | None]) -> None:
        """The averaged gradient of every parameter, whole, before clipping."""
        ...


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step came to: loss (mean over the global batch), its weight, its samples, the gradient's norm if clipping is on."""

    step: int
    loss: float
    weight: float
    samples: int
    gradient_norm: float | None


class Replica:
    """A model on one rank, and how it takes part in a step."""

    def __init__(self, job: Job, plan: Plan, seat: Seat, *, dtype: torch.dtype | None = None) -> None:
        self.job = job
        self.plan = plan
        self.seat = seat
        self.dtype = dtype
        self.replicas = seat.groups["dp"]
        self.observer: Observer | None = None
        self.arrivals: deque[float] = deque(maxlen=1000)  # when each of the newest steps had nothing left to compute before the exchange
        self.model = build_model(job, seat.device, dtype)
        self.named = [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        self._frozen = [(name, parameter) for name, parameter in self.model.named_parameters() if not parameter.requires_grad]
        if not self.named:
            raise JobError("The model has no trainable parameters: every parameter has requires_grad=False, or there are none.")
        self._undo = ExitStack()
        if plan.sync_batch_norm and plan.dp > 1:
            self._undo.enter_context(synchronise_batch_norm(self.model, seat.statistics))
        self._one_chunk = {is_mean: torch.tensor([1.0, float(is_mean)], dtype=torch.float64, device=seat.device) for is_mean in (False, True)}
        # With one chunk and one replica autograd already puts a gradient where it belongs.
        landing = InPlace(lambda parameter: self.exchange.room(parameter)) if plan.num_chunks > 1 else None
        limit = plan.memory_bytes or None
        self.division = (
            Division(job, seat.groups["tp"], seat.team, dtype=dtype, placements=plan.tp_placements, memory_bytes=limit, landing=landing)
            if seat.team
            else None
        )
        self.shards: Shards | None = None
        self._copied_bytes = 0  # of parameters and buffers, at the start
        self._saved_bytes: Counter[str] = Counter()  # what gathering the optimizer's state for checkpoints handed over along dp
        self._team_bytes: Counter[str] = Counter()  # what the chunks and steps so far are expected to hand over along tp
        self._summed: list[tuple[str, nn.Parameter]] = []  # whose gradients are added up over tp, once a step
        self._sum_later: set[int] = set()
        self.exchange: Exchange
        self.updater: Updater
        self.statistics: RunningStatistics

    def prepare(self) -> Steps[None]:
        """Make sure all ranks hold the same job, start from rank 0's values, and build what the step needs."""
        yield from agree(self.seat.world, facts(self.job, self.plan, self.model))
        self._copied_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state_of(self.model).values())
        if self.seat.team:
            yield from copy_from_first(self.model, self.seat.groups["tp"])
            self._team_bytes["broadcast"] += self._copied_bytes
        yield from copy_from_first(self.model, self.replicas)
        whole = self.named
        if self.division:
            yield from self._divide(self.division)
        self.exchange = self._open_exchange()
        self.updater = Updater(self.job, whole, self.exchange, self.shards, self.named if self.shards else None)
        changing = self.division.changing if self.division else None
        self.statistics = RunningStatistics(self.model, self.replicas, synchronised=self.plan.sync_batch_norm, changing=changing)
        for _, parameter in self.named:
            self._undo.callback(parameter.register_post_accumulate_grad_hook(self._take_gradient).remove)

    def _divide(self, division: Division) -> Steps[None]:
        """Read the loss, decide who holds what, and let go of the rest."""
        size = chunk_sizes(self.job.batch_size, self.plan.num_chunks)[0]
        batches = yield from on_first(self.seat.world, lambda: first_batches(self.job, 1, size), DataError)
        yield from division.open(to_device(batches[0] if batches else None, self.seat.device, self.dtype), self.seat.world, self.model)
        self.shards = Shards({**division.parameters, **division.buffers}, self.seat.groups["tp"])
        self.shards.divide(self.model)
        self.named = [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        self._frozen = [(name, parameter) for name, parameter in self.model.named_parameters() if not parameter.requires_grad]
        self._summed = [(name, parameter) for name, parameter in self.named if name in division.first.summed]
        self._sum_later = {id(parameter) for _, parameter in self._summed}

    def step(self, step: int, chunks: Sequence[Chunk]) -> Steps[StepResult]:
        """Train on this replica's chunks of global batch `step`."""
        self._check_frozen()
        self.model.train() if not self.model.training else None
        self.exchange.begin_step()
        sums = torch.zeros(4, dtype=torch.float64, device=self.seat.device)  # loss, weight, chunks, chunks whose loss was a mean
        filled = [chunk for chunk in chunks if chunk.samples]
        works = []
        for chunk in filled:
            data = self._data(chunk)
            with ExitStack() as around:
                around.enter_context(self.statistics.chunk(partial(self._again, chunk, data)))
                self._begin_chunk(chunk, around, self.observer)
                if self.division:
                    yield from self.division.ready(data)
                returned = self._loss(data)
                loss, weight = as_sum(returned, chunk.samples)
                is_mean = not isinstance(returned, tuple)
                sums[0] += loss.detach()
                sums[1] += weight
                sums[2:] += self._one_chunk[is_mean]
                if chunk is filled[-1]:
                    works.append(self.replicas.all_reduce(sums)) if self.plan.dp > 1 else None
                    self.exchange.begin_last_chunk()
                # Of means over samples the whole batch's weight is known now, and dividing a number is cheaper than a gradient.
                (loss / chunk.batch if is_mean else loss).backward()
            if self.observer:
                self.observer.chunk_done(chunk, float(weight), float(loss.detach()))
        if filled and self._summed:
            yield from self._sum_over_team()
        if not filled and self.plan.dp > 1:
            works.append(self.replicas.all_reduce(sums))
        self.arrivals.append(time.monotonic())
        yield
        for work in works:
            work.wait()
        total, weight, num_chunks, num_means = sums.tolist()
        if num_means not in (0, num_chunks):
            raise JobError(
                f"The loss function returned a mean for {num_means:g} of {num_chunks:g} chunks and (sum, weight) for the others. Return one kind always."
            )
        gradients = yield from self.exchange.finish(sums[1] / chunks[0].batch if num_means else sums[1])
        yield from self._check_finite(step, filled, total, weight)
        yield from self.statistics.finish()
        if self.observer:
            whole = yield from self.exchange.full_gradients(gradients)
            self.observer.averaged((yield from self._gathered(whole)))
        norm = yield from self.updater.update(gradients, total / weight)
        self._team_bytes.update(self.updater.bytes_per_step("tp"))
        yield from self.exchange.publish()
        return StepResult(step=step, loss=total / weight, weight=weight, samples=chunks[0].batch, gradient_norm=norm)

    def evaluate(self, chunks: Iterable[Chunk]) -> Steps[dict[str, float]]:
        """Mean of every metric over all replicas' chunks, in evaluation mode."""
        assert self.job.evaluate
        metrics = self.job.evaluate.metrics
        sums = torch.zeros(len(metrics), 2, dtype=torch.float64, device=self.seat.device)
        was_training = self.model.training
        self.model.eval()
        with torch.no_grad():
            for chunk in chunks:
                if not chunk.samples:
                    continue
                data = self._data(chunk)
                for row, metric in zip(sums, metrics.values(), strict=True):
                    if self.division:
                        yield from self.division.ready(data, loss=metric, training=False)
                    value, weight = as_sum(self._loss(data, metric, training=False), chunk.samples, needs_gradient=False)
                    row += torch.stack([value.double(), torch.as_tensor(weight, dtype=torch.float64, device=value.device)])
        self.model.train(was_training)
        if self.plan.dp > 1:
            work = self.replicas.all_reduce(sums)
            yield
            work.wait()
        return {name: total / weight if weight else math.nan for name, (total, weight) in zip(metrics, sums.tolist(), strict=True)}

    def weights(self) -> Steps[dict[str, Any]]:
        """The model's `state_dict` in whole shapes; all of it on the first rank along tp."""
        if self.shards is None:
            return self.model.state_dict()
        self._team_bytes["all_gather"] += self.shards.weights_bytes(self.model)
        return (yield from self.shards.weights(self.model))

    def optimizer_state(self) -> Steps[tuple[list[Piece], dict[str, Any]]]:
        """As `Updater.state`."""
        made = yield from self.updater.state(self.seat.world)
        self._team_bytes.update(self.updater.bytes_per_save("tp"))
        self._saved_bytes.update(self.updater.bytes_per_save("dp"))
        return made

    def whole_state(self) -> Steps[dict[str, Tensor]]:
        """Parameters and buffers by name, whole, tied ones once. Every rank calls it."""
        return (yield from self._gathered({name: tensor.detach() for name, tensor in state_of(self.model).items()}))

    def num_elements(self) -> int:
        """Trainable elements of the whole model."""
        return sum(self._whole_size(name, each) for name, each in self.named)

    def num_parameters(self) -> int:
        """Elements of all parameters of the whole model."""
        return sum(self._whole_size(name, each) for name, each in self.model.named_parameters())

    def _whole_size(self, name: str, tensor: Tensor) -> int:
        return math.prod(self.shards.whole_shape(name, tensor) if self.shards else tensor.shape)

    def digests(self) -> Steps[list[list[int]]]:
        """A hash of every parameter and buffer, from every replica: [replica][tensor]."""
        mine = torch.stack([digest(tensor) for tensor in state_of(self.model).values()])
        everyone = mine.new_empty(self.replicas.size * mine.numel())
        work = self.replicas.all_gather(everyone, mine)
        yield
        work.wait()
        return everyone.view(self.replicas.size, -1).tolist()

    def check_identical(self, step: int) -> Steps[None]:
        """Raise `TrainingError` naming the first parameter or buffer that differs between replicas."""
        everyone = yield from self.digests()
        for replica, theirs in enumerate(everyone):
            for name, here, there in zip(state_of(self.model), everyone[0], theirs, strict=True):
                if here != there:
                    raise TrainingError(
                        f"After step {step}, {name} differs between replicas dp=0 and dp={replica}: something in the model or optimizer "
                        "is not deterministic or not part of the exchange (a parameter changed outside the optimizer, a buffer written by one rank)."
                    )

    def check_team(self, step: int) -> Steps[None]:
        """Raise `TrainingError` naming the first parameter or buffer that every rank along tp holds whole, and not alike."""
        if self.seat.team is None or self.shards is None:
            return
        alike = {name: tensor for name, tensor in state_of(self.model).items() if name not in self.shards.pieces}
        everyone = yield from collect(self.seat.team, [int(digest(tensor)) for tensor in alike.values()])
        for rank, theirs in enumerate(everyone):
            for name, here, there in zip(alike, everyone[0], theirs, strict=True):
                if here != there:
                    raise TrainingError(
                        f"After step {step}, {name} differs between ranks tp=0 and tp={rank}, which both hold all of it: something in the model or "
                        "optimizer is not deterministic."
                    )

    def bytes_per_step(self) -> dict[str, int]:
        """Bytes that one step hands to the collectives along dp, by kind, as formulas say."""
        if self.plan.dp == 1:
            return {}
        loss_and_weight = {"all_reduce": 32}
        joined = {name: count * self.plan.microbatches for name, count in bytes_per_chunk(self.model).items()} if self.plan.sync_batch_norm else {}
        return _add(loss_and_weight, joined, self.exchange.bytes_per_step(), self.statistics.bytes_per_step(), self.updater.bytes_per_step())

    def bytes_over_team(self) -> dict[str, int]:
        """Bytes that this rank handed to the collectives along tp so far, by kind, as formulas say of the chunks that it ran."""
        return dict(self._team_bytes + Counter(self.updater.bytes_once("tp")))

    def bytes_once(self) -> dict[str, int]:
        """Bytes handed over at the start and in the first step: parameters and buffers of rank 0, and what decides later steps."""
        if self.plan.dp == 1:
            return {}
        return _add({"broadcast": self._copied_bytes}, self.exchange.bytes_once(), self.updater.bytes_once())

    def bytes_of_saves(self) -> dict[str, int]:
        """Bytes that the checkpoints so far handed over along dp."""
        return dict(self._saved_bytes)

    def bytes_per_evaluation(self) -> int:
        """Bytes that `evaluate` hands over: a sum and a weight per metric."""
        return 16 * len(self.job.evaluate.metrics) if self.job.evaluate else 0

    def bytes_per_check(self) -> int:
        """Bytes that `digests` hands over."""
        return 8 * len(state_of(self.model))

    def close(self) -> None:
        """Take the hooks off the model."""
        self._undo.close()

    def _open_exchange(self) -> Exchange:
        if self.plan.dp == 1:
            return Alone(self.named)
        kind = ZeroOne if self.plan.zero else AllReduce
        alike = [name for name, _ in self.named if name not in self.shards.pieces] if self.shards else ()
        return kind(self.named, self.replicas, bucket_bytes=self.plan.bucket_bytes, overlap=self.plan.overlap, apart=alike)

    def _take_gradient(self, parameter: nn.Parameter) -> None:
        if id(parameter) not in self._sum_later:
            self.exchange.gradient_ready(parameter)

    def _loss(self, data: Any, function: LossFunction | None = None, *, training: bool = True) -> Any:
        """What the job's loss (or another function of model and batch) returns."""
        if self.division is None:
            return (function or self.job.loss)(self.model, data)
        self._team_bytes.update(self.division.bytes_of_chunk(data, loss=function, training=training))
        return self.division.run(dict(self.model.named_parameters()), dict(self.model.named_buffers()), data, loss=function, training=training)

    def _sum_over_team(self) -> Steps[None]:
        """Add up over tp, in one flat all-reduce, the gradients of what several ranks of the team used, each for its part.

        What some of them hold in parts (key/value heads that two ranks share) is added up in its place in the whole.
        """
        shards = self.shards
        assert shards is not None
        used = [(name, parameter) for name, parameter in self._summed if parameter.grad is not None]
        for dtype in sorted({parameter.dtype for _, parameter in used}, key=str):
            mine = [(name, parameter.grad) for name, parameter in used if parameter.dtype == dtype and parameter.grad is not None]
            whole = [place(shards.pieces[name], shards.rank, gradient) if name in shards.pieces else gradient for name, gradient in mine]
            flat = torch.cat([each.reshape(-1) for each in whole])
            work = self.seat.groups["tp"].all_reduce(flat)
            self._team_bytes["all_reduce"] += flat.nbytes
            yield
            work.wait()
            for (name, gradient), each, part in zip(mine, whole, flat.split([each.numel() for each in whole]), strict=True):
                gradient.copy_(shards.take(name, part.view(each.shape)))
        for _, parameter in used:
            self.exchange.gradient_ready(parameter)

    def _begin_chunk(self, chunk: Chunk, around: ExitStack, observer: Observer | None = None) -> None:
        """Seed the chunk's draws, and key them if the plan says so, until `around` ends."""
        # With synchronised statistics microbatch j of all replicas is one chunk, of which this replica computes some rows. Keyed draws
        # are the same rows of that chunk's draws; without keys every replica draws for itself, or all would draw the same.
        index, rows = chunk.index, None
        if self.plan.sync_batch_norm and self.plan.keyed_draws:
            m = self.plan.microbatches
            index = chunk.index % m
            sizes = chunk_sizes(chunk.batch, self.plan.num_chunks)[index::m]
            rows = Rows(sum(sizes[: self.seat.place.dp]), chunk.samples, sum(sizes))
        seed_everything(chunk_seed(self.job.seed, chunk.step, index))
        seen = around.enter_context(observer.watch(chunk, self.model)) if observer else None
        if self.plan.keyed_draws and self.division is None:  # programs key their draws themselves
            around.enter_context(KeyedDraws(rows, seen))

    def _again(self, chunk: Chunk, data: Any) -> Tensor:
        """The chunk's loss once more, from the same draws."""
        with ExitStack() as around:
            self._begin_chunk(chunk, around)
            return as_sum(self._loss(data), chunk.samples, needs_gradient=False)[0]

    def _data(self, chunk: Chunk) -> Any:
        return to_device(chunk.data, self.seat.device, self.dtype)

    def _gathered(self, tensors: dict[str, Tensor | None] | dict[str, Tensor]) -> Steps[Any]:
        """Whole tensors of this rank's and its team's parts."""
        if self.shards is None:
            return tensors
        whole: dict[str, Tensor | None] = {}
        for name, tensor in tensors.items():
            whole[name] = None if tensor is None else (yield from self.shards.gather(name, tensor))
        return whole

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
        found = yield from collect(self.seat.world, self._find_not_finite(chunks))
        rank, where = next(((rank, where) for rank, where in enumerate(found) if where), (0, "the sum over all chunks overflowed"))
        raise TrainingError(
            f"The loss of step {step} is {total / weight if weight else math.nan:g}: rank {rank}, {where}. The parameters were not updated; "
            "lower the learning rate, clip gradients, or look at this batch."
        )

    def _find_not_finite(self, chunks: Sequence[Chunk]) -> str | None:
        for name, parameter in self.model.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                return f"whose parameter {name} was not finite before the step"
        for chunk in chunks:
            with torch.no_grad(), watch_finite(self.model) as first:
                loss = self._again(chunk, self._data(chunk))
            if first:
                return f"chunk {chunk.index}; the first module whose output is not finite is {first[0]}"
            if not bool(torch.isfinite(loss)):
                return f"chunk {chunk.index}; every module's output is finite, so the loss function made it"
        return None


def _add(*parts: Mapping[str, int]) -> dict[str, int]:
    return {name: sum(part.get(name, 0) for part in parts) for part in parts for name in part}
