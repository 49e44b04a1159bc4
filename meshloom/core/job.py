"""A single-device training job: functions that build the model, the loss, the optimizer and the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from os import PathLike
from typing import Any

from torch import nn
from torch.optim import Optimizer

from meshloom.core.buffer_rules import BufferRule, check_rules
from meshloom.core.errors import JobError
from meshloom.core.job_functions import (
    TAKES,
    ByMetric,
    LossFunction,
    Metric,
    NamedParameters,
    check_takes,
    is_count,
)

CHECKPOINTS = ("foreground", "background")
INITS = ("stream", "keyed")


@dataclass(frozen=True)
class Evaluate:
    """What to measure on held-out data during training. Raises `JobError`.

    data: builds a map-style dataset. Each evaluation reads all of it once, split over the replicas.
    metrics: name -> function of (model, batch) that returns what a loss function may return, whose mean over all of the data is
        the metric; or a `Metric` of all samples together.
    every: steps between evaluations; there is one after the last step too.
    best: a metric and which of its values is best, like "accuracy:max": `fit()` keeps the best evaluation's checkpoint
        in best/. patience: evaluations in a row without a better value after which it stops.
    batch_size: samples of a batch over all ranks; None: as in training. A chunk holds samples of one batch.
    scheduler: a `ByMetric`: schedulers that are stepped with a metric after each evaluation, such as `ReduceLROnPlateau`.

    >>> accuracy = lambda model, batch: (model(batch["x"]).argmax(1) == batch["y"]).float().mean()
    >>> Evaluate(data=lambda: range(100), metrics={"accuracy": accuracy}, every=50).every
    50
    """

    data: Callable[[], Any]
    metrics: Mapping[str, LossFunction | Metric]
    every: int
    best: str | None = None
    patience: int | None = None
    batch_size: int | None = None
    scheduler: ByMetric | None = None

    def __post_init__(self) -> None:
        if not callable(self.data):
            raise JobError(
                "Evaluate(data=...) must be a function that builds a dataset, like data=lambda: Digits(train=False)."
            )
        given = isinstance(self.metrics, Mapping) and self.metrics
        if not given or not all(map(callable, self.functions.values())):
            raise JobError(
                'Evaluate(metrics=...) must be functions by name, like metrics={"accuracy": accuracy}, or Metrics, like '
                'metrics={"f1": ml.Metric(update, compute)}.'
            )
        for name, function in self.functions.items():
            check_takes(f"Evaluate(metrics={{{name!r}: ...}})", function, TAKES["loss"])
        if not is_count(self.every, 1):
            raise JobError(f"Evaluate(every={self.every!r}) must be a whole number of steps, 1 or more.")
        known = [f"{name}:{which}" for name in self.metrics for which in ("max", "min")]
        if self.best is not None and self.best not in known:
            raise JobError(f"Evaluate(best={self.best!r}) must be one of {', '.join(map(repr, known))}.")
        if self.patience is not None and not is_count(self.patience, 1):
            raise JobError(f"Evaluate(patience={self.patience!r}) must be a whole number of evaluations, 1 or more.")  # fmt: skip
        if self.patience is not None and self.best is None:
            raise JobError(f"Evaluate(patience={self.patience}) waits for a better value of a metric. Name it, like best={known[0]!r}.")  # fmt: skip
        if self.batch_size is not None and not is_count(self.batch_size, 1):
            raise JobError(f"Evaluate(batch_size={self.batch_size!r}) must be a whole number of samples, 1 or more, or None.")  # fmt: skip
        if self.scheduler is not None and not isinstance(self.scheduler, ByMetric):
            raise JobError(
                f"Evaluate(scheduler=...) must be a ByMetric, like ml.ByMetric(lambda optimizer: ReduceLROnPlateau(optimizer), {next(iter(self.metrics))!r})."
            )
        if self.scheduler is not None and self.scheduler.metric not in self.metrics:
            raise JobError(
                f"ByMetric(..., {self.scheduler.metric!r}) must name one of Evaluate's metrics, {', '.join(map(repr, self.metrics))}."
            )

    @property
    def functions(self) -> dict[str, LossFunction]:
        """By metric, what is called with (model, batch)."""
        return {
            name: each.update if isinstance(each, Metric) else each for name, each in self.metrics.items()
        }

    def with_functions(self, changed: Callable[[LossFunction], LossFunction]) -> Evaluate:
        """The same, each of these functions replaced."""
        metrics = {
            name: replace(each, update=changed(each.update)) if isinstance(each, Metric) else changed(each)
            for name, each in self.metrics.items()
        }
        return replace(self, metrics=metrics)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A single-device training job. It knows nothing of ranks: each rank calls its functions itself.

    Raises `JobError` for a value of the wrong type or out of range.

    model: builds the module. Called once per rank, under the same seed.
    loss: of (model, batch); returns a scalar tensor, the mean over the batch's samples, or (sum, weight), a
        scalar sum and the number of items in it, for a mean over something else (tokens, pixels).
    optimizer: of a list of (name, full-shape parameter); returns an optimizer, or a list of optimizers over
        disjoint parameters. `Averaged(optimizer, decay)` keeps moving averages of what is trained, of which evaluations are.
    data: builds a map-style (`__getitem__`, `__len__`) or iterable dataset; its `set_epoch(epoch)` is called, if it has one.
    batch_size: samples of one global batch, over all ranks.
    steps: optimizer steps of the whole run.
    seed: determines initial parameters, sample order and every random draw.
    init: how parameters get their values. "stream": as the model function draws them, one after another. "keyed": by each
        module's convention (`reset_parameters`, `_init_weights`), from a seed that depends on the job's seed and its name,
        so that a rank makes what it holds alone. The values are others, on one device, too (docs/weights.md).
    collate: makes a batch from a list of samples; called once per chunk. Default: torch's `default_collate`.
    num_workers: data-loading processes per rank; 0 loads in the rank itself.
    shuffle, drop_last: of map-style data: whether each epoch has a random order, whether a short last batch
        is dropped.
    scheduler: of what `optimizer` returned; returns a learning-rate scheduler or a list of them, stepped once
        per step (`ReduceLROnPlateau` with the step's training loss; after evaluations, with a metric, by `Evaluate(scheduler=...)`).
    clip_grad_norm: maximum 2-norm of the gradient of the whole model; None: no clipping.
    evaluate: what to measure on held-out data, and how often.
    tokens_per_sample: tokens of one sample, for reports of tokens per second.
    checkpoint_every: steps between checkpoints; there is one after the last step too.
    checkpoint: "foreground": training stands still while one is written; "background": only while its state is
        copied to host memory, from which a thread writes it (docs/checkpoints.md).
    keep_checkpoints: number of newest checkpoints that are kept.
    elementwise, per_parameter: what an optimizer that is not one of torch's, or has step hooks, looks at to update an element:
        the history of that element alone (as Adam does), or of its whole parameter (as Muon does). Where neither is said, it gets
        all parameters on every rank. One that looks at more than is said gives wrong updates.
    weights: where parameters and buffers start from: a .safetensors file, a directory with
        model.safetensors or model.safetensors.index.json, or a meshloom checkpoint or run directory
        (docs/weights.md). Buffers that are not persistent stay as `model` built them. A resumed checkpoint
        takes precedence.
    weight_names: the name in these files of each tensor of the model, as a mapping or a function; names that
        a mapping lacks are equal. None: no counterpart. A tensor of the model keeps the value that `model`
        gave it; a tensor of the files, looked up in the same way, is not used.
    buffers: by what rule buffers, and parameters that no gradient trains but a step writes, are merged over the chunks of a step:
        names or patterns of names -> "last" (what the last chunk left), "sum", `ml.ema(decay)`, or a function of (the buffer
        as the step found it, what each chunk left). The first pattern that fits counts. Others keep what the last chunk left;
        torch's norm layers need no rule (docs/contract.md).
    units: names or types of the modules whose parameters zero=3 gathers together; () gathers all at once. None:
        blocks that repeat, and modules with large parameters.
    rules: sharding rules of custom operators: operator -> its dims, like
        `{"mylib::swiglu": "b* f, b* f -> b* f"}` (docs/rules.md).
    leaves: names or types of modules that tp, pp and recomputation run as written, whole, as one operator each
        (docs/contract.md); small modules that cannot be captured are leaves without being named.

    Modules train in the mode in which `model` returned them, in every step and under every plan: a submodule
    in evaluation mode (batch norm with frozen statistics) stays so. A model that is itself in evaluation
    mode, as `from_pretrained` returns it, is put into training mode as a whole, as by `model.train()`. To
    keep parts of it in evaluation mode, call `model.train()` in the function, then `eval()` on those parts.

    >>> import torch
    >>> job = Job(
    ...     model=lambda: nn.Linear(3, 1),
    ...     loss=lambda model, batch: (model(batch) ** 2).mean(),
    ...     optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
    ...     data=lambda: torch.ones(64, 3),
    ...     batch_size=16,
    ...     steps=100,
    ... )
    >>> job.seed, job.keep_checkpoints
    (0, 2)
    """

    model: Callable[[], nn.Module]
    loss: LossFunction
    optimizer: Callable[[NamedParameters], Optimizer | list[Optimizer]]
    data: Callable[[], Any]
    batch_size: int
    steps: int
    seed: int = 0
    init: str = "stream"
    collate: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    shuffle: bool = True
    drop_last: bool = False
    scheduler: Callable[[Any], Any] | None = None
    clip_grad_norm: float | None = None
    evaluate: Evaluate | None = None
    tokens_per_sample: int | None = None
    checkpoint_every: int | None = None
    checkpoint: str = "foreground"
    keep_checkpoints: int = 2
    elementwise: bool | None = None
    per_parameter: bool = False
    weights: str | PathLike[str] | None = None
    weight_names: Mapping[str, str | None] | Callable[[str], str | None] | None = None
    units: Sequence[str | type[nn.Module]] | None = None
    rules: Mapping[str, str] = field(default_factory=dict[str, str])
    leaves: Sequence[str | type[nn.Module]] = ()
    buffers: Mapping[str, BufferRule] = field(default_factory=dict[str, BufferRule])
    average: InitVar[None] = None  # refused

    def __post_init__(self, average: Any) -> None:
        if average is not None:
            raise JobError(
                "A job's optimizer keeps averages of the parameters: write optimizer=lambda named: ml.Averaged(torch.optim.AdamW(named), "
                f"{average!r}) in place of Job(average=...)."
            )
        for name, example in _EXAMPLES.items():
            value = getattr(self, name)
            if not callable(value) and not (value is None and name in ("collate", "scheduler")):
                raise JobError(f"Job({name}=...) must be a function, like {name}={example}, not {type(value).__name__}.")  # fmt: skip
            if not isinstance(value, nn.Module) or name != "model":
                check_takes(f"Job({name}=...)", value, TAKES[name], f" Write it like {name}={example}.")
        if isinstance(self.model, nn.Module):
            raise JobError(
                "Job(model=...) must be a function that builds the module, like model=lambda: GPT(), not a module: every rank builds its own."
            )
        ones = ("batch_size", "steps", "keep_checkpoints", "tokens_per_sample", "checkpoint_every")
        counts = {**dict.fromkeys(ones, 1), "num_workers": 0, "seed": 0}
        for name, least in counts.items():
            value = getattr(self, name)
            if not is_count(value, least) and not (
                value is None and name in ("tokens_per_sample", "checkpoint_every")
            ):
                raise JobError(f"Job({name}={value!r}) must be a whole number, {least} or more.")
        if self.checkpoint not in CHECKPOINTS:
            raise JobError(
                f"Job(checkpoint={self.checkpoint!r}) must be {' or '.join(map(repr, CHECKPOINTS))}: whether training stands still while a checkpoint is written."
            )
        _check_clip(self.clip_grad_norm)
        if self.elementwise is False:
            raise JobError(
                "Job(elementwise=False): write per_parameter=True (each whole parameter by itself), or leave it out: optimizers that are not on the list look at all "
                "parameters."
            )
        if self.elementwise and self.per_parameter:
            raise JobError(
                "Job(elementwise=True, per_parameter=True) says two things of the optimizer. Give one of them."
            )
        if self.evaluate is not None and not isinstance(self.evaluate, Evaluate):
            raise JobError("Job(evaluate=...) must be an Evaluate(data, metrics, every).")
        if self.init not in INITS:
            raise JobError(f"Job(init={self.init!r}) is not known. Use {' or '.join(map(repr, INITS))}.")
        if self.buffers != {}:
            check_rules(self.buffers)
        _check_weights(self)
        _check_modules("units", self.units or (), '[Block] or units=["encoder", "decoder"]')
        _check_modules("leaves", self.leaves, '[Router] or leaves=["blocks.3.router"]')
        if not isinstance(self.rules, Mapping) or not all(
            isinstance(each, str) for pair in self.rules.items() for each in pair
        ):
            raise JobError(
                'Job(rules=...) must be texts by operator, like rules={"mylib::swiglu": "b* f, b* f -> b* f"}.'
            )

    @property
    def evaluation_batch_size(self) -> int:
        """Samples of a batch of an evaluation; the last one may have fewer."""
        return (self.evaluate and self.evaluate.batch_size) or self.batch_size


