"""The evaluations of a transformers `Trainer` as metrics of a job.

`eval_loss` is the mean over samples of the losses of batches of per_device_eval_batch_size, as the trainer has it, however
chunks cut these batches. `compute_metrics` sees all predictions at once there, and those of a chunk here: so each of its
values must be a mean, over samples or over labels. Whether it is one is found by trial, on random predictions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from meshloom.adapters.loader_data import EvaluationSamples, size_of
from meshloom.adapters.trainer_loss import counted, kind_of, loss_by_items, sum_of
from meshloom.core.errors import JobError
from meshloom.core.job import Evaluate, LossFunction
from meshloom.core.moments.modes import Modes
from meshloom.core.random import preserved_draws

_TRIED = 16  # samples
_TRIALS = 4
Collator = Callable[[list[Any]], Any]


def evaluate_of(trainer: Any, every: int) -> tuple[Evaluate, Collator]:
    """What the trainer evaluates, and its collator. every: steps. Raises `JobError` for metrics that are no means."""
    loader = trainer.get_eval_dataloader()
    if loader.batch_sampler is None or not len(loader.dataset):
        raise JobError("get_eval_dataloader() gives no batches by index. Give eval_dataset some samples.")
    batches = [list(batch) for batch in loader.batch_sampler]
    samples = [loader.dataset[index] for index in [each for batch in batches for each in batch][:_TRIED]]
    inputs = loader.collate_fn(samples)
    kind = kind_of(trainer, trainer.model, inputs, 1)
    counts = counted(trainer, inputs) is not None
    metrics: dict[str, LossFunction] = {"eval_loss": partial(_loss, trainer, kind)}
    if trainer.compute_metrics is not None and not trainer.args.prediction_loss_only:
        metrics |= _computed(trainer, inputs, len(samples))
    count = partial(_count, trainer) if counts and kind == "tokens" else None
    data = partial(EvaluationSamples, loader, batches, count)
    best, patience = _best(trainer, list(metrics))
    size = size_of(batches)
    return Evaluate(data, metrics, every, best=best, patience=patience, batch_size=size), loader.collate_fn


def _count(trainer: Any, inputs: Any) -> int:
    items = counted(trainer, inputs)
    return int(items) if items is not None else -1


def _loss(trainer: Any, kind: str, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """The sum over samples of their batches' losses, and the number of samples."""
    sums: list[Tensor] = []
    for group in batch:
        part, inputs = group["part"], group["inputs"]
        if kind == "tokens":
            items = part[2].clamp(min=1)  # a batch without labels has a loss of 0
            sums.append(trainer.compute_loss(model, dict(inputs), num_items_in_batch=items) * part[1])
            continue
        returned = loss_by_items(trainer, model, inputs)
        mean = returned[0] / returned[1] if isinstance(returned, tuple) else returned
        sums.append(mean * part[0])
    return sum_of(sums), sum_of([group["part"][0] for group in batch])


