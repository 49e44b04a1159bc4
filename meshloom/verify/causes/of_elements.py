"""Causes that show where single elements of wrong gradients come from: one device's in another order, one place further, from other
tensors, or cut off at a limit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from meshloom.verify.reference.mistakes import MAX_ELEMENTS, Cause, Gradients

Wrong = Mapping[str, Tensor]  # subsampled, by name
_FEW = 3  # elements, which more than chance can put in order
_MANY = 16  # elements, from which a share can be told
_EQUAL = 0.01  # of a tensor's distance from one device's, that counts as none
_FOUND = 1e-5  # of an element, within which another one has its value
_OTHER = 1.0137  # times an element, which no other one has the value of, but by chance


def from_elements(actual: Wrong, right: Wrong, everything: Gradients, transposed: Gradients) -> Cause | None:
    """The first that fits all wrong gradients. everything, transposed: one device's, of all parameters."""
    return (
        _limited(actual, right)
        or _transposed(actual, right, transposed)
        or _shifted(actual, right)
        or _in_another_order(actual, right)
        or _elsewhere(actual, right, everything)
    )


def _limited(actual: Wrong, right: Wrong) -> Cause | None:
    """Whether elements are one device's, up to a largest and a smallest one."""
    for name, each in actual.items():
        low, high = float(each.min()), float(each.max())
        at_limits = int(((each == low) | (each == high)).sum())
        expected = right[name].clamp(low, high)
        if at_limits < _FEW or low == high or not _is_near(each, expected, right[name]):
            return None
    low, high = (
        min(float(each.min()) for each in actual.values()),
        max(float(each.max()) for each in actual.values()),
    )
    what = f"Elements of {names_of(actual)} are one device's, limited to between {low:.3g} and {high:.3g}"
    return Cause("clipping", f"{what}: they are clipped one by one, or too large for what they travel as.")


def _transposed(actual: Wrong, right: Wrong, transposed: Gradients) -> Cause | None:
    for name, each in actual.items():
        other = transposed.get(name)
        if other is None or not _is_near(each, other, right[name]):
            return None
    return Cause("exchanged", f"The gradients of {names_of(actual)} are one device's, transposed.")


def _shifted(actual: Wrong, right: Wrong) -> Cause | None:
    """Whether most elements are those beside them."""
    for places in (1, -1):
        found = differing = 0
        for name, each in actual.items():
            off = each - right[name]
            from_beside = (each - right[name].roll(places)).abs()
            wrong = off.abs() > 1e-6 * right[name].abs().max()
            differing += int(wrong.sum())
            if each.numel() < MAX_ELEMENTS:  # else those beside an element are not at hand
                found += int((wrong & (from_beside <= _EQUAL * off.abs())).sum())
        if differing >= _MANY // 2 and found > 0.7 * differing:
            which = "before" if places > 0 else "behind"
            what = f"{found / differing:.0%} of the wrong elements of {names_of(actual)} are those one place {which} them"
            return Cause("border", f"{what}: an index is off by one, or a part begins at the wrong element.")
    return None


def _in_another_order(actual: Wrong, right: Wrong) -> Cause | None:
    for name, each in actual.items():
        same = _is_near(each.sort().values, right[name].sort().values, right[name], each)
        if not _FEW < each.numel() < MAX_ELEMENTS or not same:
            return None
    backwards = all(_is_near(each, right[name].flip(0), right[name]) for name, each in actual.items())
    order = "from the last to the first" if backwards else "in another order"
    what = f"The elements of {names_of(actual)} are one device's, {order}"
    return Cause("exchanged", f"{what}: they are in the wrong places.")


def _elsewhere(actual: Wrong, right: Wrong, everything: Gradients) -> Cause | None:
    """Whether wrong elements are values that one device has in other places, of which chance gives few."""
    pool = {name: each for name, each in everything.items() if each is not None}
    values, order = torch.cat([*pool.values()]).sort()
    wrong = torch.cat(
        [each[(each - right[name]).abs() > 1e-6 * right[name].abs().max()] for name, each in actual.items()]
    )
    wrong = wrong[wrong != 0]
    if wrong.numel() < _MANY // 2:
        return None
    places, found = _nearest(wrong, values)
    if float(found.double().mean()) < 0.9 or float(_nearest(wrong * _OTHER, values)[1].double().mean()) > 0.1:
        return None
    ends = torch.tensor([each.numel() for each in pool.values()]).cumsum(0)
    owners = torch.searchsorted(ends, order[places[found]], right=True)
    numbers: Any = owners.bincount().argsort(descending=True)[:3].tolist()
    counted = [list(pool)[number] for number in numbers if bool((owners == number).any())]
    what = f"{float(found.double().mean()):.0%} of the wrong elements of {names_of(actual)} are values that one device has in other places"
    return Cause("exchanged", f"{what}, most in {', '.join(counted)}: parts are exchanged for one another.")


def _nearest(wanted: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The place of the nearest of sorted `values` to each one, and whether it is equal."""
    behind = torch.searchsorted(values, wanted).clamp(max=len(values) - 1)
    before = (behind - 1).clamp(min=0)
    nearer = (values[before] - wanted).abs() < (values[behind] - wanted).abs()
    places = torch.where(nearer, before, behind)
    return places, (values[places] - wanted).abs() <= _FOUND * wanted.abs()


def _is_near(each: Tensor, expected: Tensor, right: Tensor, ours: Tensor | None = None) -> bool:
    """Whether what is left of the difference from one device's is nothing. ours: if `each` is of another order."""
    off = (each if ours is None else ours) - right
    return each.numel() > _FEW and float((each - expected).norm()) <= _EQUAL * float(off.norm())


def names_of(wrong: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    shown = list(wrong)
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")
