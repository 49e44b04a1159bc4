"""Short jobs that read, evaluate and save, for faults at any moment of them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from meshloom.core.job import Evaluate
from tests.jobs import MLP, Samples, make_job, vectors

_base = make_job("mlp", "adamw", steps=40, checkpoint_every=4)


def _loss(model: Any, batch: Any) -> Any:
    time.sleep(0.02)  # so that most faults come while it trains
    return _base.loss(model, batch)


def _right(model: Any, batch: Any) -> Any:
    return (model(batch["x"]).argmax(-1) == batch["y"]).double().mean()


def _counting_model() -> MLP:
    """With a buffer that says in how many updates each sample was."""
    model = MLP()
    model.register_buffer("used", torch.zeros(30, dtype=torch.int64))
    return model


def _numbered() -> Samples:
    return Samples(**vectors(30).fields, index=torch.arange(30))


def _counting_loss(model: Any, batch: Any) -> Any:
    model.used[batch["index"]] += 1
    return _loss(model, batch)


job = replace(_base, loss=_loss, evaluate=Evaluate(_base.data, {"right": _right}, every=5))
reading = replace(job, num_workers=1)
counting = replace(job, model=_counting_model, loss=_counting_loss, data=_numbered)
