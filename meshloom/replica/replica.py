"""One rank's training step: its chunks forward and backward, the exchange, the update.

The step is a generator: where it waits for other ranks it yields, so that a process runs it to its end and simulated ranks run
it in lockstep (`comm/steps.py`). Backward runs on the *sum* of each chunk's loss, which is divided once, by the weight of the
whole global batch, so uneven and empty shares keep the exact mean: before backward where all ranks know that weight (means over
samples), else by `Exchange.finish`.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from meshloom.checkpoint.checkpoint import Checkpoint, Piece
from meshloom.checkpoint.resuming import Loader, check_together, hand_over, open_together
from meshloom.checkpoint.tensor_file import Stream
from meshloom.comm.group import Group
from meshloom.comm.objects import agree, collect
from meshloom.comm.seat import Seat
from meshloom.comm.steps import Steps
from meshloom.comm.windows import windows_of
from meshloom.core.errors import CheckpointError, DataError, TrainingError
from meshloom.core.exchanges import EXCHANGES
from meshloom.core.job import Job, NamedParameters
from meshloom.core.mesh import Axis
from meshloom.core.modes import Modes
from meshloom.core.plan import Plan
from meshloom.core.timings import Timings
from meshloom.data.data import Chunk
from meshloom.data.pace import Pace
from meshloom.exchange.alone import Alone
from meshloom.exchange.exchange import Exchange, Give
from meshloom.exchange.registry import Setup
from meshloom.optimizer.outer_state import OUTER, outer_loader, outer_pieces
from meshloom.optimizer.sparse_parameters import make_dense
from meshloom.optimizer.state import STATE
from meshloom.optimizer.updater import Updater
from meshloom.optimizer.user_optimizer import Made, make_optimizers
from meshloom.parameters.model import build_model, copy_from_first, facts, state_of, trainable
from meshloom.parameters.pipeline_ownership import held
from meshloom.parameters.replica_check import bytes_per_comparison, first_difference
from meshloom.parameters.shards import Shards
from meshloom.pipeline.runtime.recorder import Recorder
from meshloom.pipeline.schedules.spans import SpanKind
from meshloom.program.store.stored import Stored
from meshloom.replica.batch_norm import bytes_per_chunk, synchronise_batch_norm
from meshloom.replica.chunk_scope import ChunkScope
from meshloom.replica.engine import Engine
from meshloom.replica.loss_sums import Tally
from meshloom.replica.metrics import MetricSums
from meshloom.replica.module_engine import ModuleEngine
from meshloom.replica.program_engine import ProgramEngine
from meshloom.replica.sharing import why_separate
from meshloom.replica.trial_evaluation import naming


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """What a step came to before its update.

    of_owned: gradient of each slice that the exchange owns here; None was not used. loss: mean over the global batch. weight: of it. samples: in it.
    """

    step: int
    samples: int
    of_owned: list[Tensor | None]
    loss: float
    weight: float


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step came to: loss (mean over the global batch), its weight, its samples, the gradient's norm if clipping is on.

    stopping: whether some rank was asked to stop; the same on all.
    """

    step: int
    loss: float
    weight: float
    samples: int
    gradient_norm: float | None
    stopping: bool = False


