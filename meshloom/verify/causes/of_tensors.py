"""Causes that show in the elements of wrong gradients, without a rerun: tensors exchanged for one another, rounding on the way,
a border that is off, a gradient of the wrong microbatches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from meshloom.verify.causes.fitted import fitted
from meshloom.verify.causes.of_elements import names_of
from meshloom.verify.reference.mistakes import Cause, Evidence

_LEFT_OF_EACH = 0.3  # of a tensor, that a mixture may leave
_LITTLE = 1e-3  # of the largest tensor, below which others are of rounding
Gradients = Mapping[str, Tensor]  # subsampled, by name
_LOWER = (torch.float32, torch.bfloat16, torch.float16)
_MANY = 16  # elements, from which a distribution can be told
_TAIL = 6  # times the median of relative differences, within which rounding keeps 95% of them
_LARGEST = 1e-2  # of an element: more is no rounding


def from_exchanged(
    actual: Gradients, right: Gradients, everything: Mapping[str, Tensor | None]
) -> Iterator[tuple[Cause, Callable[[str], Tensor]]]:
    """Causes, and the gradients that each would give. right, everything: one device's, of what is wrong and of all parameters."""
    found = exchanged(actual, right, everything)
    if found:
        shown = ", ".join(f"that of {name} is {other}'s" for name, other in list(found.items())[:3])
        yield (
            Cause("exchanged", f"Gradients are exchanged for one another: {shown}."),
            lambda name: _given(everything[found[name]], right[name]) if name in found else right[name],
        )


def exchanged(actual: Gradients, right: Gradients, everything: Mapping[str, Tensor | None]) -> dict[str, str]:
    """Wrong gradient -> the parameter of equal size whose gradient it is."""
    found: dict[str, str] = {}
    for name, each in actual.items():
        off = float((each - right[name]).norm())
        for other, value in everything.items():
            if (
                other != name
                and value is not None
                and value.shape == each.shape
                and float((each - value).norm()) < 0.01 * off
            ):
                found[name] = other
                break
    return found


def from_rounding(
    actual: Gradients, right: Gradients, parts: Sequence[Callable[[str], Tensor]] = ()
) -> Cause | None:
    """Whether the differences are what rounding to a lower precision makes of each element: as large as its half unit, and of
    no direction. parts: what is rounded and then added up; none: the result."""
    ours, one = torch.cat(list(actual.values())), torch.cat(list(right.values()))
    held = one.abs() > 1e-3 * one.abs().max()  # smaller ones may be sums of larger ones
    size = one.abs()
    if parts:
        size = torch.cat([torch.stack([part(name) for part in parts]).abs().sum(0) for name in right])
    ours, one, size = ours[held], one[held], size[held]
    if one.numel() < _MANY:
        return None
    relative = (ours - one) * one.sign() / size
    typical, bias = float(relative.abs().median()), abs(float(relative.mean()))
    if not typical or bias > typical:
        return None
    # a mistake that happens to be as small has longer tails
    if float(relative.abs().quantile(0.95)) >= _TAIL * typical or typical > _LARGEST:
        return None
    what = f"Elements of {names_of(actual)} differ by about {typical:.0e} of their size, in no direction"
    for dtype in _LOWER:
        eps = torch.finfo(dtype).eps
        if 0.05 * eps < typical < 0.6 * eps:
            name = str(dtype).removeprefix("torch.")
            return Cause("rounding", f"{what}, as rounding to {name} on the way makes of them.")
    bits = round(-math.log2(typical)) - 1
    return Cause(
        "rounding",
        f"{what}, as rounding to about {bits} bits makes of them: something on the way is less precise, or adds noise.",
    )


def from_places(actual: Gradients, right: Gradients) -> Cause | None:
    """Whether but few elements differ, next to each other."""
    if not 1 <= len(actual) <= 3:
        return None
    shown: list[str] = []
    for name, each in actual.items():
        off = (each - right[name]).abs() > 1e-6 * max(float(right[name].abs().max()), 1e-300)
        places = off.nonzero().reshape(-1)
        if not places.numel():  # what differs is not among the elements that were kept
            return None
        first, last = int(places[0]), int(places[-1])
        if places.numel() > 0.25 * each.numel() or last - first >= 2 * places.numel():
            return None
        zero = " and are zero" if not bool(each[off].any()) else ""
        shown.append(
            f"the part from {first / each.numel():.0%} to {(last + 1) / each.numel():.0%} of {name} differs{zero}"
        )
    why = "an index is off at the border of two parts, or a part is lost"
    return Cause("border", f"Of the wrong gradients only {', '.join(shown)}, and the rest is right: {why}.")


def from_mixture(actual: Gradients, error: float, evidence: Evidence) -> list[Cause]:
    """The factors of the chunks' gradients, if the result is a mixture of them."""
    total = sum(chunk.weight for chunk in evidence.chunks)
    columns = [
        torch.cat([_given(chunk.gradients.get(name), each) for name, each in actual.items()])
        for chunk in evidence.chunks
    ]
    target = torch.cat(list(actual.values()))
    if target.numel() < 2 * len(columns) or not bool(target.any()):  # what is lost is no mixture
        return []
    values, left = fitted([each / total for each in columns], target)
    if left / float(target.norm()) > 0.03 * error:
        return []
    if not _fits_each(list(actual.values()), columns, [each / total for each in values]):
        return []
    names = ["+".join(map(str, chunk.chunks)) for chunk in evidence.chunks]
    if max(values) - min(values) < 0.02 * abs(1 - values[0]) and values[0] != 1:
        which = f"The gradients of {names_of(actual)} are {values[0]:.6g} times one device's"
        return [Cause("scale", f"{which}: they are multiplied by a wrong number.")]
    whole = [round(value) for value in values]
    if all(math.isclose(value, count, abs_tol=1e-2) for value, count in zip(values, whole, strict=True)):
        times = [
            f"chunk {name} {count} times" for name, count in zip(names, whole, strict=True) if count != 1
        ]
        if not times:
            return []
        return [
            Cause(
                "microbatches",
                f"The gradients of {names_of(actual)} have {', '.join(times[:4])}: values of another microbatch are used, or one is used again.",
            )
        ]
    shown = [f"{name}: {factor:.3g}" for name, factor in zip(names, values, strict=True)]
    what = f"the gradients of {names_of(actual)} mix the chunks with wrong factors (chunk: factor, where 1 is right)"
    listed = ", ".join(shown[:8]) + (", ..." if len(shown) > 8 else "")
    return [Cause("unknown", f"Unknown cause: {what} {listed}.")]


def _fits_each(tensors: Sequence[Tensor], columns: Sequence[Tensor], factors: Sequence[float]) -> bool:
    """Whether the mixture of `columns` is that of each tensor, and not of the largest alone."""
    mixture = sum(factor * column for factor, column in zip(factors, columns, strict=True))
    assert isinstance(mixture, Tensor)
    parts = mixture.split([each.numel() for each in tensors])
    largest = max(float(part.norm()) for part in parts)
    return all(
        float((each - part).norm()) <= _LEFT_OF_EACH * max(float(part.norm()), _LITTLE * largest)
        for each, part in zip(tensors, parts, strict=True)
    )


def _given(tensor: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if tensor is None else tensor
