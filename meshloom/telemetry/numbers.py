"""Every number that a run logs, by name: of a step and of an evaluation, as files and dashboards show them."""

from __future__ import annotations

from collections.abc import Mapping

from meshloom.telemetry.progress import Progress


def numbers_of(progress: Progress) -> dict[str, float]:
    """Of a step.

    >>> rest = {"gradient_norm": None, "samples_per_second": 64.0, "tokens_per_second": None, "seconds_left": 1.0}
    >>> numbers_of(Progress(step=1, steps=2, loss=2.5, learning_rates=[0.1, 0.2], memory_bytes=7, logged={"accuracy": 0.5}, **rest))
    {'loss': 2.5, 'accuracy': 0.5, 'learning_rate': 0.1, 'learning_rate.1': 0.2, 'samples_per_second': 64.0, 'memory_bytes': 7.0}
    """
    rates = {f"learning_rate.{number}" if number else "learning_rate": rate for number, rate in enumerate(progress.learning_rates)}  # fmt: skip
    found: dict[str, float | None] = {
        "loss": progress.loss,
        **progress.logged,
        **rates,
        "gradient_norm": progress.gradient_norm,
        "samples_per_second": progress.samples_per_second,
        "tokens_per_second": progress.tokens_per_second,
        "memory_bytes": progress.memory_bytes,
        "loss_scale": progress.loss_scale.scale if progress.loss_scale else None,
        "age": progress.age,
        "virtual_seconds": progress.virtual_seconds,
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def numbers_of_evaluation(metrics: Mapping[str, float]) -> dict[str, float]:
    """Of an evaluation, whose names a step may have, too.

    >>> numbers_of_evaluation({"accuracy": 0.75})
    {'evaluation/accuracy': 0.75}
    """
    return {f"evaluation/{name}": value for name, value in metrics.items()}
