"""Causes of wrong buffers, where nothing else differs: what the step adds to a running statistic is a multiple of what it should be."""

from __future__ import annotations

import torch
from torch import Tensor

from meshloom.verify.between_steps.checks import DifferingTensor
from meshloom.verify.reference.mistakes import Cause
from meshloom.verify.reference.reference import Reference

_MANY = 5  # elements, which two numbers do not fit by chance
_LEFT = 1e-2  # of the difference, that they may leave
_MOST = 1 << 20  # values of a biased variance


def cause_of_buffer(differing: DifferingTensor | None, reference: Reference) -> Cause | None:
    """Of one that is decay * start + added on one device, and decay * start + k * added under the plan."""
    if differing is None or differing.kind != "buffer":
        return None
    start = reference._initial.get(differing.name)  # pyright: ignore[reportPrivateUsage]
    ours, right = differing.plan.double().reshape(-1), differing.one_device.double().reshape(-1)
    if (
        start is None
        or start.shape != differing.one_device.shape
        or not start.is_floating_point()
        or ours.shape != right.shape
    ):
        return None
    times = _times(ours, right, start.double().reshape(-1).to(right.device))
    if times is None:
        return None
    why = "another momentum, or a factor that is applied twice or not at all"
    if abs(times) < 1e-6:
        times, why = 0.0, "it is lost"
    elif differing.name.rpartition(".")[2] == "running_var" and (n := _values_of(times)):
        why = f"as a variance of {n} values that is divided by {n} and not by {n - 1} (biased)"
    what = f"Only buffers differ. What the step adds to {differing.name} is {times:.6g} times one device's: {why}"
    return Cause(
        "batch statistics", f"{what}. This explains all but {_LEFT:.0%} of the difference.", explains=True
    )


def _values_of(times: float) -> int | None:
    """n, where times is (n - 1) / n."""
    n = 1 / (1 - times) if 0 < times < 1 else 0.0
    return round(n) if 1 < n < _MOST and abs(n - round(n)) < 1e-2 * n else None


def _times(ours: Tensor, right: Tensor, start: Tensor) -> float | None:
    """k, where ours - right = (k - 1) * right - (k - 1) * decay * start, for some decay of 0 to 1."""
    off = ours - right
    if off.numel() < _MANY or not bool(torch.isfinite(torch.stack([off, right, start])).all()):
        return None
    matrix = torch.stack([right, start], 1)
    found = torch.linalg.lstsq(matrix, off[:, None], driver="gelsd").solution[:, 0]
    if float((matrix @ found - off).norm()) > _LEFT * float(off.norm()):
        return None
    more, of_start = found.tolist()
    decays = more != 0 and -1e-3 <= -of_start / more <= 1.001
    return 1 + more if decays else None
