"""Finds what a loss writes besides buffers: parameters that nothing trains (a teacher's moving average), trained ones (a
mask, a clamp, rows of tables with `max_norm`).

The loss runs once, on one batch, before anything is shared or sliced; operators that write are seen as they run. Where a
trained parameter is written it runs five times more. The model is as before afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.comm.objects import on_rank_0, share
from meshloom.comm.rank_context import RankContext
from meshloom.comm.steps import Steps
from meshloom.core.buffer_rules import rule_of
from meshloom.core.errors import CODE_ERRORS, DataError, JobError
from meshloom.core.job import Job
from meshloom.core.moments.current_step import Moment
from meshloom.core.moments.uncompiled import uncompiled
from meshloom.core.plan import Plan
from meshloom.core.random import chunk_seed, preserved_draws, seed_torch
from meshloom.data.samples import first_batches
from meshloom.data.to_device import to_device
from meshloom.parameters.starting_model import StartingModel
from meshloom.program.capture.restored import restored
from meshloom.program.capture.writing_code import may_write
from meshloom.program.ir.written_parameters import mark_limited, mark_settled, mark_written
from meshloom.program.trace.attributes import TORCHS_OWN
from meshloom.replica.buffers.batch_norm import unsynchronised
from meshloom.replica.buffers.loss_writes import LossWrites

_ROUNDING = 1e4  # units of the precision


@dataclass(frozen=True, kw_only=True)
class WrittenBesides:
    """What a loss writes: names.

    frozen: parameters that are not trained. limited: trained tables of which embeddings scale the rows that they read.
    settled: trained parameters that become the same in every forward, before they are read -> the module that writes them
    (None: the loss). refused: other trained ones -> why.
    """

    frozen: Sequence[str] = ()
    limited: Sequence[str] = ()
    settled: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    refused: Mapping[str, str] = field(default_factory=dict[str, str])


def mark_what_is_written(
    job: Job, plan: Plan, context: RankContext, start: StartingModel, dtype: torch.dtype | None
) -> Steps[tuple[WrittenBesides, list[str]]]:
    """Marks what counts as buffers, as rank 0 finds it; returns it, and notes for the user. Raises `JobError` for trained
    parameters whose writes would not be those of one device."""
    model, unfilled = start.model, start.unfilled
    losses = [each.loss for each in job.losses.values()] or [job.loss]

    def find() -> WrittenBesides:
        try:
            batches = first_batches(job, 2, plan.largest_share(job.batch_size)[0])
        except DataError:  # which training meets again
            return WrittenBesides()
        data = [to_device(each, context.device, dtype) for each in batches]

        def loss(number: int) -> list[Any]:
            moment = Moment(chunk_seed(job.seed, number, 0), 0)
            seed_torch(moment.seed)
            with moment.entered():
                return [each(model, data[number % len(data)]) for each in losses]

        return written_by_loss(model, loss, unfilled.standing_in if unfilled else nullcontext)

    mark_written(
        model,
        [
            name
            for name, each in model.named_parameters()
            if not each.requires_grad and rule_of(name, job.buffers) is not None
        ],
    )
    all_trained = all(each.requires_grad for each in model.parameters())
    if all_trained and not any(may_write(each, model) for each in losses):
        return WrittenBesides(), []
    values = yield from share(
        context.world, (yield from on_rank_0(context.world, lambda: vars(find()), JobError))
    )
    found = WrittenBesides(**values)
    _check_frozen(found.frozen, job, plan)
    mark_written(model, found.frozen)
    if plan.captures:
        mark_settled(model, {name: path for name, path in found.settled.items() if path is not None})
    mark_limited(model, found.limited)
    check_limited(found.limited, plan)
    _check(found, plan)
    return found, _notes(found, plan)


def written_by_loss(
    model: nn.Module, loss: Callable[[int], list[Any]], within: Callable[[], AbstractContextManager[Any]]
) -> WrittenBesides:
    """What `loss` writes; nothing if it cannot be run here, as its first step will then say why.

    loss: runs it on one of several batches, with the draws of that number. within: the context that gives the model its
    values.
    """
    with ExitStack() as around:
        around.enter_context(within())
        around.enter_context(unsynchronised(model))
        try:
            writes, _ = _watched(model, loss, 0)
            trained = {
                name: path for name, path in writes.found.items() if model.get_parameter(name).requires_grad
            }
            trained |= {name: None for name in writes.replaced if model.get_parameter(name).requires_grad}
            if writes.replaced & trained.keys():
                why = "another parameter is put in its place"
            else:
                why = _why_not_settled(model, loss, trained) if trained else ""
        except CODE_ERRORS:  # training meets it again
            return WrittenBesides()
    return WrittenBesides(
        frozen=[
            name for name in dict(model.named_parameters()) if name in writes.found and name not in trained
        ],
        limited=sorted(writes.limited),
        settled={} if why else trained,
        refused=dict.fromkeys(trained, why) if why else {},
    )


@contextmanager
def _alone(model: nn.Module) -> Iterator[None]:
    """All as it was before afterwards; no attribute and no hook is new: a forward that finds one may add the other once more."""
    before = [(vars(module), set(vars(module)), _hooks(module)) for module in model.modules()]
    try:
        with restored(model), preserved_draws(), uncompiled():
            yield
    finally:
        for attributes, known, hooks in before:
            for name in attributes.keys() - known:
                del attributes[name]
            for name, registered in hooks.items():
                for number in attributes[name].keys() - registered:
                    del attributes[name][number]


def _hooks(module: nn.Module) -> dict[str, set[int]]:
    """Torch's registers of hooks -> the numbers in them."""
    return {name: set(each) for name, each in vars(module).items() if "_hooks" in name and name in TORCHS_OWN}


