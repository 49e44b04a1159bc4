"""What training logs, and what its metrics are given, is of the global batch, as on one device: each replica has a share of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection  # pyright: ignore[reportPrivateUsage]
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torchmetrics import MaxMetric, Metric, MinMetric, SumMetric

from meshloom.loops import means
from meshloom.loops.taken_shares import bound


class GlobalResults(_ResultCollection):
    """Of `self.log` in training: each value is what the global batch gives."""

    def log(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Of a tensor, its mean over the global batch; its sum or extreme where `reduce_fx` says so. Metrics are of the global batch already."""
        if isinstance(value, Tensor) and not kwargs.get("rank_zero_only"):
            value = _of_all(value.detach(), kwargs.get("reduce_fx", torch.mean))
            given, share = kwargs.get("batch_size"), bound()
            if given is not None:
                kwargs["batch_size"] = means.sum(given)
            elif share is not None and self.batch is not None and kwargs.get("on_epoch", True):
                rows = extract_batch_size(self.batch)
                kwargs["batch_size"] = sum(share.sizes) if rows == share.rows else rows
        log: Any = super().log  # pyright: ignore[reportAttributeAccessIssue]
        log(fx, name, value, *args, **kwargs)


def _of_all(value: Tensor, reduce_fx: Any) -> Tensor:
    how = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
    if how == "sum":
        return means.sum(value)
    if how in ("max", "min"):
        everyone = means.gather(value.reshape(1, -1))
        return getattr(everyone, f"a{how}")(0).view(value.shape)
    # in float64, in which what all replicas have is its own mean
    found = means.mean(value.double())
    return found.to(value.dtype if value.is_floating_point() else torch.get_default_dtype())


def share_metrics(module: LightningModule) -> None:
    """Metrics within `module` have the state of the global batch on every rank: in training they are given the rows of all replicas, in evaluation every
    rank has whole batches."""
    updating: list[Metric] = []  # those that are given rows of all, and call others within
    each: Any
    for each in module.modules():
        if isinstance(each, Metric):
            each.sync_on_compute = each.dist_sync_on_step = each._to_sync = False  # pyright: ignore[reportPrivateUsage]
            each.update = _gathering(each, each.update, module, updating)


def _gathering(
    metric: Metric, update: Callable[..., None], module: LightningModule, updating: list[Metric]
) -> Callable[..., None]:
    @wraps(update)
    def gathered(*args: Any, **kwargs: Any) -> None:
        trainer: Any = module._trainer  # pyright: ignore[reportPrivateUsage]
        if updating or trainer is None or not trainer.training:
            update(*args, **kwargs)
            return
        of_all = partial(_gathered, metric)
        updating.append(metric)
        try:
            update(*map(of_all, args), **{name: of_all(value, name) for name, value in kwargs.items()})
        finally:
            updating.pop()

    return gathered


def _gathered(metric: Metric, value: Any, name: str = "") -> Any:
    """Of all replicas: rows in the order of the batch; a number's mean, or its sum where it is one over samples."""
    if isinstance(value, list) or (isinstance(value, Tensor) and value.ndim):
        return means.gather(value)
    if isinstance(value, Tensor | float) or (isinstance(value, int) and name == "weight"):
        if isinstance(metric, MaxMetric | MinMetric):
            return means.gather(torch.as_tensor(value).reshape(1))
        return means.sum(value) if isinstance(metric, SumMetric) or name == "weight" else means.mean(value)
    return value
