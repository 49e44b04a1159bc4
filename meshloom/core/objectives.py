"""Several losses of one job, each with an optimizer of its own parameters, and what losses, metrics and optimizers are functions of."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from meshloom.core.errors import JobError

# A scalar mean over the batch's samples, or (sum, weight): a scalar sum and the number of items in it.
Loss = Tensor | tuple[Tensor, Tensor | float]
LossFunction = Callable[[Any, Any], Loss]
NamedParameters = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """One of several losses of a job, and the optimizer of the parameters that it trains. Raises `JobError`.

    loss, optimizer, scheduler, clip_grad_norm: as of `Job`, of these parameters alone.
    parameters: names of modules or of parameters, patterns like "*.bias", or a function that says of a
        parameter's name whether it is one of them. This loss computes no gradients of others.
    updates: how often it is computed and its optimizer stepped in a step, on the step's batch. every: steps
        from one in which that is done to the next.

    >>> critic = Objective(
    ...     loss=lambda model, batch: model.critic(batch).mean(),
    ...     optimizer=lambda named: torch.optim.RMSprop(named, lr=5e-5),
    ...     parameters="critic",
    ... )
    >>> critic.trains("critic.0.weight"), critic.trains("critics.0.weight")
    (True, False)
    """

    loss: LossFunction
    optimizer: Callable[[NamedParameters], Optimizer | list[Optimizer]]
    parameters: str | Sequence[str] | Callable[[str], bool]
    scheduler: Callable[[Any], Any] | None = None
    clip_grad_norm: float | None = None
    updates: int = 1
    every: int = 1

    def __post_init__(self) -> None:
        for name in ("loss", "optimizer", "scheduler"):
            value = getattr(self, name)
            if not callable(value) and not (value is None and name == "scheduler"):
                raise JobError(f"Objective({name}=...) must be a function, not {type(value).__name__}.")
            check_takes(f"Objective({name}=...)", value, OBJECTIVE_TAKES[name])
        given = as_list(self.parameters)
        if not callable(self.parameters) and not (given and all(isinstance(each, str) for each in given)):
            raise JobError(
                'Objective(parameters=...) must be names of modules or parameters, like parameters="critic" or parameters=["trunk", "actor"], '
                "or a function of a parameter's name."
            )
        for name, value in (("updates", self.updates), ("every", self.every)):
            if not is_count(value, 1):
                raise JobError(f"Objective({name}={value!r}) must be a whole number, 1 or more.")
        check_clip("Objective", self.clip_grad_norm)

    def trains(self, name: str) -> bool:
        """Whether the parameter of this name is one of its own."""
        if callable(self.parameters):
            return bool(self.parameters(name))
        return any(names_parameter(each, name) for each in as_list(self.parameters))


@dataclass(frozen=True)
class Metric:
    """A metric of all samples together, such as F1 or a rank correlation, whose mean over chunks is another number. Raises `JobError`.

    update: of (model, batch), called for each chunk; returns a tensor [samples, ...], or a tuple or dict of them.
    compute: called once, on rank 0, with what `update` has returned for all samples, in the order of the data and on the CPU: a tensor
        as its argument, a tuple's as its arguments, a dict's by name. Returns one number. It may be an object of torchmetrics; if it has a
        `reset()`, that is called afterwards.

    >>> f1 = Metric(
    ...     update=lambda model, batch: (model(batch["x"]).argmax(1), batch["y"]),
    ...     compute=lambda ours, right: 2 * (ours & right).sum() / (ours.sum() + right.sum()),
    ... )
    """

    update: Callable[[Any, Any], Any]
    compute: Callable[..., Any]

    def __post_init__(self) -> None:
        for name, function in (("update", self.update), ("compute", self.compute)):
            if not callable(function):
                raise JobError(f"Metric({name}=...) must be a function, not {type(function).__name__}.")
        check_takes("Metric(update=...)", self.update, OBJECTIVE_TAKES["loss"])


def owners_of(losses: Mapping[str, Objective], names: Sequence[str]) -> dict[str, str]:
    """Trainable parameter -> the loss that trains it. names: of all of them. Raises `JobError` for one that several
    losses or none of them train, and for what names none."""
    owners: dict[str, str] = {}
    for loss, objective in losses.items():
        given = [] if callable(objective.parameters) else as_list(objective.parameters)
        wrong = [repr(each) for each in given if not any(names_parameter(each, name) for name in names)]
        if wrong or not any(map(objective.trains, names)):
            raise JobError(
                f"parameters={(wrong or ['...'])[0]} of loss {loss!r} names none of the model's {len(names)} trainable parameters, such as "
                f"{', '.join(names[:3])}. Give names of modules or parameters."
            )
        for name in filter(objective.trains, names):
            if owners.setdefault(name, loss) != loss:
                raise JobError(f"{name} belongs to two losses, {owners[name]!r} and {loss!r}. Let the parameters=... of one of them name it.")  # fmt: skip
    left = [name for name in names if name not in owners]
    if left:
        raise JobError(
            f"{left[0]} belongs to no loss{f', and {len(left) - 1} more do not either' if left[1:] else ''}. Name it in the parameters=... of one of "
            f"{', '.join(map(repr, losses))}, or freeze it in the model function (requires_grad_(False))."
        )
    return owners


@dataclass(frozen=True)
class EachItsOwn:
    """The optimizer function of a job of several losses: every loss's optimizers, of its own parameters, in order."""

    losses: Mapping[str, Objective]

    def __call__(self, named: NamedParameters) -> list[Optimizer]:
        return [each for made in self.by_loss(named).values() for each in as_list(made)]

    def by_loss(self, named: NamedParameters) -> dict[str, Any]:
        """What the optimizer function of each loss returns."""
        own = {loss: [] for loss in self.losses}
        owners = owners_of(self.losses, [name for name, _ in named])
        for pair in named:
            own[owners[pair[0]]].append(pair)
        return {loss: each.optimizer(own[loss]) for loss, each in self.losses.items()}


