"""The one optimizer path: clip what this rank owns, step the user's optimizers on it, step their schedulers.

The user's function gets named parameters of full shape, so that groups by name or ndim mean what they mean on
one device. Where several ranks own slices (along dp) or hold shards (along tp), only `group["params"]`
changes afterwards (`assignment.py`). The optimizer objects stay, because schedulers hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from meshloom.comm.group import Group
from meshloom.core.errors import JobError
from meshloom.core.job import Job, NamedParameters
from meshloom.exchange.exchange import Ownership, Slice
from meshloom.optimizer.assignment import UpdatedParameters, assign_everything, assign_parts
from meshloom.optimizer.clipping import clip
from meshloom.optimizer.masters import Masters
from meshloom.optimizer.offload import OffloadedState, offload_state
from meshloom.optimizer.optimizer_state import OptimizerState
from meshloom.optimizer.user_optimizer import (
    UserOptimizers,
    make_optimizers,
    make_schedulers,
    reach_in_words,
    takes_closure,
)
from meshloom.parameters.shards import Shards
from meshloom.telemetry.traffic import ExpectedBytes, Traffic

# evaluates the loss once more: what `Exchange.finish` returns, and the loss
Evaluate = Callable[[], tuple[Sequence[Tensor | None], float]]


class Updater:
    """Updates what this rank owns, once a step.

    named_parameters: every trainable parameter by name, each once, full. A parameter that the user's function
    gives to no optimizer is not updated.
    shards: how parameters are sharded over tp; `ownership` is over these. local: what this rank holds of them,
    under the same names. stages: the ranks along pp, each of which updates other parameters: those in
    `local`.
    user: what the job's optimizer function has returned for the named parameters, if it was called already.
    device: of what is updated; None: that of the named parameters.
    offload: whether the optimizers' state is kept elsewhere: on disk, or, of parameters on a GPU, in host memory.
    scaled: whether the loss is, so that updates may be skipped. evaluations: of the loss so far, for updates.
    Parameters that are replicated over tp are updated by each rank, from gradients with the same bits.
    by_metric: schedulers that evaluations step. Raises `JobError` for optimizers or schedulers that cannot be used.
    """

    def __init__(
        self,
        job: Job,
        named_parameters: NamedParameters,
        ownership: Ownership,
        shards: Shards | None = None,
        local: NamedParameters | None = None,
        stages: Group | None = None,
        user: UserOptimizers | None = None,
        device: torch.device | None = None,
        offload: bool = False,
        *,
        scaled: bool = False,
    ) -> None:
        self._job, self._ownership, self._stages = job, ownership, stages
        self._shards = shards = shards or Shards({}, None)
        self._device = device or named_parameters[0][1].device
        user = user or make_optimizers(job, named_parameters)
        self._optimizers = user.optimizers
        is_divided = ownership.owners is not None or bool(shards.pieces) or stages is not None
        check_stages(user, stages.size if stages is not None else 1)
        self._looks_at_whole = any(reach != "element" for reach in user.reaches)
        self.takes_closures = any(map(takes_closure, user.optimizers))
        self._evaluations = 0
        _check_closures(user, ownership, offload=offload, scaled=scaled)
        self._by_steps, self.by_metric = make_schedulers(job, user.returned)
        self.updated = (
            assign_parts(
                user, named_parameters, named_parameters if local is None else local, ownership, shards
            )
            if is_divided
            else assign_everything(user, named_parameters, ownership)
        )
        # how gradients reach whole parameters, and how updated values return
        self._fetch, self._give_back = _of_whole(self.updated) if self._looks_at_whole else ([], [])
        self._theirs, self._own = _by_whose_gradients(self.updated, ownership)
        clips = job.clip_grad_norm is not None
        self._counted = (
            _counted_here(ownership.owned, shards, self._device) if shards.size > 1 and clips else None
        )
        self._offloaded: OffloadedState | None = None
        if offload:
            self._offloaded = offloaded = offload_state(user.optimizers, user.in_windows, self._device)
            held = [
                [replace(each, tensor=offloaded.updated(each.tensor)) for each in parts]
                for parts in self.updated.held
            ]
            self.updated = replace(self.updated, held=held)
        self.masters: Masters | None = None  # that it updates in place of parameters
        self.state = OptimizerState(
            user, [*self._by_steps, *self.by_metric], self.updated, self._device, self._offloaded
        )

    def take_masters(self, masters: Masters) -> None:
        """From now on these are updated in place of parameters, which get their values."""
        self.masters, self.state.masters = masters, masters.held
        self._give_back.append(masters.publish)

    def open(self, files: Path | None) -> None:
        """Make what state is offloaded to, before the first update. files: the run's directory, if it has one. Raises
        `PlanError` if there is no room."""
        if self._offloaded:
            self._offloaded.open(files)

    def close(self) -> None:
        """After the last update."""
        if self._offloaded:
            self._offloaded.close()

    @property
    def fetch_ahead(self) -> Callable[[], None] | None:
        """What is called before gradients are computed; None: nothing is offloaded."""
        return self._offloaded.begin_step if self._offloaded else None

    def update(
        self, gradients: Sequence[Tensor | None], loss: float, *, rate: float = 1.0, evaluate: Evaluate | None = None, skip: bool = False
    ) -> Tensor | None:  # fmt: skip
        """Clip and step; the gradient's norm before clipping, float64 [], None if the job does not clip.

        gradients: what `Exchange.finish` returned: of each owned slice, flat; None was not used. Scaled in place.
        loss: mean over the global batch, for schedulers that look at it. rate: what the learning rates are
            multiplied by in this update. evaluate: for optimizers that take a closure. skip: neither optimizers nor
            schedulers step, and there is no norm; the ranks meet as in any update.
        """
        before = [(target, target.grad) for target in self._theirs]
        norm = self._take(self.masters.raised(gradients) if self.masters else gradients)
        if not skip:
            with _scaled(self._optimizers, rate) if rate != 1.0 else nullcontext():
                for optimizer in self._optimizers:
                    if self.takes_closures and evaluate is not None:
                        _step_with_closure(optimizer, loss, partial(self._evaluated, evaluate))
                    else:
                        self._offloaded.step(optimizer) if self._offloaded else optimizer.step()
        for target, gradient in before:
            target.grad = gradient  # it is the exchange's
        for target in self._own:
            target.grad = None
        for give_back in self._give_back:
            give_back()
        for scheduler in self._by_steps if not skip else ():
            scheduler.step(loss) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()
        return None if skip else norm

    def _take(self, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """Clip, and give the optimizers their gradients; the norm."""
        limit = self._job.clip_grad_norm
        self._evaluations += 1
        norm = None if limit is None else self._clipped(gradients, limit)
        for target, gradient in zip(self.updated.targets, gradients, strict=True):
            if target is not None:
                if (
                    gradient is not None
                    and gradient.shape != target.shape
                    and gradient.layout == torch.strided
                ):
                    gradient = gradient.view(target.shape)
                target.grad = gradient
        for fetch in self._fetch:
            fetch(gradients)
        return norm

    def _clipped(self, gradients: Sequence[Tensor | None], limit: float) -> Tensor:
        """Their norm before they were clipped."""
        over_tp = self._shards.group if self._counted is not None else None
        holders = [group for group in (over_tp, self._stages) if group is not None]
        return clip(
            gradients, limit, self._ownership.owners, self._device, holders=holders, counted=self._counted
        )

    def _evaluated(self, evaluate: Evaluate) -> float:
        """The loss where an optimizer has moved the parameters; the gradients there are set."""
        if self.updated.from_shards:
            self.updated.from_shards.give_back()
        gradients, loss = evaluate()
        self._take(gradients)
        return loss

    def parameters_changed(self) -> None:
        """Parameters have new values that no update made."""
        if self.updated.from_shards:
            self.updated.from_shards.invalidate()

    def learning_rates(self) -> list[float]:
        """Of every group of every optimizer that has one."""
        return [
            float(group["lr"])
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            if group.get("lr") is not None
        ]

    def notes(self) -> list[str]:
        """What the user should know of how schedulers are stepped, before the first step."""
        looking = [scheduler for scheduler in self._by_steps if isinstance(scheduler, ReduceLROnPlateau)]
        offloaded = self._offloaded.notes() if self._offloaded else []
        return offloaded + [
            f"ReduceLROnPlateau is stepped after every step, with that step's training loss: patience={scheduler.patience} are steps, not epochs or "
            "evaluations. Choose its patience and threshold for that, or let evaluations step it: Evaluate(..., scheduler=ml.ByMetric(function, 'val_loss'))."
            for scheduler in looking[:1]
        ]

    def expected_bytes(self) -> ExpectedBytes:
        """Of updates, for the norm and for full parameters, and of saved state."""
        parts, expected, norm = self.updated, self.state.expected_bytes(), Traffic()
        groups = {"dp": self._ownership.owners, "tp": self._counted, "pp": self._stages}
        for axis, over in groups.items():
            norm += Traffic.along(axis, all_reduce=8) if over is not None else Traffic()
        fulls = [each.expected_bytes() for each in (parts.from_slices, parts.from_shards) if each]
        whole = sum(fulls, ExpectedBytes())
        expected += self.masters.expected_bytes() if self.masters else ExpectedBytes()
        sent = norm if self._job.clip_grad_norm is not None else Traffic()
        sent += whole.per_step if self._looks_at_whole else Traffic()
        often = self.takes_closures
        expected += ExpectedBytes(so_far=sent * self._evaluations) if often else ExpectedBytes(per_step=sent)
        return expected + replace(whole, per_step=Traffic())


def _step_with_closure(optimizer: Any, loss: float, evaluated: Callable[[], float]) -> None:
    """The closure gives the loss at its parameters' values, with gradients. The first time these are there already:
    `loss`."""
    known = [loss]
    optimizer.step(lambda: torch.tensor(known.pop() if known else evaluated(), dtype=torch.float64))


def _of_whole(
    parts: UpdatedParameters,
) -> tuple[list[Callable[[Sequence[Tensor | None]], None]], list[Callable[[], None]]]:
    """How gradients reach parameters that are updated as a whole, and how their values return."""
    slices, shards = parts.from_slices, parts.from_shards
    fetch, give_back = ([slices.fetch], [slices.give_back]) if slices else ([], [])
    if shards:
        fetch.append(lambda gradients: shards.fetch())
        give_back.insert(0, shards.give_back)
    return fetch, give_back


def _by_whose_gradients(
    parts: UpdatedParameters, ownership: Ownership
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """What gets gradients here: parameters whose `.grad` is the exchange's, and what was made for updates alone."""
    theirs = {id(each.parameter) for each in ownership.owned}.union(map(id, parts.full))
    targets = [each for each in (*parts.targets, *parts.full) if each is not None]
    return [each for each in targets if id(each) in theirs], [
        each for each in targets if id(each) not in theirs
    ]