class Replica:
    """A model on one rank, or what the rank holds of it, and how it takes part in a step.

    share: whether the replicas of a host may have one copy of the parameters, where their ranks can have memory in common.
    stored: readings and choices of earlier runs, for the rank that reads.
    updates: whether it updates its parameters; a worker of an asynchronous run only computes `gradients`.
    """

    def __init__(
        self, job: Job, plan: Plan, seat: Seat, *, dtype: torch.dtype | None = None, share: bool = False, updates: bool = True,
        timings: Timings | None = None, stored: Stored | None = None,
    ) -> None:  # fmt: skip
        self.timings = timings or Timings()
        self.job = job
        self.plan = plan
        self.seat = seat
        self.dtype = dtype
        self._share = share
        self._updates = updates
        self._updating = False
        self.replicas = seat.groups["dp"]
        self.stop_requests: Sequence[int] | None = None  # the signals that have asked this rank to stop, if ranks agree on that
        self.recorder: Recorder | None = None  # who notes when a pipeline's actions begin and end
        self.arrivals: deque[float] = deque(maxlen=1000)  # when each of the newest steps had nothing left to compute before the exchange
        self.pace = Pace([self.replicas, seat.statistics], seat.device) if plan.shares == "measured" else None
        with self.timings.of("building the model"):
            self.model = build_model(job, seat.device, dtype)
        self._modes = Modes(self.model)
        if plan.reads:
            make_dense(self.model)  # programs' gradients are
        self.named = trainable(self.model)
        self._num_parameters = sum(each.numel() for each in self.model.parameters())
        self._num_trainable = sum(each.numel() for _, each in self.named)
        self._undo = ExitStack()
        if plan.sync_batch_norm and plan.dp > 1:
            self._undo.enter_context(synchronise_batch_norm(self.model, seat.statistics))
        self._tally = Tally(seat.device, keeps_own=EXCHANGES[plan.exchange].independent)
        self.engine: Engine = (
            ProgramEngine(job, plan, seat, dtype=dtype, timings=self.timings, stored=stored) if plan.reads else ModuleEngine(job, plan, seat)
        )
        self.scope = ChunkScope(job, plan, seat, self.model, dtype=dtype)
        self._frozen: NamedParameters = []
        self._copied_bytes = 0  # of parameters and buffers, at the start
        self._saved_bytes: Counter[str] = Counter()  # what gathering the optimizer's state for checkpoints handed over along dp
        self._sent: dict[Axis, Counter[str]] = {"pp": Counter(), "tp": Counter()}  # what else is expected to have been handed over along them
        self.exchange: Exchange
        self.updater: Updater

    def prepare(self) -> Steps[None]:
        """Make sure all ranks hold the same job, start from rank 0's values, and build what the step needs."""
        with self.timings.of("copying values"):  # after who has built it sooner has waited
            yield from agree(self.seat.world, facts(self.job, self.plan, self.model))
            self._copied_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state_of(self.model).values())
            for axis in ("tp", "dp", "pp"):
                if axis in self.seat.groups:
                    yield from copy_from_first(self.model, self.seat.groups[axis])
                    if axis != "dp":
                        self._sent[axis]["broadcast"] += self._copied_bytes
        whole = self.named
        yield from self.engine.open(self.model, self.scope)
        self.named = self.engine.parameters
        self._frozen = [(name, each) for name, each in self.model.named_parameters() if not each.requires_grad and not each.is_meta]
        with self.timings.of("optimizer and buffers"):
            made = make_optimizers(self.job, whole) if self._updates else None
            self.exchange = self._open_exchange(made)
            if made:
                self.updater = Updater(
                    self.job, whole, self.exchange, self.shards, self.named, self._stage_group, made,
                )  # fmt: skip
            yield from self.exchange.open()
        self._undo.enter_context(self.engine.connect(self.exchange))

    @property
    def shards(self) -> Shards:
        """What this rank holds along tp of what is divided."""
        return self.engine.shards

    @property
    def _stage_group(self) -> Group | None:
        return self.seat.groups["pp"] if self.plan.pp > 1 else None

    def step(self, step: int, chunks: Sequence[Chunk]) -> Steps[StepResult]:
        """Train on this replica's chunks of global batch `step`."""
        return (yield from self.update((yield from self.gradients(step, chunks))))

    def update(self, found: Gradients) -> Steps[StepResult]:
        """The second half of a step: clip, update, and make the new parameters known."""
        step, doing = found.step, self.seat.activity
        doing.enter("updating", step)
        self._updating = True  # until all ranks have updated
        with self._span("update"):
            norm = yield from self.updater.update(found.of_owned, found.loss)
        for axis, sent in self._sent.items():
            sent.update(self.updater.bytes_per_step(axis))
        with self._span("exchange"):
            yield from self.exchange.publish()
            if (yield from self.exchange.settle(early=False)):
                self.updater.forget()
            yield from self.engine.published()
        self._updating = False
        doing.enter("between steps", step + 1)
        return StepResult(step=step, loss=found.loss, weight=found.weight, samples=found.samples, gradient_norm=norm, stopping=self._tally.stopping)

    def gradients(self, step: int, chunks: Sequence[Chunk]) -> Steps[Gradients]:
        """Forward and backward of this replica's chunks of global batch `step`, and the exchange. Buffers change, parameters do not."""
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
        return Gradients(step=step, samples=chunks[0].batch, of_owned=gradients, loss=total / weight, weight=weight)

    def each_gradient(self, found: Gradients, take: Callable[[str, Tensor | None], None]) -> Steps[None]:
        """Hand `take` the averaged gradient of every trainable parameter, whole, one after another: all of them on the replica's first rank."""

        def mine(give: Give) -> Steps[None]:
            yield from self.exchange.each_gradient(found.of_owned, give)

        yield from self.engine.gather(mine, take)

    def whole_gradients(self, found: Gradients) -> Steps[dict[str, Tensor | None]]:
        """The same at once, by name, in the model's order."""
        whole: dict[str, Tensor | None] = {}
        yield from self.each_gradient(found, whole.__setitem__)
        return {name: whole[name] for name in state_of(self.model) if name in whole}

    def _span(self, kind: SpanKind) -> AbstractContextManager[None]:
        return self.recorder.span(kind) if self.recorder else nullcontext()

    def settle(self) -> Steps[None]:
        """End a round of local steps, so that all replicas hold the same parameters; nothing if they do. Every rank calls it."""
        if (yield from self.exchange.settle(early=True)):
            self.updater.forget()
            yield from self.engine.lend_again()

    def evaluate(self, chunks: Iterable[Chunk]) -> Steps[dict[str, float]]:
        """Mean of every metric over all replicas' chunks, in evaluation mode.

        Within a round of local steps it is the mean of the replicas' parameters that is evaluated; afterwards each goes on from its own.
        """
        if self.exchange.settled:
            return (yield from self._evaluate(chunks))
        put_back = yield from self.exchange.show_mean()
        try:
            yield from self.engine.lend_again()
            values = yield from self._evaluate(chunks)
        finally:
            put_back()
        yield from self.engine.lend_again()
        return values

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

    def weights(self) -> Stream | dict[str, Any]:
        """The model's `state_dict` in whole shapes, one by one where it is divided; all of it on the replica's first rank.

        Raises `CheckpointError` if the newest step broke off while parameters were being updated.
        """
        if self._updating:
            raise CheckpointError(
                "The newest step broke off in the middle of its update, so there is nothing whole to save. Resume from a checkpoint."
            )
        return self.engine.weights()

    def optimizer_state(self) -> Steps[tuple[list[Piece], list[Stream], dict[str, Any]]]:
        """As `Updater.state`. Replicas that take independent steps are one before: parameters by ending the round, the optimizer's state by its mean."""
        yield from self.settle()
        if self.exchange.independent:
            self._saved_bytes.update((yield from self.updater.average_state(self.replicas, self.seat.readers)))
        pieces, streams, values = yield from self.updater.state(self.seat.world)
        self._sent["tp"].update(self.updater.bytes_per_save("tp"))
        self._saved_bytes.update(self.updater.bytes_per_save("dp"))
        if self.exchange.state is not None:
            here = {name for name, _ in self.named} if self._stage_group else None
            outer, gathered = yield from outer_pieces(self.exchange.state, self.shards, self.seat.world, self.seat.device, here)
            pieces = pieces + outer
            if gathered:
                self._sent["tp"]["all_gather"] += gathered.bytes_tp
                streams = [*streams, gathered.stream]
        return pieces, streams, values

    def each_of_state(self, take: Callable[[str, Tensor], None]) -> Steps[None]:
        """Hand `take` every parameter and buffer, whole, tied ones once, one after another: all of them on the replica's first rank. Every rank calls it."""

        def mine(give: Give) -> Steps[None]:
            for name, tensor in held(state_of(self.model).items()).items():
                yield from give(name, tensor.detach())

        yield from self.engine.gather(mine, cast(Any, take))

    def whole_state(self) -> Steps[dict[str, Tensor]]:
        """The same at once, by name, in the model's order."""
        whole: dict[str, Tensor] = {}
        yield from self.each_of_state(whole.__setitem__)
        return {name: whole[name] for name in state_of(self.model) if name in whole}

    def num_elements(self) -> int:
        """Trainable elements of the whole model."""
        return self._num_trainable

    def num_parameters(self) -> int:
        """Elements of all parameters of the whole model."""
        return self._num_parameters

    def check_identical(self, step: int) -> Steps[None]:
        """Raise `TrainingError` naming the first parameter or buffer that differs between replicas."""
        found = yield from first_difference(self.model, self.replicas)
        if found is not None:
            name, replica = found
            raise TrainingError(
                f"After step {step}, {name} differs between replicas dp=0 and dp={replica}: something in the model or optimizer "
                "is not deterministic or not part of the exchange (a parameter changed outside the optimizer, a buffer written by one rank)."
            )

    def check_team(self, step: int) -> Steps[None]:
        """Raise `TrainingError` naming the first parameter or buffer that several ranks of the replica hold whole, and not alike."""
        wrong = yield from self.engine.check_alike()
        if wrong is not None:
            raise TrainingError(f"After step {step}, {wrong}: something in the model or optimizer is not deterministic.")

    def take_notes(self) -> Steps[list[str]]:
        """What the user should be told of buffers, of all ranks of the replica, each once."""
        mine = self.scope.take_notes()
        everyone: list[list[str]] = (yield from collect(self.seat.team, mine)) if self.seat.team else [mine]
        return list(dict.fromkeys(note for notes in everyone for note in notes))

    @property
    def readings(self) -> str | None:
        """How often the loss was read, and for which sizes of batches; None: once, or not at all."""
        return self.engine.readings

    def bytes_per_step(self) -> dict[str, int]:
        """Bytes that one step hands to the collectives along dp, by kind, as formulas say."""
        if self.plan.dp == 1:
            return {}
        loss_and_weight = {"all_reduce": 40}
        joined = {name: count * self.plan.microbatches for name, count in bytes_per_chunk(self.model).items()} if self.plan.sync_batch_norm else {}
        of_buffers = [statistics.bytes_per_step() for statistics in self.scope.statistics.values()]
        return _add(loss_and_weight, joined, self.exchange.bytes_per_step(), *of_buffers, self.updater.bytes_per_step())

    def bytes_within(self, axis: Axis) -> dict[str, int]:
        """Bytes that this rank handed over along pp or tp so far, by kind of operation, as formulas say of the chunks that it ran."""
        of_updates = Counter(self.updater.bytes_once(axis)) if self._updates else Counter[str]()
        return dict(self._sent[axis] + self.engine.expected(axis) + of_updates)

    def bytes_once(self) -> dict[str, int]:
        """Bytes handed over at the start and in the first step: parameters and buffers of rank 0, and what decides later steps."""
        if self.plan.dp == 1:
            return {}
        return _add({"broadcast": self._copied_bytes}, self.exchange.bytes_once(), self.updater.bytes_once())

    def resume(self, directory: Path, check: Callable[[Checkpoint], None]) -> Steps[Checkpoint]:
        """Go on from the checkpoint in `directory`, which rank 0 reads for all, if `check` refuses it on no rank.

        What travels goes over the ranks' own group, as all that concerns no step, and is not counted as the plan's.
        """
        world = self.seat.world
        checkpoint = yield from open_together(directory, world)
        yield from check_together(world, lambda: check(checkpoint))
        found: list[Loader] = []
        yield from check_together(world, lambda: found.append(self._loader(checkpoint)))
        wanted = (STATE, OUTER) if self.exchange.state is not None else (STATE,)
        yield from hand_over(checkpoint, [key for key in checkpoint.keys() if key.startswith(wanted)], found[0], world)  # noqa: SIM118  (no dict)
        return checkpoint

    def _loader(self, checkpoint: Checkpoint) -> Loader:
        take, finish_updater = self.updater.loading(checkpoint.values["updater"])
        momentum: dict[str, Tensor] = {}
        take_outer = outer_loader(self.named, self.shards, momentum)

        def state(key: str, whole: Tensor) -> None:
            take(key, whole.shape, lambda _, start, stop: whole.reshape(-1)[start:stop])
            take_outer(key, whole)

        def finish() -> None:
            finish_updater()
            if self.exchange.state is not None:
                self.exchange.load(momentum)

        return Loader(weight=self.shards.weights_loader(self.model), state=state, finish=finish)

    def notes(self) -> list[str]:
        """What the user should know before the first step."""
        return [*self.updater.notes(), *self.engine.notes, *self.exchange.notes()]

    def bytes_of_saves(self) -> dict[str, int]:
        """Bytes that the checkpoints so far handed over along dp."""
        return dict(self._saved_bytes)

    def bytes_per_evaluation(self) -> int:
        """Bytes that `evaluate` hands over: a sum and a weight per metric."""
        return 16 * len(self.job.evaluate.metrics) if self.job.evaluate else 0

    def bytes_per_check(self) -> int:
        """Bytes that `check_identical` hands over."""
        return bytes_per_comparison(self.model)

    def close(self) -> None:
        """Take the hooks off the model."""
        self._undo.close()

    def _open_exchange(self, made: Made | None) -> Exchange:
        if made is None:
            return Alone(self.named)
        sparse = self.engine.sparse(made.optimizers)
        setup = Setup(
            plan=self.plan, named=self.named, frozen=self._frozen, group=self.replicas, apart=self.engine.replicated,
            windows=windows_of(self.replicas) if self.seat.device.type == "cpu" else None,
            may_share=lambda: self._share and not sparse.names and not why_separate(made, self.named),
            sparse=sparse.names, kept=sparse.kept, insisted=sparse.insisted,
        )  # fmt: skip
        return setup.open()

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
            ((each[0], rank, each[1]) for rank, each in enumerate(found) if each), default=(0, 0, "the sum over all chunks overflowed")
        )
        raise TrainingError(
            f"The loss of step {step} is {total / weight if weight else math.nan:g}: rank {rank}, {where}. The parameters were not updated; "
            "lower the learning rate, clip gradients, or look at this batch."
        )


def _add(*parts: Mapping[str, int]) -> dict[str, int]:
    return {name: sum(part.get(name, 0) for part in parts) for part in parts for name in part}