def with_functions_of_their_own(losses: Mapping[str, Objective]) -> dict[str, Objective]:
    """The same losses, no two of which are one function: programs are known by their function."""
    known: set[LossFunction] = set()
    found: dict[str, Objective] = {}
    for name, each in losses.items():
        found[name] = replace(each, loss=_apart(each.loss)) if each.loss in known else each
        known.add(each.loss)
    return found


def _apart(loss: LossFunction) -> LossFunction:
    return lambda model, batch: loss(model, batch)


OBJECTIVE_TAKES = {"loss": ("model", "batch"), "optimizer": ("named",), "scheduler": ("optimizer",)}


def is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_takes(setting: str, function: Any, given: Sequence[str], advice: str = "") -> None:
    """Raises `JobError` for a function that cannot be called with what it will be given. setting: as the user writes it.

    >>> check_takes("Job(loss=...)", lambda batch: batch, ("model", "batch"))
    Traceback (most recent call last):
    meshloom.core.errors.JobError: Job(loss=...) is called with (model, batch), and this function takes (batch).
    """
    if isinstance(function, nn.Module) and type(function).__module__.startswith("torch.nn."):
        calls = f"forward{tuple(inspect.signature(function.forward).parameters)}".replace("'", "")
        raise JobError(
            f"{setting} is called with ({', '.join(given)}), and {type(function).__name__} has {calls}.{advice}"
        )
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # some that are not written in Python have none
        return
    try:
        signature.bind(*given)
    except TypeError:
        takes = ", ".join(signature.parameters)
        raise JobError(
            f"{setting} is called with ({', '.join(given)}), and this function takes ({takes}).{advice}"
        ) from None


def check_clip(of: str, clip: Any) -> None:
    if clip is not None and (isinstance(clip, bool) or not isinstance(clip, int | float) or not clip > 0):
        raise JobError(f"{of}(clip_grad_norm={clip!r}) must be a number above 0, or None for no clipping.")


def names_parameter(text: str, name: str) -> bool:
    return name == text or name.startswith(f"{text}.") or fnmatch.fnmatchcase(name, text)


def as_list(given: Any) -> list[Any]:
    """What may be given, or returned, as one thing or as several."""
    return list(given) if isinstance(given, list | tuple) else [given]
