"""`meshloom.from_transformers()`: a transformers `Trainer` becomes a job that takes its steps."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import IterableDataset

from meshloom.adapters.loader_data import GroupedCollate, LoaderOrder, LoaderSamples, LoaderStream
from meshloom.adapters.trainer_evaluation import evaluate_of
from meshloom.adapters.trainer_loss import TrainerLoss, kind_of
from meshloom.adapters.trainer_refusals import check_trainer, is_left_out
from meshloom.adapters.with_parameters import optimizer_of, schedulers_of, with_parameters
from meshloom.core.errors import JobError
from meshloom.core.job import Job, NamedParameters
from meshloom.core.moments.by_metric import ByMetric
from meshloom.core.moments.current_step import at_step
from meshloom.core.moments.current_step import step as current_step
from meshloom.core.random import preserved_draws
from meshloom.launch.environment import is_first_rank


def from_transformers(trainer: Any) -> Job:
    """A job that takes the steps which `trainer.train()` takes on one device, from the same parameters, on the same samples in
    the same order (docs/from_a_trainer.md).

    trainer: a `transformers.Trainer` that has not trained. A job's file has `job = meshloom.from_transformers(trainer)`. Its
        model is moved to the CPU: devices are the plan's. A batch is that of one device: per_device_train_batch_size *
        gradient_accumulation_steps samples.

    Raises `JobError` for what is no `Trainer`, and for settings, methods and callbacks that have no counterpart.
    """
    import transformers

    if not isinstance(trainer, transformers.Trainer):
        raise JobError(
            f"from_transformers takes a transformers.Trainer, not a {type(trainer).__name__}. Give it the trainer whose train() you would call."
        )
    if int(transformers.__version__.partition(".")[0]) < 5:
        raise JobError(
            f"from_transformers is for transformers 5 and later, and {transformers.__version__} is installed. Install a newer one."
        )
    check_trainer(trainer)
    alone = _on_one_device(trainer)
    with preserved_draws(), at_step(0):
        return _job_of(alone)


@dataclass(frozen=True)
class _Schedule:
    """steps: of the run. per_epoch: of an epoch, as far as it is known."""

    steps: int
    per_epoch: int


class _StateOfStep:
    """The trainer's `state`, as an overridden `compute_loss` reads it in the step that is computed. per_step: epochs of a step."""

    def __init__(self, state: Any, schedule: _Schedule, per_step: float) -> None:
        self._state, self._schedule, self._per_step = state, schedule, per_step

    @property
    def max_steps(self) -> int:
        return self._schedule.steps

    @property
    def global_step(self) -> int:
        return current_step()

    @property
    def epoch(self) -> float:
        epoch, place = divmod(current_step(), self._schedule.per_epoch)
        return epoch + place * self._per_step

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._state, name)