def _watched(model: nn.Module, loss: Callable[[int], list[Any]], number: int) -> tuple[LossWrites, list[Any]]:
    writes = LossWrites(model)
    with _alone(model):
        try:
            with writes:
                found = loss(number)
        finally:
            writes.put_back()
    return writes, found


def _why_not_settled(
    model: nn.Module, loss: Callable[[int], list[Any]], trained: Mapping[str, str | None]
) -> str:
    """Why these writes are not of the kind that leaves the same values whenever it is done, before anything reads them;
    "" if they are. Tried with values that a mask or a clamp changes."""
    parameters = {name: model.get_parameter(name) for name in trained}
    kept = {name: (each.data, each.detach().clone()) for name, each in parameters.items()}

    def run(
        number: int, values: Mapping[str, Tensor], times: int = 1
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        losses: list[Tensor] = []
        with _alone(model):
            for _ in range(times):
                for name, each in parameters.items():
                    each.data = values[name].clone()
                losses = [_first(each).detach().clone() for each in loss(number)]
        return losses, {name: each.detach().clone() for name, each in parameters.items()}

    try:
        moved = {name: value * 2 + value.std(correction=0) / 2 for name, (_, value) in kept.items()}
        losses, once = run(0, moved)
        again, twice = run(0, once)
        _, others = run(1, moved)
        _, second = run(0, moved, times=2)
    finally:
        for name, (memory, value) in kept.items():
            memory.copy_(value)
            parameters[name].data = memory
    if not all(_near(once[name], others[name]) for name in trained):
        return "what is written depends on the batch or on random draws"
    if not all(_near(once[name], second[name]) for name in trained):
        return "not every forward writes it alike"
    if not all(_near(once[name], twice[name]) for name in trained):
        return "each forward changes it further"
    if not all(_near(one, other) for one, other in zip(losses, again, strict=True)):
        return "it is written after it has been read"
    return ""


def _near(one: Tensor, other: Tensor) -> bool:
    limit = _ROUNDING * torch.finfo(one.dtype).eps if one.is_floating_point() else 0.0
    return torch.allclose(one, other, rtol=limit, atol=limit, equal_nan=True)


def _first(value: Any) -> Tensor:
    return value[0] if isinstance(value, tuple | list) else value


def _check_frozen(names: Sequence[str], job: Job, plan: Plan) -> None:
    undeclared = [name for name in names if rule_of(name, job.buffers) is None]
    if undeclared and (plan.num_chunks > 1 or plan.captures):
        name = undeclared[0]
        pattern = f"{name.rpartition('.')[0]}.*" if "." in name else name
        more = f" and {len(undeclared) - 1} more" if len(undeclared) > 1 else ""
        raise JobError(
            f"{name}{more} is not trained, and a step writes it. Say by which rule the chunks of a step write it: "
            f'Job(buffers={{"{pattern}": ml.ema(0.99)}}) with the decay that the loss has, "last" or "sum" (docs/contract.md).'
        )


def check_limited(names: Iterable[str], plan: Plan) -> None:
    """Raises `JobError` for a table with `max_norm` where a forward cannot scale its rows as one device does."""
    for name in names:
        what = f"{name} has max_norm, which scales its rows in the forward, and"
        instead = "or scale in the optimizer step; or leave max_norm out."
        if plan.num_chunks > 1:
            raise JobError(f"{what} a step of {plan} has {plan.num_chunks} chunks. Use one chunk, {instead}")
        if plan.captures or plan.mesh.size > 1:
            raise JobError(f"{what} under {plan} updates alone write what is trained. Use dp=1, {instead}")


def _check(found: WrittenBesides, plan: Plan) -> None:
    way_out = (
        "Compute the changed value anew in the forward, as torch.nn.utils.parametrize does, or change it between steps, in a loop of your own "
        "(Trainer.batches())."
    )
    if found.refused and (plan.num_chunks > 1 or plan.captures):
        name, why = next(iter(found.refused.items()))
        raise JobError(
            f"The loss writes {name}, which is trained, and {why}: chunks of one step would not be those of one device. {way_out}"
        )
    if not found.settled:
        return
    name = next((name for name, path in found.settled.items() if path is None), next(iter(found.settled)))
    if plan.captures and found.settled[name] is None:
        raise JobError(
            f"The loss itself writes {name}, which is trained, and with tp or pp that is no part of its program. Write it in the forward of the module that "
            f"has it, which then runs as written. {way_out}"
        )


def _notes(found: WrittenBesides, plan: Plan) -> list[str]:
    notes: list[str] = []
    if found.settled:
        more = f" and {len(found.settled) - 1} more" if len(found.settled) > 1 else ""
        notes.append(
            f"The forward writes {next(iter(found.settled))}{more}, which is trained, the same in every chunk: each replica writes its own copy (docs/contract.md)."
        )
    if found.settled and plan.zero == 3:
        notes.append(
            "With zero=3 that copy would be let go of, and the change lost, so parameters are kept whole, as with zero=2."
        )
    return notes