def _computed(trainer: Any, inputs: Any, size: int) -> dict[str, LossFunction]:
    """By name, a metric for each value of `compute_metrics`. inputs: of a batch of so many samples."""
    with preserved_draws(), torch.no_grad():
        with Modes(trainer.model).evaluation():
            _, logits, labels = trainer.prediction_step(trainer.model, dict(inputs), False)
        torch.manual_seed(0)
        trials = [
            (_processed(trainer, _random(logits), labels), size * part // (_TRIALS + 1))
            for part in range(1, _TRIALS + 1)
        ]
    function = partial(_values, trainer)
    names = sorted(function(trials[0][0]))
    spec = tree_flatten(trials[0][0])[1]
    operator = _operator(function, names, spec)
    found: dict[str, LossFunction] = {}
    for place, name in enumerate(names):
        weight = _weight_of(function, name, trials, size)
        key = name if name.startswith("eval_") else f"eval_{name}"
        found[key] = partial(_metric, trainer, operator, place, weight)
    return found


def _processed(trainer: Any, logits: Any, labels: Any) -> Any:
    """Predictions and labels as `compute_metrics` gets them, as tensors."""
    if trainer.preprocess_logits_for_metrics is not None:
        logits = trainer.preprocess_logits_for_metrics(logits, labels)
    return logits, labels


def _random(logits: Any) -> Any:
    flat, spec = tree_flatten(logits)
    return tree_unflatten(
        [torch.randn_like(each) if each.is_floating_point() else each for each in flat], spec
    )


def _values(trainer: Any, given: Any) -> dict[str, float]:
    from transformers import EvalPrediction

    flat, spec = tree_flatten(given)
    arrays = [each.float() if each.dtype == torch.bfloat16 else each for each in flat]
    predictions, labels = tree_unflatten([each.detach().cpu().numpy() for each in arrays], spec)
    values = trainer.compute_metrics(EvalPrediction(predictions=predictions, label_ids=labels))
    return {name: float(each) for name, each in values.items()}


def _operator(function: Callable[[Any], dict[str, float]], names: list[str], spec: TreeSpec) -> Any:
    """An operator of torch that computes the values, in order: numpy cannot be captured, and an operator without a rule is
    given whole tensors under every plan."""

    def computed(tensors: list[Tensor]) -> Tensor:
        values = function(tree_unflatten(tensors, spec))
        return torch.tensor([values[name] for name in names], dtype=torch.float64, device=tensors[0].device)

    def by_shape(tensors: list[Tensor]) -> Tensor:
        return torch.empty(len(names), dtype=torch.float64, device=tensors[0].device)

    namespace: Any = torch.ops.meshloom_adapters
    name = next(
        each for each in (f"compute_metrics_{number}" for number in count()) if not hasattr(namespace, each)
    )
    made = torch.library.custom_op(
        f"meshloom_adapters::{name}", computed, mutates_args=(), schema="(Tensor[] tensors) -> Tensor"
    )
    made.register_fake(by_shape)
    return getattr(namespace, name)


def _metric(
    trainer: Any, operator: Any, place: int, weight: str, model: nn.Module, batch: Any
) -> tuple[Tensor, Tensor]:
    sums: list[Tensor] = []
    weights: list[Tensor] = []
    for group in batch:
        _, logits, labels = trainer.prediction_step(model, dict(group["inputs"]), False)
        tensors = tree_flatten(_processed(trainer, logits, labels))[0]
        items = group["part"][0] if weight == "samples" else _WEIGHTS[weight](labels)
        sums.append(operator([each.detach() for each in tensors])[place] * items)
        weights.append(items)
    return sum_of(sums), sum_of(weights)


_WEIGHTS: dict[str, Callable[[Any], Tensor]] = {
    "labels": lambda labels: labels.ne(-100).sum(),
    "labels but the first": lambda labels: labels[..., 1:].ne(-100).sum(),
}


def _weight_of(
    function: Callable[[Any], dict[str, float]], name: str, trials: list[tuple[Any, int]], size: int
) -> str:
    """What a value is a mean over. trials: what `function` takes, of `size` samples, and where to cut it in two. Raises
    `JobError` if it is no mean."""
    candidates: dict[str, Callable[[Any], Any]] = {"samples": lambda given: len(tree_flatten(given)[0][0])}
    if isinstance(trials[0][0][1], Tensor):
        candidates |= {
            each: lambda given, weigh=weigh: int(weigh(given[1])) for each, weigh in _WEIGHTS.items()
        }
    for candidate, weigh in candidates.items():
        if all(_is_mean(function, name, given, at, size, weigh) for given, at in trials):
            return candidate
    raise JobError(
        f"compute_metrics gives {name!r}, which is no mean over samples or labels: of {size} random predictions it is not the mean of what it is of two parts. "
        "Leave it out, give its parts (like counts of true positives) as values of their own, or evaluate the exported model."
    )


def _is_mean(
    function: Callable[[Any], dict[str, float]], name: str, given: Any, at: int, size: int, weigh: Callable[[Any], Any]
) -> bool:  # fmt: skip
    if not 0 < at < size:
        return True
    flat, spec = tree_flatten(given)
    parts = [tree_unflatten([each[places] for each in flat], spec) for places in (slice(at), slice(at, None))]
    weights = [weigh(each) for each in parts]
    if not all(weights):
        return True
    whole = function(given)[name]
    mean = sum(function(each)[name] * weight for each, weight in zip(parts, weights, strict=True)) / sum(
        weights
    )
    return abs(whole - mean) <= 1e-5 * max(abs(whole), abs(mean), 1e-6)


def _best(trainer: Any, names: list[str]) -> tuple[str | None, int | None]:
    """As of `Evaluate`."""
    args = trainer.args
    stops = [
        each for each in trainer.callback_handler.callbacks if type(each).__name__ == "EarlyStoppingCallback"
    ]
    if not (args.load_best_model_at_end or stops or args.save_strategy == "best"):
        return None, None
    metric = args.metric_for_best_model or "loss"
    metric = metric if metric.startswith("eval_") else f"eval_{metric}"
    if metric not in names:
        raise JobError(
            f"metric_for_best_model={args.metric_for_best_model!r} is none of the evaluation's metrics, {', '.join(names)}. Name one of them."
        )
    larger = args.greater_is_better if args.greater_is_better is not None else not metric.endswith("loss")
    return f"{metric}:{'max' if larger else 'min'}", stops[0].early_stopping_patience if stops else None
