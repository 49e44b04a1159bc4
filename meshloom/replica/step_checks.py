"""Checks of a step: its loss and gradients are finite, no hooks see parts of gradients, no chunk writes parameters, ranks
have the same settings of their optimizers' groups."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.checkpoint.json_values import NotPlainError, to_json
from meshloom.comm.group import Group
from meshloom.comm.objects import collect
from meshloom.core.errors import CaptureError, DataError, JobError, TrainingError
from meshloom.core.job import Job, NamedParameters
from meshloom.core.losses.loss_scale import LEAST, LossScale
from meshloom.core.mesh import Mesh
from meshloom.core.modules.built import originals
from meshloom.core.plan import Plan
from meshloom.core.units import format_count
from meshloom.launch.names import rank_name
from meshloom.optimizer.updater import Updater
from meshloom.program.capture.guards import Guards
from meshloom.program.ir.lines import WAY_OUT
from meshloom.program.ir.parameter_writes import FIRST_LOOKS, LOOK_EVERY, ParameterWrites, untrained_write
from meshloom.program.ir.written_parameters import limited_tables
from meshloom.replica.attachments import Averaged
from meshloom.replica.team_sums import TeamSums


def check_built(job: Job, model: nn.Module, named: NamedParameters, plan: Plan) -> None:
    """Raise `JobError` for what a job does with its model that ranks would not do as one device does."""
    _check_accumulation_hooks(named, plan)
    trained = {name for name, _ in named}
    for name in _read_outside(job, model):
        if name in trained:
            raise JobError(
                f"The loss reads {name} from outside of Job(model=...), not from the model that it is given, and every rank trains a copy of what is built "
                "outside. Read it from the model, or build it in the function."
            )


def check_copies(job: Job, model: nn.Module) -> None:
    """Raise `TrainingError` if the first step has changed a buffer of which the loss reads the tensor outside the model that
    it was made from."""
    buffers = dict(model.named_buffers())
    for name, value in _read_outside(job, model).items():
        now = buffers.get(name)
        if now is None or now.is_meta or now.shape != value.shape:
            continue
        if not torch.equal(now, value.to(now)):
            raise TrainingError(
                f"The first step has changed the buffer {name}, and the loss reads the tensor outside of Job(model=...) that it was made from, which stays "
                "as it was: every rank has a copy. Read it from the model, or build it in the function."
            )


def _read_outside(job: Job, model: nn.Module) -> dict[str, Tensor]:
    """By name in the model, the values of which it has copies, and of which the loss or metrics read the original."""
    copied = originals(model)
    if not copied:
        return {}
    functions = [job.loss, *(job.evaluate.functions.values() if job.evaluate else ())]
    read = {id(each) for function in functions for each in Guards(function, model).tensors()}
    return {name: each.value for name, each in copied.items() if id(each.outside) in read}


def _check_accumulation_hooks(named: NamedParameters, plan: Plan) -> None:
    """Raise `JobError` for hooks that run after a gradient was accumulated, if a step is more than one backward: else they
    would see sums over some of the step's chunks."""
    hooked = _hooked(named)
    if hooked and plan.num_chunks > 1:
        raise JobError(
            f"{hooked[0]} has a hook that runs once its gradient is accumulated (register_post_accumulate_grad_hook), and a step of {plan} accumulates over its "
            "chunks before the gradient is the batch's. Change the gradient with register_hook, or in the optimizer."
        )


def check_limited(model: nn.Module, plan: Plan) -> None:
    """Raise `JobError` for a table with `max_norm` where a forward cannot scale its rows as one device does."""
    for name in limited_tables(model):
        what = f"{name} has max_norm, which scales its rows in the forward, and"
        instead = "or scale in the optimizer step; or leave max_norm out."
        if plan.num_chunks > 1:
            raise JobError(f"{what} a step of {plan} has {plan.num_chunks} chunks. Use one chunk, {instead}")
        if plan.mesh.size > 1 or plan.recompute != "none":
            raise JobError(f"{what} under {plan} updates alone write what is trained. Use dp=1, {instead}")


def check_readable(model: nn.Module) -> None:
    """Raise `CaptureError` for what no program of the loss does: hooks on gradients of parameters."""
    named = list(model.named_parameters())
    if hooked := [name for name, each in named if each._backward_hooks]:
        raise CaptureError(
            f"{hooked[0]} has a hook on its gradient (register_hook), and a program computes gradients without hooks. Change the value in the forward, or the "
            f"gradient in the optimizer. {WAY_OUT}"
        )
    if hooked := _hooked(named):
        raise CaptureError(
            f"{hooked[0]} has a hook that runs once its gradient is accumulated (register_post_accumulate_grad_hook). {WAY_OUT}"
        )


def _hooked(named: NamedParameters) -> list[str]:
    return [name for name, each in named if getattr(each, "_post_accumulate_grad_hooks", None)]


