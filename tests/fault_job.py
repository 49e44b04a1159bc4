"""A short job that reads, evaluates and saves, for faults at any moment of it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from meshloom.core.job import Evaluate
from tests.jobs import make_job

_base = make_job("mlp", "adamw", steps=40, checkpoint_every=4)


def _loss(model: Any, batch: Any) -> Any:
    time.sleep(0.02)  # so that most faults come while it trains
    return _base.loss(model, batch)


def _right(model: Any, batch: Any) -> Any:
    return (model(batch["x"]).argmax(-1) == batch["y"]).double().mean()


job = replace(_base, loss=_loss, evaluate=Evaluate(_base.data, {"right": _right}, every=5))
reading = replace(job, num_workers=1)
