"""What is trained: functions that build the model, the loss, the optimizer and the data of a single-device
job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from meshloom.core.errors import JobError

# A mean over the batch's samples, or (sum, weight): the sum over whatever is averaged, and how many of them
# there are.
Loss = Tensor | tuple[Tensor, Tensor | float]
LossFunction = Callable[[Any, Any], Loss]
NamedParameters = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Evaluate:
    """Measure on held-out data while training.

    data: builds a map-style dataset; it is read once per evaluation, split over the replicas.
    metrics: by name, a function of (model, batch) that returns what a loss may return; means stay exact over
        the whole data.
    every: steps between evaluations; there is one after the last step too.
    """

    data: Callable[[], Any]
    metrics: Mapping[str, LossFunction]
    every: int

    def __post_init__(self) -> None:
        if not callable(self.data):
            raise JobError(
                "Evaluate(data=...) must be a function that builds a dataset, like data=lambda: Digits(train=False)."
            )
        if (
            not isinstance(self.metrics, Mapping)
            or not self.metrics
            or not all(callable(metric) for metric in self.metrics.values())
        ):
            raise JobError(
                'Evaluate(metrics=...) must be functions by name, like metrics={"accuracy": accuracy}.'
            )
        if not _is_count(self.every, 1):
            raise JobError(f"Evaluate(every={self.every!r}) must be a whole number of steps, 1 or more.")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A single-device training job. It knows nothing of ranks; every rank calls the functions itself.

    Each module trains in the mode in which `model` returned it, in every step, also after evaluations, under
    every plan: modules in evaluation mode (batch norm that keeps its statistics) stay so. A model that is
    itself in evaluation mode (`model.training` is False, as `from_pretrained` returns it) trains in training
    mode, all of it, as after `model.train()`; to keep parts of such a one in evaluation mode, call
    `model.train()` in the function and then `.eval()` of the parts.

    model: builds the module. Called once per rank under the same seed.
    loss: of (model, batch); returns the mean over the batch's samples, or (sum, weight) for a mean over
        something else.
    optimizer: of a list of (name, full-shape parameter); returns one optimizer, or several over disjoint
        parameters.
    data: builds a map-style or iterable dataset of samples.
    batch_size: samples of one global batch, over all ranks.
    steps: optimizer steps of the whole run.
    seed: decides initial parameters, order of samples and every random draw.
    collate: makes a batch of a list of samples; called once per chunk. Default: torch's.
    num_workers: processes per rank that read data ahead.
    shuffle, drop_last: order and short last batch of map-style data.
    scheduler: of what `optimizer` returned; one scheduler or several, stepped once per step;
    `ReduceLROnPlateau` with the step's training loss. clip_grad_norm: largest 2-norm of the whole gradient.
    evaluate: what to measure on held-out data, and when.
    tokens_per_sample: makes reports count tokens too.
    checkpoint_every: steps between checkpoints, besides the one at the end.
    keep_checkpoints: how many of the newest to keep.
    elementwise: whether the optimizer updates each element from that element's own history alone; None: found
        out by a
        trial on small tensors. Wrong when True for one that does not.
    rules: how operators of your own are divided: operator -> its dims, `{"mylib::swiglu": "b* f, b* f -> b*
        f"}` (docs/rules.md).
    """

    model: Callable[[], nn.Module]
    loss: LossFunction
    optimizer: Callable[[NamedParameters], Optimizer | list[Optimizer]]
    data: Callable[[], Any]
    batch_size: int
    steps: int
    seed: int = 0
    collate: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    shuffle: bool = True
    drop_last: bool = False
    scheduler: Callable[[Any], Any] | None = None
    clip_grad_norm: float | None = None
    evaluate: Evaluate | None = None
    tokens_per_sample: int | None = None
    checkpoint_every: int | None = None
    keep_checkpoints: int = 2
    elementwise: bool | None = None
    rules: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        for name, example in _EXAMPLES.items():
            value = getattr(self, name)
            if not callable(value) and not (value is None and name in ("collate", "scheduler")):
                raise JobError(
                    f"Job({name}=...) must be a function, like {name}={example}, not {type(value).__name__}."
                )
        if isinstance(self.model, nn.Module):
            raise JobError(
                "Job(model=...) must be a function that builds the module, like model=lambda: GPT(), not a module: every rank builds its own."
            )
        counts = {
            "batch_size": 1,
            "steps": 1,
            "num_workers": 0,
            "keep_checkpoints": 1,
            "tokens_per_sample": 1,
            "checkpoint_every": 1,
            "seed": 0,
        }
        for name, least in counts.items():
            value = getattr(self, name)
            if not _is_count(value, least) and not (
                value is None and name in ("tokens_per_sample", "checkpoint_every")
            ):
                raise JobError(f"Job({name}={value!r}) must be a whole number, {least} or more.")
        clip = self.clip_grad_norm
        if clip is not None and (isinstance(clip, bool) or not isinstance(clip, int | float) or not clip > 0):
            raise JobError(f"Job(clip_grad_norm={clip!r}) must be a number above 0, or None for no clipping.")
        if self.evaluate is not None and not isinstance(self.evaluate, Evaluate):
            raise JobError("Job(evaluate=...) must be an Evaluate(data, metrics, every).")
        if not isinstance(self.rules, Mapping) or not all(
            isinstance(each, str) for pair in self.rules.items() for each in pair
        ):
            raise JobError(
                'Job(rules=...) must be texts by operator, like rules={"mylib::swiglu": "b* f, b* f -> b* f"}.'
            )


_EXAMPLES = {
    "model": "lambda: GPT()",
    "loss": "lambda model, batch: cross_entropy(model(batch['x']), batch['y'])",
    "optimizer": "lambda named: torch.optim.AdamW(named)",
    "data": "lambda: MyDataset()",
    "collate": "my_collate",
    "scheduler": "lambda optimizer: CosineAnnealingLR(optimizer, 100)",
}


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