@contextmanager
def hooks_kept(named: NamedParameters, plan: Plan) -> Iterator[None]:
    """A context for the chunks of a step of several, which raises `JobError` naming a parameter on which they leave more hooks than they
    found: with each chunk on one device there would be another one, and replicas have but those of their own chunks."""
    before = [_num_hooks(each) for _, each in named]
    yield
    for (name, parameter), hooks in zip(named, before, strict=True):
        if (more := _num_hooks(parameter) - hooks) > 0:
            raise JobError(
                f"{name} has {format_count(more, 'more hook')} after its chunks' forwards and backwards than before: the loss registers one in every forward, they "
                f"pile up, and each of the {plan.num_chunks} chunks of a step of {plan} would see others. Register it once, where the model is built."
            )


def _num_hooks(parameter: Tensor) -> int:
    after: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return len(parameter._backward_hooks or ()) + len(after or ())


class SharedWriteError(TrainingError):
    """Raised on all ranks in the first step, before any update: forwards write the one copy of the parameters that replicas
    of a host have, and with copies of their own each replica writes its own."""


def check_frozen(frozen: NamedParameters) -> None:
    """Raise `TrainingError` for a parameter that was frozen when the replica was built and is not now."""
    for name, parameter in frozen:
        if parameter.requires_grad:
            raise TrainingError(
                f"{name} was frozen when the Trainer was built and now has requires_grad=True. Build a new Trainer after unfreezing."
            )


class OwnMemory:
    """What a forward gives other memory (`.data = ...`) has its own again, with the values. trained: to which forwards may give other."""

    def __init__(self, trained: NamedParameters) -> None:
        self._parameters = [each for _, each in trained]
        self._places, self._memory = list[int](), list[Tensor]()  # of these, as the step found them

    @contextmanager
    def chunks(self, step: int) -> Iterator[None]:
        """A context for a step's chunks."""
        places = [each.data_ptr() for each in self._parameters]
        if places != self._places:
            self._places, self._memory = places, [each.data for each in self._parameters]
        yield
        for parameter, memory, place in zip(self._parameters, self._memory, places, strict=True):
            if parameter.data_ptr() != place:
                memory.copy_(parameter.data)
                parameter.data = memory


class ChunkWrites:
    """Parameters of one rank that no chunk may write.

    frozen: those that nothing trains and that count as no buffers. of_copy: those of which replicas have one copy. world: all ranks, which are told
    of a write to that copy in the first step; None: they do not wait for it.
    """

    def __init__(self, frozen: NamedParameters, of_copy: NamedParameters, world: Group | None) -> None:
        self._frozen, self._world = dict(frozen), world
        self._watched = [*frozen, *of_copy]
        self._first_looks = FIRST_LOOKS if frozen else 0
        self._since_update: list[tuple[int, int]] = []  # of the one copy
        self._steps = 0
        self._written: str | None = None  # in the one copy, in the first step

    @contextmanager
    def chunks(self, step: int) -> Iterator[None]:
        """A context for a step's chunks. Raises `JobError` for a frozen parameter that is written, and `TrainingError` for one of the one copy."""
        before = self._since_update or list(map(_counted, self._watched))
        looks = self._steps < self._first_looks or self._steps % LOOK_EVERY == 0
        seen = ParameterWrites(self._watched) if looks else None
        self._steps += 1
        yield
        if seen or before != list(map(_counted, self._watched)):
            self._note_written(before, seen)

    def _note_written(self, before: Sequence[tuple[int, int]], seen: ParameterWrites | None) -> None:
        pairs = zip(self._watched, before, map(_counted, self._watched), strict=True)
        written = [name for (name, _), was, is_now in pairs if was != is_now]
        written += seen.names() if seen else []
        if untrained := [name for name in dict.fromkeys(written) if name in self._frozen]:
            raise untrained_write(untrained)
        self._written = next(iter(written), None)
        if self._written is not None and not (self._world and self._steps == 1):
            raise _copy_written(TrainingError, self._written)

    def check_copy(self, step: int, gradients: Averaged) -> Averaged:
        """In the first step, before any update: raise `SharedWriteError` on all ranks if the one copy was written on one."""
        if self._world and self._steps == 1:
            self._check_all(self._world)
        return gradients

    def _check_all(self, world: Group) -> None:
        name = next(filter(None, collect(world, self._written)), None)
        if name is not None:
            raise _copy_written(SharedWriteError, name)

    def updated(self, found: object) -> None:
        """All ranks have updated the one copy."""
        self._since_update = list(map(_counted, self._watched))


def _copy_written(kind: type[TrainingError], name: str) -> TrainingError:
    return kind(
        f"{name} was changed outside the optimizer (in a forward, a hook or between steps), and all replicas of this host have one copy of it: the change "
        "would be made once by each. Leave it to the optimizer, compute the changed value anew in forward, or let ranks communicate over Gloo "
        "(--transport gloo), where every replica has a copy of its own."
    )


def _counted(named: tuple[str, nn.Parameter]) -> tuple[int, int]:
    """By these a parameter's writes show that torch counts, and other memory."""
    return named[1]._version, named[1].data_ptr()


