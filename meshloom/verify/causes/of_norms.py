"""Causes of a wrong norm of gradients that agree: what counts more than once in it, or not at all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from meshloom.verify.causes.of_elements import names_of
from meshloom.verify.compared.compare import Comparison
from meshloom.verify.reference.mistakes import Cause, Evidence
from meshloom.verify.reference.step_records import StepRecord

_UNITS = 2e-6  # of the whole square, by which float32 may round a norm's
_LEAST = 100  # times that, which is told from rounding
_SAME = 1e-9  # of the whole square, up to which two parts are one
_BLOCKS = [2**power for power in range(6, 21)]  # elements that may be added up together


def from_norm(
    comparison: Comparison, ours: StepRecord, reference: StepRecord, evidence: Evidence
) -> list[Cause]:
    """The gradients agree but their norm does not."""
    norm, right = ours.gradient_norm, reference.gradient_norm
    if not comparison.failed("norm") or norm is None or not right:
        return []
    of = f"The gradients agree, but their norm, by which they are clipped, is {norm:.6g} instead of {right:.6g}"
    names = [name for name in evidence.tied if name in evidence.norms]
    tied = sum(len(evidence.tied[name]) * evidence.norms[name] ** 2 for name in names)
    if tied and math.isclose(norm, math.sqrt(right**2 + tied), rel_tol=1e-4):
        return [Cause("tied", f"{of}: tied parameters ({names_of(names)}) are counted once per name.")]
    dp = evidence.plan.dp
    part = _part(norm, right, evidence.parts)
    why = "a part of the model is counted more than once"
    if dp > 1 and any(math.isclose(norm, times * right, rel_tol=1e-4) for times in (dp, math.sqrt(dp))):
        why, part = f"the norms of all dp = {dp} replicas are added, though their gradients are equal", ""
    elif evidence.clip and math.isclose(norm, min(evidence.clip, right), rel_tol=1e-3):
        why, part = "they are clipped already, or a second time", ""
    elif norm < right:
        parts = evidence.plan.pp > 1 or evidence.plan.tp > 1 or evidence.plan.zero > 0
        owned = ", such as parameters that other ranks own" if parts else ""
        why = f"a part of the model is left out{owned}"
    exactly = (
        f". Its square has {'less' if norm < right else 'more'}, by what is added to it by {part}"
        if part
        else ""
    )
    return [Cause("clipping", f"{of}: {why}{exactly}.", explains=bool(part))]


def _part(norm: float, right: float, parts: Mapping[str, float]) -> str:
    """The one part that is missing from the square of a norm, or is there once more; "": none is, or it may be one of several."""
    whole = right**2
    off = abs(norm**2 - whole)
    if not math.isfinite(off) or off < _LEAST * _UNITS * whole:
        return ""
    found = {what: square for what, square in parts.items() if abs(square - off) <= _UNITS * whole}
    if not found or max(found.values()) - min(found.values()) > _SAME * whole:
        return ""
    return next(iter(found))


def parts_of_norm(gradients: Mapping[str, Tensor | None]) -> dict[str, float]:
    """What parts of a gradient add to the square of its norm, simple ones first."""
    known = {name: each.detach().to_dense() for name, each in gradients.items() if each is not None}
    squares = {name: _square(each) for name, each in known.items()}
    parts = {f"the gradient of {name}": square for name, square in squares.items()}
    for what, names in _groups(known):
        parts.setdefault(what, sum(squares[name] for name in names))
    complex_ones = {name: each for name, each in known.items() if each.is_complex()}
    for what, side in (("imaginary", 1), ("real", 0)) if complex_ones else ():
        total = sum(_square(torch.view_as_real(each)[..., side]) for each in complex_ones.values())
        parts[f"the {what} parts of {names_of(complex_ones)}"] = total
    for block in reversed(_BLOCKS):
        behind = {name: tail for name, each in known.items() if (tail := _behind(each, block)) is not None}
        if behind:
            which = [f"the last {tail.numel():,} elements of {name}" for name, tail in behind.items()]
            what = f"{names_of(which)}, behind whole blocks of {block:,}"
            parts[what] = sum(map(_square, behind.values()))
    return parts


def _groups(known: Mapping[str, Tensor]) -> Iterator[tuple[str, Sequence[str]]]:
    """Gradients that belong together."""
    modules = dict.fromkeys(name[:place] for name in known for place, sign in enumerate(name) if sign == ".")
    for module in modules:
        yield f"all gradients of {module}", [name for name in known if name.startswith(f"{module}.")]
    for leaf in dict.fromkeys(name.rpartition(".")[2] for name in known):
        yield (
            f"every gradient that is called {leaf}",
            [name for name in known if name.rpartition(".")[2] == leaf],
        )
    for ndim in sorted({each.ndim for each in known.values()}):
        yield (
            f"all gradients of {ndim} dimensions",
            [name for name, each in known.items() if each.ndim == ndim],
        )


def _behind(gradient: Tensor, block: int) -> Tensor | None:
    """The elements behind the last whole block of a longer gradient; None: there are none."""
    flat = torch.view_as_real(gradient).reshape(-1) if gradient.is_complex() else gradient.reshape(-1)
    rest = flat.numel() % block
    return flat[-rest:] if rest and flat.numel() > block else None


def _square(values: Tensor) -> float:
    return float(values.abs().double().square().sum())
