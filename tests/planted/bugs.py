"""The list of planted bugs, what each is run with, and what verification is to say of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshloom.core.job import Evaluate, Job
from meshloom.core.plan import Plan
from meshloom.exchange.all_reduce import AllReduce
from meshloom.exchange.zero import ZeroOne
from meshloom.exchange.zero_three import ZeroThree
from meshloom.exchange.zero_two import ZeroTwo
from meshloom.optimizer.updater import Updater
from meshloom.verify.findings import Report
from meshloom.verify.run import verify
from tests.jobs import make_job, vectors
from tests.planted.models import MORE_MODELS

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]
Gradients = dict[str, Tensor | None]  # of the slices that a rank owns
TWO = "dp=2,microbatches=2"
STAGES = "pp=2,microbatches=3"
PARTS = "tp=2,tp_placements=first.weight:row+second.weight:column"
EXCHANGES: tuple[Any, ...] = (AllReduce, ZeroOne, ZeroTwo, ZeroThree)
BUGS: list[Bug] = []


@dataclass(frozen=True, kw_only=True)
class Bug:
    """What is planted, and where it shows. job: "model-optimizer". causes: kinds that name it, of which one is the first cause, or says: a
    part of the report. module: the first module that is wrong, if there is one."""

    plant: Plant
    area: str
    job: str
    plan: str
    causes: tuple[str, ...]
    says: str
    module: str | None
    number: int  # of the jobs that it is planted in

    @property
    def name(self) -> str:
        """For tests."""
        further = f"-{self.number}" if self.number else ""
        return f"{self.area}-{self.plant.__name__}{further}"


def bug(
    job: str = "mlp-adamw", plan: str = TWO, *, causes: str = "", says: str = "", module: str | None = None
) -> Callable[[Plant], Plant]:
    """Adds a function that plants a bug to the list."""

    def add(plant: Plant) -> Plant:
        area = plant.__module__.rpartition(".")[2]
        kinds = tuple(causes.replace("_", " ").split("|")) if causes else ()
        before = [each for each in BUGS if _place(each.plant) == _place(plant)]
        # pytest imports a module twice that is in a package and has doctests collected
        if all((each.job, each.plan) != (job, plan) for each in before):
            BUGS.append(
                Bug(
                    plant=plant, area=area, job=job, plan=plan, causes=kinds, says=says, module=module, number=len(before)
                )
            )  # fmt: skip
        return plant

    return add


def at_precision(bug: Bug, precision: str) -> Bug:
    """The bug in the same job at another precision than float32; one whose plan has a precision already is itself."""
    has = "precision=" in bug.plan
    return bug if has else replace(bug, plan=f"{bug.plan},precision={precision}")


def _place(plant: Plant) -> tuple[str, int]:
    return plant.__code__.co_filename, plant.__code__.co_firstlineno


def job_of(name: str) -> Job:
    """A job that is evaluated and goes over the end of an epoch: 30 samples in batches of 13."""
    model, optimizer = name.split("-")
    base = model.removeprefix("averaged_") if model.startswith("averaged_") else model
    job = make_job("mlp" if base in MORE_MODELS else base, optimizer, batch_size=13, steps=40)
    job = replace(job, average=0.9) if base != model else job
    job = replace(job, **MORE_MODELS.get(base, {}))
    metrics = {"loss": lambda model, batch: job.loss(model, batch)}
    data = vectors if model == "lines" else job.data
    return replace(job, evaluate=Evaluate(data=data, metrics=metrics, every=2))


def whole(name: str, plan: str = TWO, dtype: torch.dtype | None = None) -> Report:
    """The job verified at the defaults."""
    report = verify(job_of(name), Plan.parse(plan), devices="simulated", dtype=dtype, quick=False)
    assert report
    return report


def wrap(patch: Patch, owner: Any, name: str, new: Callable[..., Any]) -> None:
    """`owner.name` becomes `new`, whose first argument is the function that was there."""
    right = getattr(owner, name)
    patch.setattr(owner, name, lambda *given, **settings: new(right, *given, **settings))


def after_finish(patch: Patch, change: Callable[[Any, Gradients, int], None]) -> None:
    """Calls `change` with the exchange, its averaged gradients by name, which it changes in place, and the number of the step."""
    steps: dict[int, int] = {}
    for kind in EXCHANGES:

        def finished(right: Any, self: Any, weight: Any) -> Any:
            found = yield from right(self, weight)
            named = {each.name: gradient for each, gradient in zip(self.owned, found, strict=True)}
            change(self, named, steps.setdefault(id(self), 0))
            steps[id(self)] += 1
            return [named[each.name] for each in self.owned]

        wrap(patch, kind, "finish", finished)


def around_update(
    patch: Patch,
    before: Callable[[Updater, int], None] = lambda updater, step: None,
    after: Callable[[Updater, int], None] = lambda updater, step: None,
) -> None:
    """Calls `before` and `after` around each update, with the number of the update of this updater."""
    updates: dict[int, int] = {}

    def updated(right: Any, self: Updater, *given: Any, **settings: Any) -> Any:
        number = updates.setdefault(id(self), 0)
        before(self, number)
        norm = yield from right(self, *given, **settings)
        after(self, number)
        updates[id(self)] += 1
        return norm

    wrap(patch, Updater, "update", updated)


def groups_of(updater: Any) -> Iterator[dict[str, Any]]:
    """Of all its optimizers."""
    for optimizer in updater._optimizers:
        yield from optimizer.param_groups


def states_of(updater: Any) -> Iterator[dict[str, Any]]:
    """Of what this rank updates, in order."""
    for optimizer in updater._optimizers:
        for group in optimizer.param_groups:
            yield from (optimizer.state[each] for each in group["params"] if each in optimizer.state)


def on_models(patch: Patch, change: Callable[[nn.Module, int], None]) -> None:
    """Calls `change` with each replica's model and its number, once it is whole, where modules run as they are."""
    from meshloom.replica.module_engine import ModuleEngine

    def connected(right: Any, self: Any, exchange: Any) -> Any:
        change(self._model, self._context.place.dp)
        return right(self, exchange)

    wrap(patch, ModuleEngine, "connect", connected)
