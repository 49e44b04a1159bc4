"""Optimizers, schedules, sizes of batches and orders that are rare."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import IterableDataset

import meshloom as ml
from meshloom.core.job import Job
from tests.zoo_unusual import VECTORS, WIDTH, Around, Layer, classes, unusual


def model() -> nn.Module:
    return Around(Layer(), Layer())


def trained(named: Any) -> list[nn.Parameter]:
    return [each for _, each in named if each.requires_grad]


def warm_up_from_zero() -> Job:
    return unusual(
        model, scheduler=lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))
    )


def rate_that_falls_to_zero() -> Job:
    return unusual(
        model, scheduler=lambda optimizer: lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=6)
    )


def restarts() -> Job:
    return unusual(
        model, scheduler=lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3, 2)
    )


def one_cycle() -> Job:
    return unusual(
        model, scheduler=lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=13)
    )


def schedules_one_after_another() -> Job:
    def schedule(optimizer: Any) -> Any:
        up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        return lr_scheduler.SequentialLR(optimizer, [up, lr_scheduler.ExponentialLR(optimizer, 0.8)], [3])

    return unusual(model, scheduler=schedule)


def plateau_of_the_loss() -> Job:
    return unusual(model, scheduler=lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0))


def plateau_of_a_metric() -> Job:
    rows = [{name: each[row] for name, each in VECTORS.items()} for row in range(9)]
    evaluate = ml.Evaluate(data=lambda: rows, metrics={"held": classes}, every=2)
    return unusual(
        model, evaluate=evaluate, scheduler=lambda optimizer: ml.ByMetric(lr_scheduler.ReduceLROnPlateau(optimizer, patience=0), "held")
    )  # fmt: skip


def clipped_to_a_thousandth() -> Job:
    return unusual(model, clip_grad_norm=1e-3)


def clipped_beyond_reach() -> Job:
    return unusual(model, clip_grad_norm=1e6)


def nesterov_with_damping() -> Job:
    return unusual(
        model,
        optimizer=lambda named: torch.optim.SGD(
            trained(named), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01
        ),
    )


def largest_second_moments() -> Job:
    return unusual(model, optimizer=lambda named: torch.optim.AdamW(trained(named), lr=1e-2, amsgrad=True))


def centred_root_mean_squares() -> Job:
    return unusual(
        model,
        optimizer=lambda named: torch.optim.RMSprop(trained(named), lr=1e-3, centered=True, momentum=0.5),
    )


def sums_of_squares() -> Job:
    return unusual(
        model,
        optimizer=lambda named: torch.optim.Adagrad(
            trained(named), lr=0.05, lr_decay=0.1, initial_accumulator_value=0.1
        ),
    )


def rates_from_differences() -> Job:
    return unusual(model, optimizer=lambda named: torch.optim.Adadelta(trained(named), lr=1.0))


def rectified_moments() -> Job:
    return unusual(model, optimizer=lambda named: torch.optim.RAdam(trained(named), lr=1e-2))


def factored_moments() -> Job:
    return unusual(model, optimizer=lambda named: torch.optim.Adafactor(trained(named), lr=1e-2))


def groups_with_rates_of_zero() -> Job:
    def optimizer(named: Any) -> torch.optim.Optimizer:
        known = list(named)
        biases = [each for name, each in known if name.endswith("bias")]
        others = [each for name, each in known if not name.endswith("bias")]
        return torch.optim.AdamW(
            [{"params": biases, "lr": 0.0}, {"params": others, "weight_decay": 0.2}], lr=1e-2
        )

    return unusual(model, optimizer=optimizer)


def two_optimizers() -> Job:
    def optimizers(named: Any) -> list[torch.optim.Optimizer]:
        known = list(named)
        heads = [each for name, each in known if name.startswith("out")]
        others = [each for name, each in known if not name.startswith("out")]
        return [torch.optim.SGD(heads, lr=0.1), torch.optim.Adam(others, lr=1e-2)]

    return unusual(model, optimizer=optimizers)


def batches_that_grow() -> Job:
    return unusual(model, batch_size=12, batch_sizes={0: 4, 2: 6, 4: 12})


def short_last_batch() -> Job:
    return unusual(model, batch_size=10, steps=9)


def order_of_the_data() -> Job:
    return unusual(model, shuffle=False, drop_last=True, batch_size=10, steps=6)


class Stream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from ({name: each[row] for name, each in VECTORS.items()} for row in range(22))


def stream_with_a_short_end() -> Job:
    return Job(
        model=model, loss=classes, optimizer=lambda named: torch.optim.Adam(trained(named), lr=1e-2), data=Stream, batch_size=6, steps=10, shuffle=False
    )  # fmt: skip


def mixed_samples() -> Job:
    def mix(batch: Any, others: Any) -> Any:
        share = torch.rand(len(batch["x"]), 1)
        return {"x": share * batch["x"] + (1 - share) * others["x"], "y": batch["y"]}

    return unusual(model, mix=mix)


def keyed_beginning() -> Job:
    return unusual(lambda: Around(Layer(), nn.BatchNorm1d(WIDTH), Layer()), init="keyed")
