"""Losses with statements that look at values. pytest would rewrite the assertions of a test's own module."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def raises(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss = mean(model, batch)
    if torch.isnan(loss).any() or loss.item() < 0 or not torch.isfinite(loss):
        raise ValueError(f"the loss is {loss.item()}")
    return loss


def prints(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss = mean(model, batch)
    if not (loss < 1e9):
        print("large")
        print(loss)
    return loss


def asserts(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss = mean(model, batch)
    assert (batch["y"] >= 0).all(), "classes are counted from zero"
    assert not torch.isnan(loss)
    return loss


def ends_with_a_check(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss = mean(model, batch)
    check(loss)
    return loss


def check(loss: Tensor) -> None:
    """Nothing comes after the statement."""
    for each in (loss, -loss):
        if each.isnan() or not each.isfinite():
            raise ValueError(each)
    if loss.isnan():
        raise ValueError(loss)


def variances(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    mean, log_var = model(batch["x"])[:, :4].chunk(2, 1)
    return nn.GaussianNLLLoss()(mean, batch["x"][:, :2], log_var.exp())


def decides(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss = mean(model, batch)
    if loss > 1e9:
        loss = loss * 2
    return loss


def has_another_way(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss = mean(model, batch)
    if loss > 1e9:
        print("large")
    else:
        loss = loss * 2
    return loss
