"""Gradients that are each a multiple of one device's, not all the same one: powers of what sums are divided by, whole numbers, or none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from meshloom.verify.reference.mistakes import Evidence
from meshloom.verify.tolerances.gradient_errors import FLOOR

Gradients = Mapping[str, Tensor]  # subsampled, by name
_OFF = (
    1e-4  # of a gradient, that its multiple may leave; of a factor, that a whole number or a power may be off
)
_LOST = 1e-9  # a factor that leaves nothing, where it is no power
_WHOLE = 1000  # numbers beyond it are all near whole ones
_SHOWN = 4
_PARTS = 2  # of a tensor, such as the slices of two ranks


@dataclass(frozen=True, kw_only=True)
class FactorsOfEach:
    """what: the multiples, as the end of a sentence. expected: the gradients that they give."""

    what: str
    expected: Callable[[str], Tensor]


def factors_of_each(actual: Gradients, right: Gradients, evidence: Evidence) -> FactorsOfEach | None:
    """None: not each is one, or they have no form, or are all the same. Gradients of rounding alone may be anything."""
    factors = {name: _multiple(each, right[name]) for name, each in actual.items()}
    largest = max((float(each.norm()) for each in right.values()), default=0.0)
    clear = {name: each for name, each in factors.items() if float(right[name].norm()) > FLOOR * largest}
    if len({f"{factor:.3e}" for factor, _ in clear.values()}) < 2:
        return None
    if (found := _powers({name: actual[name] for name in clear}, right, evidence)) is not None:
        what, gradients = found
        return FactorsOfEach(
            what=what,
            expected=lambda name: gradients[name] if name in gradients else factors[name][0] * right[name],
        )
    if any(off > _OFF * abs(factor) and abs(factor) >= _LOST for factor, off in clear.values()):
        return None
    what = _whole_numbers({name: factor for name, (factor, _) in clear.items()})
    return FactorsOfEach(what=what, expected=lambda name: factors[name][0] * right[name]) if what else None


def _multiple(each: Tensor, own: Tensor) -> tuple[float, float]:
    """How many times the other one it is, and what is left, by the other one's norm."""
    factor = float((each * own).sum() / (own * own).sum().clamp_min(1e-300))
    return factor, float((each - factor * own).norm()) / max(float(own.norm()), 1e-300)


def _powers(actual: Gradients, right: Gradients, evidence: Evidence) -> tuple[str, Gradients] | None:
    """By powers of one number, of which a tensor may have two, in two parts; and what the gradients are by them."""
    for base, of in _bases(evidence):
        exponents: dict[str, list[int]] = {}
        found: dict[str, Tensor] = {}
        for name, each in actual.items():
            own = right[name]
            powers = ((each / own).log() / math.log(base)).round().nan_to_num(0.0, 0.0, 0.0)
            found[name] = own * base**powers
            counted = own.abs() > _OFF * own.abs().max()
            exponents[name] = sorted({int(power) for power in powers[counted].tolist()}, reverse=True)
            off = float((each - found[name]).norm())
            if len(exponents[name]) > _PARTS or off > _OFF * float(each.norm()):
                break
        else:
            which = _listed({name: " and ".join(f"{base:g}^{each}" for each in of_each) for name, of_each in exponents.items()})  # fmt: skip
            why = "each is divided or multiplied by it a number of times of its own"
            return f", by powers of {base:g}, {of} ({which}): {why}", found
    return None


def _bases(evidence: Evidence) -> Iterator[tuple[float, str]]:
    """What sums are divided by, largest first, as smaller ones may be powers of it."""
    plan, total = evidence.plan, sum(chunk.weight for chunk in evidence.chunks)
    found = {
        total: "the weight of the whole batch",
        float(plan.dp * plan.microbatches): "the number of chunks",
        float(plan.dp): "the number of replicas",
        float(plan.microbatches): "the number of microbatches",
    }
    yield from sorted(((base, of) for base, of in found.items() if base > 1), reverse=True)


def _whole_numbers(factors: Mapping[str, float]) -> str:
    for each in factors.values():
        whole = abs(each) if abs(each) >= 1 else 1 / max(abs(each), 1e-300)
        if abs(each) >= _LOST and (whole > _WHOLE or abs(whole - round(whole)) > _OFF * whole):
            return ""
    which = _listed({name: _number(each) for name, each in factors.items()}, " times")
    return f" ({which}): each is divided or multiplied a number of times of its own"


def _listed(shown: Mapping[str, str], unit: str = "") -> str:
    first = ", ".join(f"{name} {each}" for name, each in [*shown.items()][:_SHOWN])
    return f"{first}{unit}{', ...' if len(shown) > _SHOWN else ''}"


def _number(factor: float) -> str:
    if abs(factor) < _LOST:
        return "0"
    return f"{factor:.6g}" if abs(factor) >= 1 else f"1/{1 / factor:.6g}"
