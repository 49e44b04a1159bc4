"""`meshloom.from_lightning()`: a LightningModule and its data become a job that takes Lightning's steps."""

from __future__ import annotations

import copy
import dis
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from meshloom.adapters.loader_data import (
    EvaluationSamples,
    GroupedCollate,
    LoaderOrder,
    LoaderSamples,
    size_of,
)
from meshloom.adapters.module_loss import LightningLoss, LightningMetric, log_of_module, with_logged
from meshloom.adapters.module_refusals import check_module, is_datamodule, is_overridden
from meshloom.adapters.with_parameters import with_parameters
from meshloom.core.errors import JobError
from meshloom.core.job import Evaluate, Job, NamedParameters
from meshloom.core.moments.by_metric import ByMetric
from meshloom.core.moments.current_step import at_step
from meshloom.core.moments.current_step import step as current_step
from meshloom.core.random import preserved_draws
from meshloom.launch.environment import is_first_rank


def from_lightning(
    module: Any,
    data: Any,
    *,
    max_epochs: int | None = None,
    max_steps: int | None = None,
    accumulate_grad_batches: int = 1,
    gradient_clip_val: float | None = None,
    check_val_every_n_epoch: int = 1,
    best: str | None = None,
    patience: int | None = None,
    seed: int = 0,
) -> Job:
    """A job that takes the steps which Lightning's `Trainer.fit(module, data)` takes on one device, from the same parameters, on the
    same samples in the same order (docs/from_a_trainer.md).

    module: a `LightningModule` with automatic optimization. data: a `LightningDataModule`, or the training's `DataLoader`.
    max_epochs, max_steps, accumulate_grad_batches, gradient_clip_val, check_val_every_n_epoch: as of Lightning's `Trainer`;
        max_epochs or max_steps is given. best, patience: as of `Evaluate`, of what `validation_step` logs.
    seed: of the job's random draws.

    Raises `JobError` for what is no such module, and for hooks and metrics that have no counterpart.
    """
    _check_kind(module)
    counts = {
        "accumulate_grad_batches": accumulate_grad_batches, "check_val_every_n_epoch": check_val_every_n_epoch, "max_epochs": max_epochs, "max_steps": max_steps,
    }  # fmt: skip
    for name, value in counts.items():
        given = value is not None or not name.startswith("max_")
        if given and not (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
            raise JobError(f"from_lightning({name}={value!r}) must be a whole number, 1 or more.")
    if max_epochs is None and max_steps is None:
        raise JobError(
            "from_lightning needs to know how long: give max_epochs=... or max_steps=..., as to Lightning's Trainer."
        )
    left_out = check_module(module, data)
    if left_out and is_first_rank():
        warnings.warn(
            f"{', '.join(left_out)}: not called, as a job has no hooks. self.log in training_step and validation_step is kept; ml.Trainer(listener=...) is told of "
            "each step.",
            stacklevel=2,
        )
    with preserved_draws(), at_step(0):
        opened = _Opened(module, data, accumulate_grad_batches, max_epochs, max_steps)
        evaluate, evaluation_collate = opened.evaluation(check_val_every_n_epoch, best, patience)
        validated = (check_val_every_n_epoch, list(evaluate.metrics) if evaluate else [])
        optimizers = _Optimizers(opened, accumulate_grad_batches, *validated)
        loader = opened.loader
        return Job(
            model=opened.model,
            loss=LightningLoss(
                opened.num_batches,
                accumulate_grad_batches,
                numbered=_uses(module.training_step, "batch_idx"),
            ),
            optimizer=optimizers.optimizer,
            scheduler=optimizers.scheduler,
            data=partial(
                LoaderSamples, loader.dataset, opened.order(check_val_every_n_epoch), loader.batch_size, accumulate_grad_batches
            ),
            batch_size=loader.batch_size * accumulate_grad_batches,
            steps=opened.steps,
            seed=seed,
            collate=GroupedCollate(loader.collate_fn, evaluation_collate),
            num_workers=loader.num_workers,
            shuffle=False,
            clip_grad_norm=gradient_clip_val or None,
            evaluate=evaluate,
        )  # fmt: skip


class _Opened:
    """The module and its data, set up as `fit` does it. module: what the job's models are copies of. num_batches: of an epoch."""

    def __init__(
        self, module: Any, data: Any, accumulation: int, max_epochs: int | None, max_steps: int | None
    ) -> None:
        self._data = data
        if is_datamodule(data):
            data.prepare_data()
            data.setup("fit")
        module.prepare_data()
        module.setup("fit")
        module.configure_model()
        module.to("cpu")
        self.loader: Any = _checked(self._loader("train"), "training")
        self.num_batches = len(self.loader)
        self.steps_per_epoch = -(-self.num_batches // accumulation)
        self.steps = min(
            each for each in (max_steps, max_epochs and max_epochs * self.steps_per_epoch) if each is not None
        )
        self._facts = _TrainerFacts(
            max_epochs=max_epochs if max_epochs is not None else -1, max_steps=max_steps if max_steps is not None else -1,
            estimated_stepping_batches=self.steps, num_training_batches=self.num_batches, accumulate_grad_batches=accumulation, world_size=1, num_devices=1,
            global_rank=0, local_rank=0, is_global_zero=True, training=True, sanity_checking=False, steps_per_epoch=self.steps_per_epoch,
        )  # fmt: skip
        self.module = self.attached(copy.deepcopy(module))
        self.validation = self._validation()

    def model(self) -> nn.Module:
        """The module as it starts."""
        return self.attached(copy.deepcopy(self.module))

    def attached(self, module: Any) -> Any:
        """The module with the run's facts as its trainer, which copies of it leave behind."""
        for each in module.modules():
            if hasattr(each, "configure_optimizers"):
                vars(each).update(_trainer=self._facts, log=log_of_module)
        return module

    def order(self, every: int) -> LoaderOrder:
        """Of the training's loader. every: epochs from one validation to the next."""
        has_validation = self.validation is not None
        return LoaderOrder(
            self.loader,
            self.loader.batch_size,
            lambda epoch: int(has_validation and (epoch + 1) % every == 0),
        )

    def evaluation(
        self, every: int, best: str | None, patience: int | None
    ) -> tuple[Evaluate | None, Callable[[list[Any]], Any] | None]:
        """What is validated, and its collator. every: epochs."""
        loader = self.validation
        if loader is None:
            if best is not None or patience is not None:
                raise JobError(
                    "best=... and patience=... are of validations, and there is no validation_step with data. Leave them out, or give both."
                )
            return None, None
        batches = [list(batch) for batch in loader.batch_sampler]
        trial = self.model().eval()
        with torch.no_grad():
            batch = loader.collate_fn([loader.dataset[each] for each in batches[0]])
            names = list(with_logged(trial.validation_step, batch, 0)[1])
        if not names:
            raise JobError(
                f'{type(self.module).__name__}.validation_step logs nothing. Log what it measures, like self.log("val_loss", loss).'
            )
        metrics = {name: LightningMetric(name) for name in names}
        data = partial(EvaluationSamples, loader, batches, None)
        every_steps = min(every * self.steps_per_epoch, self.steps)
        size = size_of(batches)
        return Evaluate(
            data, metrics, every_steps, best=best, patience=patience, batch_size=size
        ), loader.collate_fn

    def _validation(self) -> Any:
        if not is_overridden(self.module, "validation_step"):
            return None
        loader = self._loader("val")
        return None if loader is None else _checked(loader, "validation")

    def _loader(self, kind: str) -> Any:
        name = f"{kind}_dataloader"
        if is_datamodule(self._data):
            return getattr(self._data, name)() if is_overridden(self._data, name) else None
        return self._data if kind == "train" else None


class _TrainerFacts(SimpleNamespace):
    """What `self.trainer` is in the job's module: facts of the run."""

    @property
    def current_epoch(self) -> int:
        return current_step() // self.steps_per_epoch

    @property
    def global_step(self) -> int:
        return current_step()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise JobError(
            f"self.trainer.{name} has no counterpart in a job. It has {', '.join(sorted(vars(self)))}, current_epoch and global_step."
        )


class _Optimizers:
    """What `configure_optimizers` returns, of any parameters. every: epochs from one validation to the next; metrics: names of what it logs."""

    def __init__(self, opened: _Opened, accumulation: int, every: int, metrics: Sequence[str]) -> None:
        self._every, self._metrics = every, metrics
        self._opened, self._accumulation, self._batches = opened, accumulation, opened.num_batches
        self._schedulers: WeakKeyDictionary[Optimizer, list[Any]] = WeakKeyDictionary()

    def optimizer(self, named: NamedParameters) -> Optimizer:
        from lightning.pytorch.core import optimizer as of_lightning

        module = self._opened.attached(with_parameters(self._opened.module, named))
        internals: Any = of_lightning
        with at_step(0):
            made = module.configure_optimizers()
        kind = type(module).__name__
        if made is None:
            raise JobError(f"{kind}.configure_optimizers returned None. Return an optimizer.")
        optimizers, schedulers, monitor = internals._configure_optimizers(made)
        if len(optimizers) != 1:
            raise JobError(
                f"{kind}.configure_optimizers returned {len(optimizers)} optimizers, which Lightning steps by hand. Give each loss an ml.Objective in Job(losses=...)."
            )
        configs = internals._configure_schedulers_automatic_opt(schedulers, monitor)
        self._schedulers[optimizers[0]] = [self._as_steps_go(config) for config in configs]
        return optimizers[0]

    def _as_steps_go(self, config: Any) -> Any:
        """A scheduler of Lightning as one of a job."""
        if not config.reduce_on_plateau:
            return PacedScheduler(
                config.scheduler, config.interval, config.frequency, self._batches, self._accumulation
            )
        kind = type(config.scheduler).__name__
        if config.monitor not in self._metrics:
            logged = f"logs {', '.join(self._metrics)}" if self._metrics else "logs nothing"
            raise JobError(
                f"{kind} with monitor={config.monitor!r} goes by a value of training, and a job's by one of validations; validation_step {logged}. Monitor one of these."
            )
        if (config.interval, config.frequency) != ("epoch", self._every):
            raise JobError(
                f"{kind} is stepped every {config.frequency} {config.interval}s, and a job's after each validation, which is every {self._every} epochs "
                "(check_val_every_n_epoch). Give both the same frequency."
            )
        return ByMetric(config.scheduler, config.monitor)

    def scheduler(self, optimizer: Optimizer) -> list[Any]:
        return self._schedulers[optimizer]


class PacedScheduler:
    """Steps a scheduler when Lightning does. interval: "step" or "epoch". frequency: of them. batches: of an epoch, of which
    `accumulation` make a step."""

    def __init__(
        self, scheduler: Any, interval: str, frequency: int, batches: int, accumulation: int
    ) -> None:
        self._scheduler, self._interval, self._frequency = scheduler, interval, frequency
        self._batches, self._accumulation = batches, accumulation
        self._taken = 0

    def step(self) -> None:
        """After each step of the job."""
        per_epoch = -(-self._batches // self._accumulation)
        epoch, place = divmod(self._taken, per_epoch)
        self._taken += 1
        if self._interval == "step":
            batch = min((place + 1) * self._accumulation, self._batches)  # Lightning counts batches here
            is_due = batch % self._frequency == 0
        else:
            is_due = place == per_epoch - 1 and (epoch + 1) % self._frequency == 0
        if is_due:
            self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self._taken, "scheduler": self._scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._taken = state["taken"]
        self._scheduler.load_state_dict(state["scheduler"])


def _check_kind(module: Any) -> None:
    from lightning.pytorch import LightningModule

    if not isinstance(module, LightningModule):
        kind = type(module)
        older = any(each.__module__.startswith("pytorch_lightning") for each in kind.__mro__)
        way_out = (
            "Import LightningModule from lightning.pytorch"
            if older
            else "Give it the module and the data that you would give to fit()"
        )
        raise JobError(
            f"from_lightning takes a lightning.pytorch.LightningModule, not a {kind.__name__}. {way_out}."
        )


def _checked(loader: Any, what: str) -> Any:
    if isinstance(loader, list | tuple) and len(loader) == 1:
        loader = loader[0]
    if not isinstance(loader, DataLoader):
        raise JobError(
            f"The {what}'s dataloader is a {type(loader).__name__}, and a job reads one dataset. Return one DataLoader."
        )
    loader_: Any = loader
    if (
        isinstance(loader_.dataset, IterableDataset)
        or loader_.batch_sampler is None
        or loader_.batch_size is None
    ):
        raise JobError(
            f"The {what}'s DataLoader has no batches of one size by index (an iterable dataset, or a batch_sampler). Give it a map-style dataset and a "
            "batch_size; a Job reads iterable data."
        )
    if not len(loader_):
        raise JobError(f"The {what}'s DataLoader has no batches. Give it samples, or a smaller batch_size.")
    return loader_


def _uses(step: Any, name: str) -> bool:
    """Whether the code of a step reads this argument."""
    code = step.__func__.__code__
    return any(
        each.opname.startswith("LOAD_FAST") and name in str(each.argval)
        for each in dis.get_instructions(code)
    )
