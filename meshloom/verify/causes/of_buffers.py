"""Causes of wrong buffers, where nothing else differs: what the step adds to a running statistic is a multiple of what it should be."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from meshloom.verify.between_steps.checks import DifferingTensor
from meshloom.verify.causes.fitted import fitted
from meshloom.verify.reference.mistakes import Cause
from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference.reruns import having

_MANY = 5  # elements, which two numbers do not fit by chance
_LEFT = 1e-2  # of the difference, that they may leave
_CHUNKS = 64  # that are run once more
_MOST = 1 << 20  # values of a biased variance


def cause_of_buffer(differing: DifferingTensor | None, reference: Reference) -> Cause | None:
    """Of one that is decay * start + added on one device, and decay * start + k * added under the plan."""
    if differing is None or differing.kind != "buffer":
        return None
    start = reference._initial.get(differing.name)  # pyright: ignore[reportPrivateUsage]
    ours, right = differing.plan.double().reshape(-1), differing.one_device.double().reshape(-1)
    if (
        start is not None
        and start.shape == differing.plan.shape
        and torch.equal(start.to(differing.plan), differing.plan)
    ):
        what = f"Only buffers differ. {differing.name} has the value that it had before the step"
        return Cause("batch statistics", f"{what}: what forwards write there is not kept.", explains=True)
    if (
        start is None
        or start.shape != differing.one_device.shape
        or not start.is_floating_point()
        or ours.shape != right.shape
    ):
        return None
    start = start.double().reshape(-1).to(right.device)
    times = _times(ours, right, start)
    if times is None:
        return _of_chunks(differing.name, ours, right, start, reference)
    why = "another momentum, or a factor that is applied twice or not at all"
    if abs(times) < 1e-6:
        times, why = 0.0, "it is lost"
    elif differing.name.rpartition(".")[2] == "running_var" and (n := _values_of(times)):
        why = f"as a variance of {n} values that is divided by {n} and not by {n - 1} (biased)"
    what = f"Only buffers differ. What the step adds to {differing.name} is {times:.6g} times one device's: {why}"
    return Cause(
        "batch statistics", f"{what}. This explains all but {_LEFT:.0%} of the difference.", explains=True
    )


def _of_chunks(name: str, ours: Tensor, right: Tensor, start: Tensor, reference: Reference) -> Cause | None:
    """Of one that each chunk decays, and adds to: which chunks, in which order, give the plan's value."""
    written = _written(name, reference) if reference.before else []
    if not 1 < len(written) <= _CHUNKS or any(each.shape != start.shape for each in written):
        return None
    decay = _decay(start, written, right)
    if decay is None:
        return None
    added = [each - decay * start for each in written]
    off, best, found = float((ours - right).norm()), math.inf, ""
    for what, value in _ways(start, added, decay, reference.plan.microbatches):
        left = float((ours - value).norm())
        if left < _LEFT * off and left < best:
            best, found = left, what
    if not found:
        return None
    what = f"Only buffers differ. {name} is what one device has {found}"
    return Cause(
        "batch statistics", f"{what}. This explains {1 - best / off:.2%} of the difference.", explains=True
    )


def _written(name: str, reference: Reference) -> list[Tensor]:
    """What each forward of the step makes of its value at the start."""
    found: list[Tensor] = []
    with having(reference, reference.before), reference.rerun():
        for forward in reference.forwards():
            reference.restore()
            reference.run_forward(forward, watched=False)
            found.append(reference.model.get_buffer(name).detach().double().reshape(-1).clone())
    return found


def _decay(start: Tensor, written: list[Tensor], right: Tensor) -> float | None:
    """By which each chunk multiplies what it finds: with it, one chunk behind another gives `right`."""
    size = float((right - start).norm())

    def left(decay: float) -> float:
        return float((_composed(start, [each - decay * start for each in written], decay) - right).norm())

    from scipy.optimize import minimize_scalar  # here, because runs that are right need not wait for it

    found = min((step / 64 for step in range(65)), key=left)
    bounds = max(0.0, found - 1 / 64), min(1.0, found + 1 / 64)
    near: Any = minimize_scalar(left, bounds=bounds, method="bounded", options={"xatol": 1e-9})
    return float(near.x) if left(float(near.x)) < _LEFT * size else None


def _composed(start: Tensor, added: list[Tensor], decay: float) -> Tensor:
    for each in added:
        start = decay * start + each
    return start


def _ways(
    start: Tensor, added: list[Tensor], decay: float, microbatches: int
) -> Iterator[tuple[str, Tensor]]:
    replicas = [added[first : first + microbatches] for first in range(0, len(added), microbatches)]
    yield "of the first chunk alone", _composed(start, added[:1], decay)
    yield "of the last chunk alone", _composed(start, added[-1:], decay)
    yield "with the chunks in reverse order", _composed(start, added[::-1], decay)
    yield "of the mean of what each chunk makes of it", decay * start + torch.stack(added).mean(0)
    yield (
        "where no chunk decays what those before it have added",
        decay ** len(added) * start + torch.stack(added).sum(0),
    )
    if 1 < len(replicas) < len(added):
        reverse = [each for replica in reversed(replicas) for each in replica]
        yield "with the replicas in reverse order", _composed(start, reverse, decay)
        own = [each for replica in replicas for each in reversed(replica)]
        yield "with each replica's chunks in reverse order", _composed(start, own, decay)
        undecayed = start
        for replica in replicas:
            undecayed = decay ** len(replica) * undecayed + torch.stack(replica).sum(0)
        yield "where no chunk decays what those before it on its replica have added", undecayed
        once = start
        for replica in replicas:
            once = decay * once + _composed(torch.zeros_like(start), replica, decay)
        yield (
            "where a replica decays what was there before it once, and not once for each of its chunks",
            once,
        )
        of_each = [_composed(start, replica, decay) for replica in replicas]
        yield "of the mean of what each replica makes of it", torch.stack(of_each).mean(0)
        yield "of each replica's first chunk alone", _composed(start, [each[0] for each in replicas], decay)
        yield "of each replica's last chunk alone", _composed(start, [each[-1] for each in replicas], decay)
    for number, replica in enumerate(replicas) if len(replicas) > 1 else ():
        yield f"of replica {number} alone", _composed(start, replica, decay)
        rest = [each for other in replicas if other is not replica for each in other]
        yield f"without replica {number}", _composed(start, rest, decay)


def _values_of(times: float) -> int | None:
    """n, where times is (n - 1) / n."""
    n = 1 / (1 - times) if 0 < times < 1 else 0.0
    return round(n) if 1 < n < _MOST and abs(n - round(n)) < 1e-2 * n else None


def _times(ours: Tensor, right: Tensor, start: Tensor) -> float | None:
    """k, where ours - right = (k - 1) * right - (k - 1) * decay * start, for some decay of 0 to 1."""
    off = ours - right
    if off.numel() < _MANY or not bool(torch.isfinite(torch.stack([off, right, start])).all()):
        return None
    (more, of_start), left = fitted([right, start], off)
    if left > _LEFT * float(off.norm()):
        return None
    decays = more != 0 and -1e-3 <= -of_start / more <= 1.001
    return 1 + more if decays else None