def _check_clip(clip: Any) -> None:
    if clip is not None and (isinstance(clip, bool) or not isinstance(clip, int | float) or not clip > 0):
        raise JobError(f"Job(clip_grad_norm={clip!r}) must be a number above 0, or None for no clipping.")


def _check_weights(job: Job) -> None:
    if job.weights is not None and not isinstance(job.weights, str | PathLike):
        raise JobError(
            f'Job(weights=...) must be a path, like weights="gpt2/model.safetensors", not {type(job.weights).__name__}.'
        )
    names = job.weight_names
    if names is not None and job.weights is None:
        raise JobError(
            "Job(weight_names=...) is for the names in files, and no weights=PATH is given. Leave it out."
        )
    if (
        names is not None
        and not callable(names)
        and not (
            isinstance(names, Mapping)
            and all(isinstance(key, str) for key in names)
            and all(each is None or isinstance(each, str) for each in names.values())
        )
    ):
        raise JobError(
            'Job(weight_names=...) must be names by name, like weight_names={"head.weight": "lm_head.weight"}, or a function from name to name.'
        )


def _check_modules(setting: str, given: Any, example: str) -> None:
    if isinstance(given, str | type) or not all(
        isinstance(each, str) or (isinstance(each, type) and issubclass(each, nn.Module)) for each in given
    ):
        raise JobError(f"Job({setting}=...) must be names or types of modules, like {setting}={example}.")


_EXAMPLES = {
    "model": "lambda: GPT()",
    "loss": "lambda model, batch: cross_entropy(model(batch['x']), batch['y'])",
    "optimizer": "lambda named: torch.optim.AdamW(named)",
    "data": "lambda: MyDataset()",
    "collate": "my_collate",
    "scheduler": "lambda optimizer: CosineAnnealingLR(optimizer, 100)",
}
