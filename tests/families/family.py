"""One model family of the test bed: a tiny job, its kind and what is particular about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshloom.core.job import Job
from meshloom.core.job_functions import Loss
from tests.jobs import Samples, own_loss

NUM_SAMPLES = 6
STEPS = 2
DROPOUT = 0.1  # where `make_job(dropout=True)` asks for it


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family. `make_job(dropout)` gives its job, with random masks on or off; nothing is
    downloaded."""

    name: str
    kind: str
    make_job: Callable[[bool], Job]
    notes: str


def family_of(
    name: str,
    kind: str,
    notes: str,
    build: Callable[[float], nn.Module],
    loss: Callable[[Any, Any], Loss],
    samples: Callable[[], Samples],
    *,
    batch_size: int = 3,
) -> Family:
    """A family whose model is built by `build(dropout rate)`."""

    def make_job(dropout: bool) -> Job:
        return Job(
            model=lambda: build(DROPOUT if dropout else 0.0),
            loss=loss,
            optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
            data=samples,
            batch_size=batch_size,
            steps=STEPS,
        )

    return Family(name=name, kind=kind, make_job=make_job, notes=notes)


def from_transformers(
    name: str,
    kind: str,
    notes: str,
    model: str,
    samples: Callable[[], Samples],
    settings: Mapping[str, Any],
    *,
    config: str | None = None,
    loss: Callable[[Any, Any], Loss] | None = None,
    drops: bool = True,
) -> Family:
    """A family whose model class in `transformers` is `model`, with a random start from `config(**settings)`.

    config: default is the model's own class of configurations. loss: default is the model's own loss.
    drops: whether the class takes a dropout rate above 0.
    """

    def build(rate: float) -> nn.Module:
        import transformers  # here, because tests that use no family need not wait for it

        kind_of_model = getattr(transformers, model)
        made = (getattr(transformers, config) if config else kind_of_model.config_class)(**settings)
        _adjust(made, rate if drops else 0.0)
        built = kind_of_model(made)
        _fill(built)
        return built

    return family_of(name, kind, notes, build, loss or own_loss, samples)


def _fill(model: nn.Module) -> None:
    """What starts as zeros or nearly gets values, except vectors: a norm of nothing multiplies gradients by a
    million, and a matrix of zeros by nothing. A model that is only described has no values to look at."""
    for parameter in model.parameters():
        if parameter.ndim > 1 and not parameter.is_meta and parameter.detach().square().mean() < 1e-6:
            nn.init.normal_(parameter, std=0.2)


def _adjust(config: Any, rate: float) -> None:
    """Every dropout of a configuration to `rate`, and initial weights so large that inner layers have
    gradients worth comparing.

    Written past the classes' own checks: some want a whole number for a rate. Whole layers are never skipped
    at random: that is decided in Python.
    """
    vars(config)["initializer_range"] = 0.2  # some configurations lack it, and it is looked for all the same
    for key, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            _adjust(value, rate)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            if "layerdrop" in key or "layer_drop" in key:
                vars(config)[key] = 0.0
            elif "drop" in key:
                vars(config)[key] = rate
            elif key == "init_std":
                vars(config)[key] = 0.2
        elif "drop" in key and isinstance(value, list | tuple):
            vars(config)[key] = type(value)(rate for _ in value)