def _job_of(trainer: Any) -> Job:
    args = trainer.args
    loader = trainer.get_train_dataloader()
    accumulation = args.gradient_accumulation_steps
    batch_size = trainer._train_batch_size
    _, per_epoch, _, _, _, _, steps = trainer.set_initial_training_values(args, loader)
    schedule = _Schedule(int(steps), int(per_epoch))
    batches = len(loader) if hasattr(loader.dataset, "__len__") else schedule.per_epoch * accumulation
    trainer.state = _StateOfStep(trainer.state, schedule, accumulation / batches)
    evaluations = _every(args.eval_strategy, args.eval_steps or args.logging_steps, schedule)
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__getitem__"):
        has_length = hasattr(loader.dataset, "__len__")
        data = partial(LoaderStream, loader.dataset, batch_size, accumulation, has_length=has_length)
        first = partial(lambda dataset: list(islice(iter(dataset), batch_size)), loader.dataset)
    elif loader.batch_sampler is None:
        raise JobError(
            "get_train_dataloader() returned a DataLoader without batches. Give it a batch_size or a batch_sampler."
        )
    else:
        order = LoaderOrder(loader, batch_size, partial(_evaluations_in, evaluations, schedule))
        data = partial(LoaderSamples, loader.dataset, order, batch_size, accumulation)
        first = lambda: [loader.dataset[index] for index in order.of(0)[0]]  # noqa: E731
    kind = _kind(trainer, loader, first, accumulation)
    evaluate, evaluation_collate = evaluate_of(trainer, evaluations) if evaluations else (None, None)
    _tell_of_callbacks(trainer)
    every = _every(args.save_strategy, args.save_steps, schedule)
    limit = args.save_total_limit
    return Job(
        model=partial(_model_of, trainer),
        loss=TrainerLoss(trainer, kind),
        optimizer=partial(_optimizer_of, trainer),
        scheduler=partial(_scheduler_of, trainer, schedule.steps),
        data=data,
        batch_size=batch_size * accumulation,
        steps=schedule.steps,
        seed=args.seed,
        collate=GroupedCollate(loader.collate_fn, evaluation_collate),
        num_workers=args.dataloader_num_workers,
        shuffle=False,
        clip_grad_norm=args.max_grad_norm if args.max_grad_norm and args.max_grad_norm > 0 else None,
        evaluate=evaluate,
        checkpoint_every=every,
        keep_checkpoints=limit or (-(-schedule.steps // every) if every else 2),
    )


def _on_one_device(trainer: Any) -> Any:
    """The trainer as it is on one device, without what is of no step: a copy, over the same model."""
    alone = copy.copy(trainer)
    alone.args = copy.copy(trainer.args)
    alone.args._n_gpu = min(1, alone.args.n_gpu)
    alone._train_batch_size = alone.args.train_batch_size
    alone.model.to("cpu")
    alone._prepare_inputs = lambda inputs: inputs  # chunks are where they are needed
    alone._get_num_items_in_batch = partial(_counted_where_they_are, trainer)
    if alone.processing_class is not None and hasattr(alone.model, "config"):
        from transformers import PreTrainedTokenizerBase, ProcessorMixin
        from transformers.trainer_utils import align_special_tokens

        if isinstance(alone.processing_class, PreTrainedTokenizerBase | ProcessorMixin):
            align_special_tokens(alone.model, alone.processing_class)
    return alone


def _counted_where_they_are(trainer: Any, batches: list[Any], device: torch.device) -> Any:
    labels = batches[0].get("labels")
    return trainer._get_num_items_in_batch(
        batches, labels.device if isinstance(labels, torch.Tensor) else device
    )


def _kind(trainer: Any, loader: Any, first: Callable[[], list[Any]], accumulation: int) -> str:
    """As of `TrainerLoss`."""
    if accumulation == 1:
        return ""
    return kind_of(trainer, trainer.model, loader.collate_fn(first()), accumulation)


def _model_of(trainer: Any) -> nn.Module:
    return copy.deepcopy(trainer.model).train()


def _optimizer_of(trainer: Any, named: NamedParameters) -> Optimizer:
    if trainer.optimizer is not None:
        return optimizer_of(trainer.optimizer, trainer.model, named)
    making = copy.copy(trainer)
    making.model = with_parameters(trainer.model, named)
    return making.create_optimizer()


def _scheduler_of(trainer: Any, steps: int, optimizer: Optimizer) -> Any:
    if trainer.lr_scheduler is not None:
        if trainer.optimizer is None:
            return copy.copy(trainer.lr_scheduler)
        return [
            _by_metric(trainer, each)
            for each in schedulers_of([trainer.lr_scheduler], [trainer.optimizer], [optimizer])
        ]
    making = copy.copy(trainer)
    making.optimizer = optimizer
    return _by_metric(trainer, making.create_scheduler(num_training_steps=steps))


def _by_metric(trainer: Any, scheduler: Any) -> Any:
    """The scheduler; one that a Trainer steps after its evaluations, with the metric that it takes. Raises `JobError`."""
    if not isinstance(scheduler, ReduceLROnPlateau):
        return scheduler
    name = trainer.args.metric_for_best_model
    if name is None:
        raise JobError("ReduceLROnPlateau is stepped with metric_for_best_model, and it is None. Name a metric of the evaluation, like 'loss'.")  # fmt: skip
    return ByMetric(scheduler, name if name.startswith("eval_") else f"eval_{name}")


def _every(strategy: Any, steps: float | None, schedule: _Schedule) -> int | None:
    """Steps from one evaluation or checkpoint to the next. steps: their number, or a share of all of them."""
    if strategy == "epoch":
        return min(schedule.per_epoch, schedule.steps)
    if strategy != "steps" or not steps:
        return None
    return int(steps) if steps >= 1 else math.ceil(schedule.steps * steps)


def _evaluations_in(every: int | None, schedule: _Schedule, epoch: int) -> int:
    """Of an epoch, how many evaluations the trainer runs."""
    first = epoch * schedule.per_epoch
    return (first + schedule.per_epoch) // every - first // every if every else 0


def _tell_of_callbacks(trainer: Any) -> None:
    names = [type(each).__name__ for each in trainer.callback_handler.callbacks if is_left_out(each)]
    if names and is_first_rank():
        warnings.warn(
            f"{', '.join(names)}: not called, as a job has no callbacks. A run reports to metrics.csv, --log tensorboard, wandb or mlflow, and ml.Trainer(listener=...).",
            stacklevel=4,
        )