def count_overflows(
    gradients: Sequence[Tensor | None], team_sums: TeamSums, replicas: Group, device: torch.device
) -> Tensor:
    """The number of ranks of all replicas with a gradient that is not finite, float64 [1], on each of them."""
    values = [
        each if each.layout == torch.strided else each._values()  # pyright: ignore[reportPrivateUsage]
        for each in gradients
        if each is not None
    ]
    values = [each for each in values if each.numel()]
    flag = torch.zeros(1, dtype=torch.float64, device=device)
    if values:
        largest = torch._foreach_norm(values, math.inf)  # pyright: ignore[reportPrivateUsage]
        flag += ~torch.stack([each.double() for each in largest]).isfinite().all()
    for axis in ("tp", "pp"):
        team_sums.add_up(axis, flag)
    if replicas.size > 1:
        replicas.all_reduce(flag).wait()
    return flag


def check_finite(
    locate: Callable[[], list[Any] | None], world: Group, step: int, total: float, weight: float,
    overflowed: LossScale | None = None,
) -> None:  # fmt: skip
    """Raise the same error on all ranks when the loss of the global batch is not finite or has no weight.

    locate: as `Stages.locate`.
    overflowed: the scale with which gradients are not finite; the step is then skipped, unless a smaller scale will not help.
    """
    if overflowed and overflowed.scale <= LEAST and math.isfinite(total) and weight > 0:
        raise TrainingError(
            f"The gradients of step {step} overflow float16 even with the loss scaled by {overflowed.scale:.1e}, after {overflowed.skipped} skipped steps. Look for a "
            "division by zero or a logarithm of zero in the loss, or use precision=bf16-mixed, which needs no scale."
        )
    if weight > 0 and (math.isfinite(total) or (overflowed and overflowed.scale > 1)):
        return
    raise _not_finite(locate, world, step, total, weight)


def _not_finite(
    locate: Callable[[], list[Any] | None],
    world: Group,
    step: int,
    total: float,
    weight: float,
) -> DataError | TrainingError:
    """The same on all ranks."""
    if math.isfinite(total):
        return DataError(
            f"The weights of all chunks of step {step} sum to {weight:g}, so there is no mean loss. Leave out batches without anything to average over."
        )
    here = locate()
    found = collect(world, here)
    _, rank, where = min(
        ((each[0], rank, each[1]) for rank, each in enumerate(found) if each),
        default=(0, 0, "the sum over all chunks overflowed"),
    )
    return TrainingError(
        f"The loss of step {step} is {total / weight if weight else math.nan:g}: rank {rank}, {where}. The parameters were not updated; "
        "lower the learning rate, clip gradients, or look at this batch."
    )


def check_groups(updater: Updater, world: Group, mesh: Mesh, when: str) -> None:
    """Raise `JobError` on all ranks for the first group of an optimizer of which a setting differs between ranks that update
    something of it; of learning rates all ranks count, as sums compare them. when: it was, as the beginning of a sentence."""
    groups = [
        (optimizer, number, group)
        for optimizer in updater.state.optimizers
        for number, group in enumerate(optimizer.param_groups)
    ]
    averages = updater.state.averages
    decay = {"the decay of averages": json.dumps(averages.decay if averages else None)}
    mine = [
        {"class": json.dumps(type(optimizer).__name__), **decay, **_settings(group)}
        for optimizer, _, group in groups
    ]
    everyone: list[list[dict[str, str]]] = collect(world, mine)
    fewest = min(map(len, everyone))
    found = next(_unlike([theirs[:fewest] for theirs in everyone]), None)
    needs = (
        "All ranks update one model, so they need the same: compute it from the number of the step, not from what a rank has for itself (its samples, "
        "its clock, its draws)."
    )
    if found is not None:
        optimizer, number, _ = groups[found[0]]
        what = f"{'the learning rate' if found[1] == 'lr' else found[1]} of group {number} of {type(optimizer).__name__}"
        there, here = (f"{value} on {rank_name(rank, mesh)}" for rank, value in found[2])
        raise JobError(f"{when} {what} is {there} and {here}. {needs}")
    if any(len(theirs) != fewest for theirs in everyone):
        counts = ", ".join(f"{len(theirs)} on rank {rank}" for rank, theirs in enumerate(everyone))
        raise JobError(f"{when} the optimizers have other numbers of groups: {counts}. {needs}")


def _unlike(
    everyone: Sequence[Sequence[Mapping[str, str]]],
) -> Iterator[tuple[int, str, list[tuple[int, str]]]]:
    """Every setting that is not the same on two ranks: the number of its group, its name, and both ranks with their values."""
    for number, of_ranks in enumerate(zip(*everyone, strict=True)):
        for name in dict.fromkeys(name for each in of_ranks for name in each):
            first, *others = [(rank, each[name]) for rank, each in enumerate(of_ranks) if name in each]
            yield from ((number, name, [first, other]) for other in others if other[1] != first[1])


def _settings(group: Mapping[str, Any]) -> dict[str, str]:
    """Those of a group that can be compared, as JSON: of one of which nothing is updated here, its learning rate alone."""
    found: dict[str, str] = {}
    for name, value in group.items():
        if name == "lr" or (group["params"] and name not in ("params", "param_names")):
            with suppress(NotPlainError):
                found[name] = json.dumps(to_json(value))
    return found
