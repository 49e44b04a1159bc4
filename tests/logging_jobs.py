"""A job whose loss logs values, and the same training in a plain loop on one device."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

import meshloom as ml
from tests.jobs import averaged, class_loss, make_job, vectors


def logging_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A loss of (sum, weight), where samples of class 0 count twice."""
    logits = model(batch["x"])
    weights = 1.0 + (batch["y"] == 0)
    ml.log("accuracy", ((logits.argmax(1) == batch["y"]) * weights).sum() / weights.sum())
    ml.log("width", logits.shape[1])
    return (F.cross_entropy(logits, batch["y"], reduction="none") * weights).sum(), weights.sum()


def logging_job(**overrides: Any) -> ml.Job:
    """Batches of 12, 12 and 6."""
    sgd = {"scheduler": None, "clip_grad_norm": None}
    return make_job("mlp", "sgd", **{"loss": logging_loss, "steps": 4, **sgd, **overrides})


def in_a_plain_loop(job: ml.Job, after: Callable[[nn.Module, dict[str, Tensor]], None]) -> nn.Module:
    """Trains the job's model on whole batches without anything of the package but their order and the initial values.
    after: called with the model and each batch, before its step is taken."""
    with ml.Trainer(job, listener=ml.Listener(started=lambda text: None)) as trainer:
        model = deepcopy(trainer.replicas[0].model).cpu()
        optimizer: Any = job.optimizer(list(model.named_parameters()))
        for batch in trainer.batches():
            (chunk,) = batch.chunks
            after(model, chunk.data)
            optimizer.zero_grad()
            returned = job.loss(model, chunk.data)
            (returned[0] / returned[1] if isinstance(returned, tuple) else returned).backward()
            optimizer.step()
            trainer.step(batch)
    return model


def evaluated_job() -> ml.Job:
    metrics = {"mean": lambda model, batch: model(batch["x"]).mean()}
    return logging_job(evaluate=ml.Evaluate(data=vectors, metrics=metrics, every=2))


def averaged_job() -> ml.Job:
    evaluate = ml.Evaluate(data=vectors, metrics={"loss": class_loss}, every=2)
    return averaged(logging_job(loss=class_loss, evaluate=evaluate), 0.75)
