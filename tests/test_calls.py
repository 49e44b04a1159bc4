"""How often a job's functions are called from the start to the first step, under each kind of plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshloom as ml
from tests.opaque_jobs import Net, Router, data, job_of, loss

pytestmark = pytest.mark.usefixtures("silent_export", "dear_memory")
SAMPLES = 24
# loss: an export and two comparisons; of a leaf that is found also an export that fails and two recordings
# model: described and built by each of two ranks, and once for each comparison
MOST = {"plain": {"loss": 3, "model": 5, "optimizer": 4}, "a leaf": {"loss": 6, "model": 6, "optimizer": 4}}


def counted(plan: str, model: Callable[[], nn.Module]) -> Counter[str]:
    """Calls by the time that the first step begins."""
    calls: list[str] = ["start"]  # of which a program's guards see what was there at first

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls.append(name)
            return function(*args)

        return call

    class Data(torch.utils.data.Dataset[dict[str, Tensor]]):
        rows = data()

        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            calls.append("data")
            return self.rows[index]

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def forward(self, x: Tensor) -> Tensor:
            calls.append("forward")
            return self.net(x)

    plain = job_of(Counted)
    job = ml.Job(
        model=noted("model", Counted), loss=lambda model, batch: noted("loss", loss)(model, batch), data=Data,
        optimizer=lambda named: noted("optimizer", plain.optimizer)(named), batch_size=8, steps=3,
        evaluate=ml.Evaluate(data=Data, metrics={"error": lambda model, batch: noted("metric", loss)(model, batch)}, every=2),
    )  # fmt: skip
    with ml.Trainer(job, plan, devices="simulated") as trainer:
        found = Counter(calls)
        trainer.step(next(iter(trainer.batches())))
    return found


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "pp=2"])
@pytest.mark.parametrize("kind", MOST)
def test_functions_are_called_a_few_times_before_the_first_step(plan: str, kind: str) -> None:
    parts, order = (1, "r0r") if kind == "a leaf" else (0, "rr")
    found = counted(plan, lambda: Net([Router() for _ in range(parts)], order))
    print(plan, kind, dict(found))
    assert all(found[name] <= most for name, most in MOST[kind].items()), found
    assert found["forward"] <= found["loss"] + found["metric"] and found["data"] <= 4 * SAMPLES
    assert found["metric"] == 0
