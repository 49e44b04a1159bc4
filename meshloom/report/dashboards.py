"""A run's numbers in TensorBoard, Weights & Biases and MLflow, each by its own library where that is installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from meshloom.core.errors import ReportError
from meshloom.telemetry.numbers import numbers_of, numbers_of_evaluation
from meshloom.telemetry.progress import Listener

# takes a step and its numbers
Write = Callable[[int, Mapping[str, float]], None]


def check_dashboards(names: Sequence[str], out: str | None) -> None:
    """Raises `ReportError` for those whose library is not installed, and for files that have no place."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ReportError(
                f"--log {name} needs the package {name}, which is not installed. Install it (pip install {name}), or leave --log {name} out."
            )
    if "tensorboard" in names and out is None:
        raise ReportError(
            "--log tensorboard writes to the run's directory, and there is none. Give --out DIR."
        )


def dashboards_listener(
    names: Sequence[str], out: Path | None, facts: Mapping[str, Any], stack: ExitStack
) -> Listener:
    """Shows a run's numbers in all of these, which are opened with its first numbers.

    out: the run's directory. facts: about the run, which a dashboard shows beside its numbers. stack: closes them, also
    after an error.
    """
    opened: list[Write] = []

    def write(step: int, numbers: Mapping[str, float]) -> None:
        if not opened:
            opened.extend(_DASHBOARDS[name](out, facts, stack, step) for name in names)
        for each in opened:
            each(step, numbers)

    return Listener(
        started=lambda text: None,
        note=lambda text: None,
        step=lambda progress: write(progress.step, numbers_of(progress)),
        evaluated=lambda step, metrics: write(step, numbers_of_evaluation(metrics)),
    )


def _tensorboard(out: Path | None, facts: Mapping[str, Any], stack: ExitStack, first_step: int) -> Write:
    assert out is not None
    writer_of: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter
    # what an earlier run has written of later steps is not shown
    writer = stack.enter_context(writer_of(str(out / "tensorboard"), purge_step=first_step))
    writer.add_text("run", "  \n".join(f"{name}: {value}" for name, value in facts.items()), first_step)

    def write(step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return write


def _wandb(out: Path | None, facts: Mapping[str, Any], stack: ExitStack, first_step: int) -> Write:
    library: Any = importlib.import_module("wandb")
    run = library.init(dir=None if out is None else str(out), config=dict(facts))
    stack.push(lambda kind, error, where: run.finish(exit_code=0 if kind is None else 1))
    # evaluations come after the numbers of their step
    return lambda step, numbers: run.log(dict(numbers), step=step)


def _mlflow(out: Path | None, facts: Mapping[str, Any], stack: ExitStack, first_step: int) -> Write:
    library: Any = importlib.import_module("mlflow")
    library.start_run()
    stack.push(lambda kind, error, where: library.end_run("FINISHED" if kind is None else "FAILED"))
    library.log_params(dict(facts))
    return lambda step, numbers: library.log_metrics(dict(numbers), step=step)


_DASHBOARDS = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
DASHBOARDS = tuple(_DASHBOARDS)
