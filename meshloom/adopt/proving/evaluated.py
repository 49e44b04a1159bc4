"""The metrics of a job on the data that the script evaluated, with the parameters that it evaluated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import default_collate

from meshloom.adopt.watching.draws import set_draws
from meshloom.adopt.watching.passes import SeenPass
from meshloom.core.job import Job, LossFunction
from meshloom.core.modules.built import built
from meshloom.core.moments.current_step import at_step
from meshloom.core.random import preserved_draws

CLOSE = 1e-5  # of a metric, or of 1; sums in another order
HALVES, LOWERED = 1e-5, 5e-3  # by how much a mean over the halves of a batch may differ; under autocast


@dataclass(frozen=True, kw_only=True)
class ExpectedMetrics:
    """seen: the script's pass. means: what it came to, by metric. by_batch: metrics that the script takes the mean of over
    batches. lowered: whether they are computed under autocast."""

    seen: SeenPass
    means: Mapping[str, float]
    by_batch: frozenset[str]
    lowered: bool


@dataclass(frozen=True, kw_only=True)
class ComparedMetric:
    """name: of the metric. script: the script's value. own: the job's, of the script's batches. reported: what an evaluation of
    the job reports. problem: why it is none; or ""."""

    name: str
    script: float
    own: float
    reported: float
    problem: str = ""

    @property
    def equal(self) -> bool:
        """Up to rounding."""
        return not self.problem and abs(self.own - self.script) <= CLOSE * max(1.0, abs(self.script))


def compared_metrics(job: Job, expected: ExpectedMetrics) -> list[ComparedMetric]:
    """In the order of the job."""
    assert job.evaluate is not None
    seen = expected.seen
    model = built(job.model)
    names = set(model.state_dict())
    state = {name.removeprefix("module."): each for name, each in seen.state.items()}
    model.load_state_dict({name: each for name, each in state.items() if name in names})
    model.eval()
    dataset = job.evaluate.data()
    size = seen.loader.batch_size
    batches = [
        [dataset[index] for index in range(first, min(first + size, len(dataset)))]
        for first in range(0, len(dataset), size)
    ]
    found: list[ComparedMetric] = []
    for name, metric in job.evaluate.functions.items():
        with preserved_draws(), torch.no_grad(), at_step(seen.steps):
            set_draws(seen.draws)
            try:
                found.append(
                    _compared(name, metric, model, batches, job.collate or default_collate, expected)
                )
            except Exception as error:
                problem = f"the metric failed with {type(error).__name__}: {' '.join(str(error).split())}"
                found.append(ComparedMetric(name=name, script=expected.means[name], own=math.nan, reported=math.nan, problem=problem))  # fmt: skip
    return found


def _compared(
    name: str, metric: LossFunction, model: Any, batches: list[list[Any]], collate: Any, expected: ExpectedMetrics
) -> ComparedMetric:  # fmt: skip
    def sums(samples: list[Any]) -> tuple[float, float]:
        returned: Any = metric(model, collate(samples))
        if isinstance(returned, tuple):
            return float(returned[0]), float(returned[1])
        return float(returned) * len(samples), len(samples)

    all_sums = [sums(each) for each in batches]
    reported = sum(total for total, _ in all_sums) / (sum(weight for _, weight in all_sums) or math.nan)
    means = [total / weight if weight else math.nan for total, weight in all_sums]
    own = sum(means) / len(means) if name in expected.by_batch else reported
    problem = ""
    first = batches[0]
    if len(first) > 1:
        half = len(first) // 2
        whole, again = sums(first), sums(first)
        parts = [sums(first[:half]), sums(first[half:])]
        total, weight = (sum(each) for each in zip(*parts, strict=True))
        mean, joined = whole[0] / (whole[1] or math.nan), total / (weight or math.nan)
        if whole == again and not abs(mean - joined) <= (LOWERED if expected.lowered else HALVES) * max(
            1e-3, abs(mean)
        ):
            problem = f"it is no mean over samples: a batch has {mean:.6g}, and its halves together {joined:.6g}"  # fmt: skip
    return ComparedMetric(name=name, script=expected.means[name], own=own, reported=reported, problem=problem)
