"""A single-device training job: functions that build the model, the loss, the optimizer and the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from meshloom.core.errors import JobError

# A scalar mean over the batch's samples, or (sum, weight): a scalar sum and the number of items in it.
Loss = Tensor | tuple[Tensor, Tensor | float]
LossFunction = Callable[[Any, Any], Loss]
NamedParameters = list[tuple[str, nn.Parameter]]
CHECKPOINTS = ("foreground", "background")
INITS = ("stream", "keyed")


@dataclass(frozen=True)
class Evaluate:
    """What to measure on held-out data during training. Raises `JobError`.

    data: builds a map-style dataset. Each evaluation reads all of it once, split over the replicas.
    metrics: name -> function of (model, batch) that returns what a loss function may return. A metric is the
        exact mean over all of the data.
    every: steps between evaluations; there is one after the last step too.

    >>> accuracy = lambda model, batch: (model(batch["x"]).argmax(1) == batch["y"]).float().mean()
    >>> Evaluate(data=lambda: range(100), metrics={"accuracy": accuracy}, every=50).every
    50
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
    """A single-device training job. It knows nothing of ranks: each rank calls its functions itself.

    Raises `JobError` for a value of the wrong type or out of range.

    model: builds the module. Called once per rank, under the same seed.
    loss: of (model, batch); returns a scalar tensor, the mean over the batch's samples, or (sum, weight), a
        scalar sum and the number of items in it, for a mean over something else (tokens, pixels).
    optimizer: of a list of (name, full-shape parameter); returns an optimizer, or a list of optimizers over
        disjoint parameters.
    data: builds a map-style (`__getitem__`, `__len__`) or iterable dataset of samples.
    batch_size: samples of one global batch, over all ranks.
    steps: optimizer steps of the whole run.
    seed: determines initial parameters, sample order and every random draw.
    init: how the model function's draws are made. "stream": one after another, as it makes them. "keyed": each
        parameter's and buffer's from a seed of its own, which depends on the job's seed and its name, so that a
        rank draws what it holds alone. The values are others, on one device, too (docs/weights.md).
    collate: makes a batch from a list of samples; called once per chunk. Default: torch's `default_collate`.
    num_workers: data-loading processes per rank; 0 loads in the rank itself.
    shuffle, drop_last: of map-style data: whether each epoch has a random order, whether a short last batch
        is dropped.
    scheduler: of what `optimizer` returned; returns a learning-rate scheduler or a list of them, stepped once
        per step (`ReduceLROnPlateau` with the step's training loss).
    clip_grad_norm: maximum 2-norm of the gradient of the whole model; None: no clipping.
    evaluate: what to measure on held-out data, and how often.
    tokens_per_sample: tokens of one sample, for reports of tokens per second.
    checkpoint_every: steps between checkpoints; there is one after the last step too.
    checkpoint: "foreground": training stands still while one is written; "background": only while its state is
        copied to host memory, from which a thread writes it (docs/checkpoints.md).
    keep_checkpoints: number of newest checkpoints that are kept.
    elementwise: whether the optimizer updates each element from the history of that element alone (Adam does,
        Muon does not); None: determined by a trial on small tensors. True for an optimizer that does not
        gives wrong updates.
    weights: where parameters and buffers start from: a .safetensors file, a directory with
        model.safetensors or model.safetensors.index.json, or a meshloom checkpoint or run directory
        (docs/weights.md). Buffers that are not persistent stay as `model` built them. A resumed checkpoint
        takes precedence.
    weight_names: the name in these files of each tensor of the model, as a mapping or a function; names that
        a mapping lacks are equal. None: no counterpart. A tensor of the model keeps the value that `model`
        gave it; a tensor of the files, looked up in the same way, is not used.
    units: names or types of the modules whose parameters zero=3 gathers together; () gathers all at once. None:
        blocks that repeat, and modules with large parameters.
    rules: sharding rules of custom operators: operator -> its dims, like
        `{"mylib::swiglu": "b* f, b* f -> b* f"}` (docs/rules.md).
    opaque: names or types of modules that tp, pp and recomputation run as they are, whole, as one operator each
        (docs/opaque.md); modules that cannot be read are found without being named.

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
    weights: str | PathLike[str] | None = None
    weight_names: Mapping[str, str | None] | Callable[[str], str | None] | None = None
    units: Sequence[str | type[nn.Module]] | None = None
    rules: Mapping[str, str] = field(default_factory=dict[str, str])
    opaque: Sequence[str | type[nn.Module]] = ()

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
        if self.checkpoint not in CHECKPOINTS:
            raise JobError(
                f"Job(checkpoint={self.checkpoint!r}) must be {' or '.join(map(repr, CHECKPOINTS))}: whether training stands still while a checkpoint is written."
            )
        clip = self.clip_grad_norm
        if clip is not None and (isinstance(clip, bool) or not isinstance(clip, int | float) or not clip > 0):
            raise JobError(f"Job(clip_grad_norm={clip!r}) must be a number above 0, or None for no clipping.")
        if self.evaluate is not None and not isinstance(self.evaluate, Evaluate):
            raise JobError("Job(evaluate=...) must be an Evaluate(data, metrics, every).")
        if self.init not in INITS:
            raise JobError(f"Job(init={self.init!r}) is not known. Use {' or '.join(map(repr, INITS))}.")
        self._check_weights()
        _check_units(self.units)
        _check_opaque(self.opaque)
        if not isinstance(self.rules, Mapping) or not all(
            isinstance(each, str) for pair in self.rules.items() for each in pair
        ):
            raise JobError(
                'Job(rules=...) must be texts by operator, like rules={"mylib::swiglu": "b* f, b* f -> b* f"}.'
            )

    def _check_weights(self) -> None:
        if self.weights is not None and not isinstance(self.weights, str | PathLike):
            raise JobError(
                f'Job(weights=...) must be a path, like weights="gpt2/model.safetensors", not {type(self.weights).__name__}.'
            )
        names = self.weight_names
        if names is not None and self.weights is None:
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


def _check_units(units: Any) -> None:
    if units is not None and (
        isinstance(units, str)
        or not all(
            isinstance(each, str) or (isinstance(each, type) and issubclass(each, nn.Module))
            for each in units
        )
    ):
        raise JobError(
            'Job(units=...) must be names or types of modules, like units=[Block] or units=["encoder", "decoder"].'
        )


def _check_opaque(opaque: Any) -> None:
    if isinstance(opaque, str | type) or not all(
        isinstance(each, str) or (isinstance(each, type) and issubclass(each, nn.Module)) for each in opaque
    ):
        raise JobError(
            'Job(opaque=...) must be names or types of modules, like opaque=[Router] or opaque=["blocks.3.router"].'
        )


def as_sum(
    loss: Loss, samples: int, *, needs_gradient: bool = True, who: str = "The loss function"
) -> tuple[Tensor, Tensor | float]:
    """The sum and the weight of what a loss function returned: a mean is multiplied by `samples`.

    needs_gradient: whether the sum must require a gradient. who: the function's name in errors. Raises
    `JobError`.

    >>> import torch
    >>> as_sum(torch.tensor(2.0), 3, needs_gradient=False)
    (tensor(6.), 3)
    """
    mean_or_sum, weight = loss if isinstance(loss, tuple) and len(loss) == 2 else (loss, None)
    alternating = _ALTERNATING if needs_gradient else ""
    if not isinstance(mean_or_sum, Tensor):
        raise JobError(
            f"{who} returned {_kind(loss)}. Return one scalar tensor (the mean over the samples), or (sum, weight).{alternating}"
        )
    if mean_or_sum.numel() != 1:
        raise JobError(
            f"{who} returned a tensor of shape {list(mean_or_sum.shape)}, not a scalar. Return its mean over the samples, or (sum, weight)."
        )
    if needs_gradient and not mean_or_sum.requires_grad:
        raise JobError(
            "The loss does not depend on any trainable parameter (requires_grad is False), so there is nothing to train."
        )
    if isinstance(weight, Tensor) and (weight.requires_grad or weight.numel() != 1):
        raise JobError(
            f"{who} returned (sum, weight), where the weight must be a number without gradient: the number of items in the sum.{alternating}"
        )
    if weight is None:
        return mean_or_sum.reshape(()) * samples, samples
    return mean_or_sum.reshape(()), weight.reshape(()) if isinstance(weight, Tensor) else weight


_ALTERNATING = " A job that alternates between several losses (a GAN) is not supported."


def _kind(loss: object) -> str:
    return (
        f"a {type(loss).__name__} of {len(loss)}"
        if isinstance(loss, tuple | list | dict)
        else f"a {type(loss).__name__}"
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