def _counted_here(owned: Sequence[Slice], shards: Shards, device: torch.device) -> list[Tensor | bool]:
    """Which elements of each owned slice this rank counts in the norm."""
    counted: list[Tensor | bool] = []
    for slice_ in owned:
        which = shards.speaks_for(slice_.name)
        counted.append(which if isinstance(which, bool) else which[slice_.start : slice_.stop].to(device))
    return counted


def check_stages(user: UserOptimizers, num_stages: int) -> None:
    """Raise `JobError` for an optimizer that gets all parameters, where stages have some each."""
    if num_stages > 1 and (optimizer := user.looks_at_all) is not None:
        why, instead = reach_in_words(optimizer)
        raise JobError(f"{why}, and with pp={num_stages} no rank has them all.{instead or ' Use dp or tp.'}")


def _check_closures(user: UserOptimizers, ownership: Ownership, *, offload: bool, scaled: bool) -> None:
    kind = next((type(each).__name__ for each in user.optimizers if takes_closure(each)), None)
    if kind is not None and scaled:
        raise JobError(
            f"{kind} evaluates the loss several times in an update, of which none can be skipped when gradients overflow float16. Use precision=bf16-mixed, or an "
            "optimizer that evaluates it once."
        )
    if kind is not None and (ownership.owners is not None or ownership.independent or offload):
        raise JobError(
            f"{kind} looks at all parameters and at its history of them in every evaluation of the loss, so every rank keeps all of both, equal on all; "
            "under this plan ranks would not. Use zero=0, exchange=all_reduce and offload=none."
        )


@contextmanager
def _scaled(optimizers: Sequence[Optimizer], rate: float) -> Iterator[None]:
    """With the learning rates multiplied by `rate`; schedulers do not see it."""
    groups = [group for each in optimizers for group in each.param_groups]
    own = [(group, group["lr"]) for group in groups if "lr" in group]
    for group, learning_rate in own:
        group["lr"] = learning_rate * rate
    try:
        yield
    finally:
        for group, learning_rate in own:
            group["lr"] = learning_rate
