"""What a rank holds and computes of a replica whose loss is read: some stages along pp, its part of them along tp.

    read the loss on one rank -> divide it over tp -> cut it into stages -> every rank lets go of what it does not hold

A plan with tp, pp or recomputation runs so; with pp=1 there is one stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.checkpoint.tensor_file import Entry, Stream, widest_first
from meshloom.comm.group import Group
from meshloom.comm.objects import collect, on_first
from meshloom.comm.pieces import place
from meshloom.comm.seat import Seat
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.steps import Steps
from meshloom.core.compiled import without_compilation
from meshloom.core.errors import CaptureError, DataError
from meshloom.core.job import Job, LossFunction
from meshloom.core.mesh import Axis
from meshloom.core.plan import Plan
from meshloom.core.timings import Timings
from meshloom.data.data import to_device
from meshloom.data.samples import first_batches
from meshloom.exchange.exchange import Exchange, Give
from meshloom.parameters.digest import digest
from meshloom.parameters.model import state_of
from meshloom.parameters.pipeline_ownership import Homes, held
from meshloom.parameters.shards import Shards
from meshloom.pipeline.runtime.microbatches import Microbatches
from meshloom.pipeline.runtime.run import Listener
from meshloom.pipeline.schedules.schedule import Action
from meshloom.pipeline.stages.stages import Stage
from meshloom.pipeline.stages.staging import Staging
from meshloom.program.capture.outside import Outside
from meshloom.program.ir.batch_values import check_following
from meshloom.program.ir.leaves import leaves_of
from meshloom.program.ir.nodes import Node
from meshloom.program.operators.fused_grad_accumulation import InPlace
from meshloom.program.store.stored import Stored
from meshloom.replica.buffers import RunningStatistics
from meshloom.tensor_parallel.division import Division
from meshloom.tensor_parallel.loss_programs import LossPrograms


class Staged:
    """One rank's stages of `job`'s loss under `plan`, and what it holds for them.

    sent: axis -> what the steps so far are expected to have handed to each kind of operation along it, in bytes.
    """

    def __init__(
        self, job: Job, plan: Plan, seat: Seat, *, dtype: torch.dtype | None = None, timings: Timings | None = None,
        stored: Stored | None = None,
    ) -> None:  # fmt: skip
        self.plan = plan
        self._timings = timings = timings or Timings()
        self.seat = seat
        self.job = job
        self.dtype = dtype
        team = seat.team or simulated_groups(1)[0]
        self.pp: Group = seat.groups["pp"] if plan.pp > 1 else simulated_groups(1)[0]
        self.tp: Group | None = seat.groups["tp"] if plan.tp > 1 else None
        self.division: Division | None = None
        if self.tp is not None:
            limits: Any = {"memory_bytes": plan.memory_bytes or None, "num_stages": plan.pp}
            self.division = Division(self.tp, rules=job.rules, placements=plan.tp_placements, timings=timings, stored=stored, **limits)
        programs = LossPrograms(job, team, self.division, dtype=dtype, timings=timings, stored=stored)
        self.staging = Staging(job, plan, programs, team, timings=timings, stored=stored)
        self.sent: dict[Axis, Counter[str]] = {"pp": Counter(), "tp": Counter()}
        self.stages: tuple[Stage, ...] = ()  # of this rank, as first cut
        self.homes: Homes
        self.shards: Shards
        self.microbatches: Microbatches
        self.statistics: dict[int, RunningStatistics] = {}
        self.compiled: list[str] = []  # modules that torch.compile would have compiled
        self._team = team
        self._model: nn.Module
        self._summed: list[tuple[str, nn.Parameter]] = []
        self._outside: dict[LossFunction, Outside] = {}
        self._parameters: dict[str, nn.Parameter] = {}

    def open(self, model: nn.Module) -> Steps[None]:
        """Read the loss, decide who holds what, and let go of the rest. All ranks call it; model: whole, and on rank 0 as it was built."""
        self.compiled = without_compilation(model)
        size = self.plan.largest_share(self.job.batch_size)[0]
        with self._timings.of("first batches"):
            batches = (yield from on_first(self.seat.world, lambda: first_batches(self.job, 2, size), DataError)) or []
        there = [to_device(each, self.seat.device, self.dtype) for each in batches]
        stages = yield from self.staging.open(there, self.seat.world, model, own=batches[0] if batches else None)
        yield from on_first(self.seat.world, lambda: check_following(self.staging.others, leaves_of(batches[-1]).values), CaptureError)
        self.stages = tuple(stage for stage in stages if self.staging.ranks[stage.number] == self.pp.rank)
        self.homes = Homes(self.staging.holders, self.pp)
        self.homes.release(model)
        self.shards = Shards(self.staging.programs.pieces, self.tp)
        self.shards.divide(model)
        self._model = model
        self._outside[self.job.loss] = Outside(self.job.loss, model)
        self._parameters = {name: each for name, each in model.named_parameters() if not each.is_meta}
        several = self.plan.num_chunks > 1
        self.statistics = {
            stage.number: RunningStatistics(
                model, self.seat.groups["dp"], several=several, changing=stage.changing, followed=stage.program.in_place, unite=self._of_any
            )
            for stage in self.stages
        }

    def actions(self, num_microbatches: int) -> tuple[Action, ...]:
        """What this rank does in a step of so many microbatches, in order."""
        return self.staging.schedule(num_microbatches).actions[self.pp.rank] if num_microbatches else ()

    def owned(self) -> list[tuple[str, nn.Parameter]]:
        """The trainable parameters that this rank updates, by name."""
        return [(name, each) for name, each in self._parameters.items() if each.requires_grad and self.homes.owns(name)]

    def connect(self, exchange: Exchange) -> ExitStack:
        """From now on `exchange` is told once a step of each of `owned()` whose gradient is complete. Closing what is returned ends it."""
        self._ready = ready = exchange.gradient_ready
        lent, summed = set(self.homes.lent), set(self.staging.programs.summed)
        self._summed = [(name, each) for name, each in self.owned() if name in summed]
        now = {id(each) for name, each in self.owned() if name not in lent and name not in summed}
        self._later = [each for name, each in self.owned() if name in lent and name not in summed]

        def complete(parameter: nn.Parameter) -> None:
            if id(parameter) in now:
                ready(parameter)

        # With one chunk and one replica autograd already puts a gradient where it belongs.
        landing = InPlace(exchange.room) if self.plan.num_chunks > 1 else None
        self.microbatches = Microbatches(self.staging, self._model, self._parameters, self.pp, self.tp, self.seat.device, complete, landing)
        undo = ExitStack()
        for _, parameter in self.owned():
            if id(parameter) in now:
                undo.callback(parameter.register_post_accumulate_grad_hook(self.microbatches.arrived).remove)
        return undo

    def train(
        self,
        batches: Sequence[Any],
        *,
        finish: Callable[[int, Any], Tensor],
        begin: Callable[[int, ExitStack, bool], None],
        listener: Listener | None = None,
    ) -> Steps[None]:
        """Forward and backward of this replica's microbatches, until every owned gradient is complete.

        finish: of what the loss returned for a microbatch, where backward starts; called on the last stage.
        begin: of a microbatch, seeds its draws and enters what stays around its forward; True: it is the last stage's, the first time.
        """
        self._outside[self.job.loss].check_step()
        for batch in batches:
            yield from self.staging.ready(batch)
        for parameter in self._parameters.values():
            parameter.grad = None
        if batches:
            self._count(self.microbatches.train(batches, finish=finish, around=partial(self._around, begin), listener=listener))
        yield from self.homes.return_gradients(self._parameters)
        for parameter in self._later:
            if parameter.grad is not None:
                self._ready(parameter)
        if batches and self._summed:
            yield from self._sum_over_tp()

    def add_up(self, sums: Tensor) -> Steps[None]:
        """Make `sums`, which the last stage's rank knows and the others have as zeros, known to all ranks along pp."""
        if self.pp.size > 1:
            yield from self._add_up("pp", self.pp, sums)

    def add_up_over_tp(self, sums: Tensor) -> Steps[None]:
        """Add up over the ranks along tp, each of which has its own."""
        if self.tp is not None:
            yield from self._add_up("tp", self.tp, sums)

    def evaluate(self, batch: Any, metric: LossFunction, finish: Callable[[Any], None]) -> Steps[None]:
        """What `metric` returns for a batch in evaluation mode, to `finish` on the last stage."""
        if metric in self._outside:
            self._outside[metric].check_step()
        yield from self.staging.ready(batch, loss=metric, training=False)
        if metric not in self._outside:
            self._outside[metric] = Outside(metric, self._model)
        self._count(self.microbatches.evaluate(batch, metric, finish))

    def published(self) -> Steps[None]:
        """After every update: who borrows parameters gets their new values."""
        self.sent["pp"]["send"] += self.homes.bytes_per_step(self._parameters)
        yield from self.homes.lend(self._parameters)

    def lend_again(self) -> Steps[None]:
        """The same after a change that no update made."""
        self.sent["pp"]["send"] += self.homes.bytes_of_lending(self._parameters)
        yield from self.homes.lend(self._parameters)

    def each_whole(self, mine: Callable[[Give], Steps[None]], take: Callable[[str, Tensor | None], None]) -> Steps[None]:
        """Hand `take`, on the replica's first rank, whole tensors of all ranks' parts, one after another; None where the owner has none.

        mine: gives this rank's parameters and buffers, some of them, or their gradients, by name. The same kind on all ranks.
        """
        tensors = state_of(self._model)
        names, moves = list(tensors), self.tp is None or self.tp.rank == 0

        def give(name: str, tensor: Tensor | None) -> Steps[None]:
            if not self.homes.owns(name):
                return
            if tensor is not None:
                self.sent["tp"]["all_gather"] += self.shards.gather_bytes(name, tensor.dtype)
                tensor = yield from self.shards.gather(name, tensor.detach())
            if moves and self.pp.rank == 0:
                take(name, tensor)
            elif moves:
                yield from tell(names.index(name), int(tensor is not None))
                if tensor is not None:
                    yield from send(tensor.contiguous())

        def tell(number: int, there: int) -> Steps[None]:
            yield from send(torch.tensor([number, there], device=self.seat.device))

        def send(tensor: Tensor) -> Steps[None]:
            work = self.pp.send(tensor, 0)
            self.sent["pp"]["send"] += tensor.nbytes
            yield
            work.wait()

        def receive(tensor: Tensor, sender: int) -> Steps[Tensor]:
            work = self.pp.recv(tensor, sender)
            yield
            work.wait()
            return tensor

        yield from mine(give)
        if moves and self.pp.rank:
            yield from tell(-1, 0)
        for sender in range(1, self.pp.size) if moves and self.pp.rank == 0 else ():
            while True:
                heard = yield from receive(torch.empty(2, dtype=torch.int64, device=self.seat.device), sender)
                number, there = heard.tolist()
                if number < 0:
                    break
                name = names[number]
                like = torch.empty(self.shards.whole_shape(name, tensors[name]), dtype=tensors[name].dtype, device=self.seat.device)
                take(name, (yield from receive(like, sender)) if there else None)

    def weights(self) -> Stream:
        """The model's `state_dict` in whole shapes, one by one; all of it on rank 0."""
        if self.pp.size == 1:
            self.sent["tp"]["all_gather"] += self.shards.weights_bytes(self._model)
            return self.shards.weights(self._model)
        state = self._model.state_dict()
        entries = widest_first([Entry(name, self.shards.whole_shape(name, each), Entry.of(name, each).dtype) for name, each in state.items()])
        moves = self.tp is None or self.tp.rank == 0
        first = moves and self.pp.rank == 0

        def run(take: Callable[[str, Tensor], None]) -> Steps[None]:
            for each in entries:
                whole: Tensor | None = None
                if self.homes.owns(each.name):
                    self.sent["tp"]["all_gather"] += self.shards.gather_bytes(each.name, each.dtype)
                    self.sent["pp"]["send"] += each.num_bytes if moves and self.pp.rank else 0
                    whole = yield from self.shards.gather(each.name, state[each.name])
                if moves:
                    whole = yield from self.homes.bring(each.name, whole, each.shape, each.dtype, self.seat.device)
                if first:
                    assert whole is not None
                    take(each.name, whole)

        return Stream(entries=entries if first else [], run=run)

    def find_not_finite(self, batches: Sequence[Any], begin: Callable[[int, ExitStack, bool], None]) -> Steps[list[Any] | None]:
        """Where a value became NaN, as [stage, text]; None if it was not here. All ranks of the replica call it. begin: as for `train`."""
        bad = next((name for name, each in held(self._model.named_parameters()).items() if not bool(torch.isfinite(each).all())), None)
        everyone = yield from collect(self._team, bad)
        if any(everyone):
            return [self.stages[0].number, f"whose parameter {bad} was not finite before the step"] if bad else None
        found: list[Any] | None = None

        def look(number: int, stage: int, node: Node, value: Any) -> None:
            nonlocal found
            if found is None and isinstance(value, Tensor) and value.is_floating_point() and bool(value.isnan().any()):
                where = " at ".join(filter(None, (node.path, str(node.line or ""))))
                found = [stage, f"microbatch {number}; the first operator that gives NaN is {node.operator}{f' in {where}' if where else ''}"]

        @contextmanager
        def around(number: int, stage: int, microbatch: int, again: Callable[[], Any]) -> Iterator[None]:
            with ExitStack() as stack:
                begin(number, stack, False)
                yield

        for number, batch in enumerate(batches):
            self.microbatches.look(batch, partial(around, number), partial(look, number))
        return found

    def _place(self, rank: int) -> str:
        """A rank of the replica, by its coordinates."""
        pp, tp = divmod(rank, self.plan.tp)
        return ",".join(f"{axis}={at}" for axis, at in (("pp", pp), ("tp", tp)) if getattr(self.plan, axis) > 1)

    @contextmanager
    def _around(self, begin: Callable[[int, ExitStack, bool], None], stage: int, microbatch: int, again: Callable[[], Any]) -> Iterator[None]:
        def once_more() -> Any:
            with ExitStack() as around:
                begin(microbatch, around, False)
                return again()

        with ExitStack() as around:
            around.enter_context(self.statistics[stage].chunk(once_more))
            begin(microbatch, around, stage == self.plan.num_stages - 1)
            yield

    def _count(self, sent: Mapping[Axis, Mapping[str, int]]) -> None:
        for axis, kinds in sent.items():
            self.sent[axis].update(kinds)

    def _add_up(self, axis: Axis, group: Group, sums: Tensor) -> Steps[None]:
        work = group.all_reduce(sums)
        self.sent[axis]["all_reduce"] += sums.nbytes
        yield
        work.wait()

    def _sum_over_tp(self) -> Steps[None]:
        """Add up over tp, in one flat all-reduce, the gradients of what several ranks used, each for its part.

        What some of them hold in parts (key/value heads that two ranks share) is added up in its place in the whole.
        """
        assert self.tp is not None
        shards = self.shards
        used = [(name, parameter) for name, parameter in self._summed if parameter.grad is not None]
        for dtype in sorted({parameter.dtype for _, parameter in used}, key=str):
            mine = [(name, parameter.grad) for name, parameter in used if parameter.dtype == dtype and parameter.grad is not None]
            whole = [place(shards.pieces[name], shards.rank, gradient) if name in shards.pieces else gradient for name, gradient in mine]
            flat = torch.cat([each.reshape(-1) for each in whole])
            yield from self._add_up("tp", self.tp, flat)
            for (name, gradient), each, part in zip(mine, whole, flat.split([each.numel() for each in whole]), strict=True):
                gradient.copy_(shards.take(name, part.view(each.shape)))
        for _, parameter in used:
            self._ready(parameter)

    def _of_any(self, flags: Tensor) -> Tensor:
        """Flags of the ranks along tp, each set where one of them has it."""
        if self.tp is not None:
            self.sent["tp"]["all_reduce"] += flags.nbytes
            self.tp.all_reduce(flags).wait()
        return flags

    def check_alike(self) -> Steps[str | None]:
        """What is wrong if a parameter or buffer that several ranks of the replica hold whole is not the same on all of them."""
        alike = {name: int(digest(each)) for name, each in held(state_of(self._model).items()).items() if name not in self.shards.pieces}
        everyone: list[dict[str, int]] = yield from collect(self._team, alike)
        first: dict[str, tuple[int, int]] = {}
        for rank, theirs in enumerate(everyone):
            for name, value in theirs.items():
                other, known = first.setdefault(name, (rank, value))
                if value != known:
                    places = " and ".join(map(self._place, (other, rank)))
                    return f"{name} differs between ranks {places}, which both hold all of it"
        return None
