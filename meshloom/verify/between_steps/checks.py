"""The results of comparing a tensor, and what happens between steps, with one device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from meshloom.core.device.flat_bytes import flat_bytes
from meshloom.verify.reference.float64_blocks import distance, norm, relative

Kind = Literal["loss", "norm", "gradient", "buffer", "parameter", "update", "average", "metric", "saved"]


@dataclass(frozen=True, kw_only=True)
class TensorError:
    """The comparison of one tensor. moved: the tolerance is the measured effect of
    rounding on the reference. noise: that is as large as the tensor, of which nothing but its size is compared then."""

    name: str
    kind: Kind
    step: int
    error: float
    tolerance: float
    moved: bool = False
    noise: bool = False

    @property
    def passed(self) -> bool:
        """Whether the error counts as rounding. NaN does not."""
        return self.error <= self.tolerance


@dataclass(frozen=True, kw_only=True)
class DifferingTensor:
    """The first tensor that differs, of both sides: the gradient, parameter or buffer `name` of a step."""

    name: str
    kind: Kind
    step: int
    plan: Tensor
    one_device: Tensor


@dataclass(frozen=True, kw_only=True)
class BetweenSteps:
    """What was compared, such as "the evaluation after 2 steps". facts: differences other than numbers, a sentence each. first_module: where
    something differs, the first one in the order of the program that is wrong, if there is one."""

    what: str
    errors: Sequence[TensorError] = ()
    facts: Sequence[str] = ()
    first_module: str | None = None

    @property
    def passed(self) -> bool:
        """Whether everything agrees."""
        return not self.facts and all(error.passed for error in self.errors)


def metric_error(ours: float, right: float) -> float:
    """How far a number is off, relative to one device's."""
    if ours == right or (math.isnan(ours) and math.isnan(right)):
        return 0.0
    return abs(ours - right) / abs(right) if right and math.isfinite(ours - right) else math.inf


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have equal shapes, dtypes and bytes."""
    same = one.shape == other.shape and one.dtype == other.dtype
    return same and torch.equal(flat_bytes(one), flat_bytes(other))


def compared_with(
    name: str, ours: Tensor | None, right: Tensor, step: int, tolerance: float, kind: Kind = "saved"
) -> TensorError:
    """The comparison of a tensor that is kept with one device's; None: it is not."""
    right = right.detach().to_dense().cpu()
    if ours is None or ours.numel() != right.numel():
        error = math.inf
    elif right.is_floating_point() or right.is_complex():
        error = relative(distance(ours.to(right.dtype).view(right.shape), right), norm(right))
    else:
        error = 0.0 if torch.equal(ours.view(right.shape).to(right.dtype), right) else math.inf
    return TensorError(name=name, kind=kind, step=step, error=error, tolerance=tolerance)
