"""Wrong updates that are one device's but for a factor, or for what rounding leaves."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from meshloom.verify.causes.of_elements import names_of
from meshloom.verify.compared.compare import Comparison
from meshloom.verify.reference.mistakes import Cause
from meshloom.verify.reference.step_records import StepRecord

_LARGEST, _ALIKE = 1e-2, 8  # what rounding may leave of an update; times the least of several
_COMMON = 0.7  # of what is left, that may be a multiple which all have in common


def scaled_updates(comparison: Comparison, names: Sequence[str], reference: StepRecord) -> Cause | None:
    """Whether all wrong updates are one multiple of one device's."""
    found = [error.multiple for error in comparison.errors if error.kind == "update" and not error.passed]
    ratios = [each[0] for each in found if each is not None and each[1] < 0.1 * abs(each[0] - 1)]
    if (
        not found
        or len(ratios) < len(found)
        or max(ratios) - min(ratios) > 1e-3 * max(1.0, *map(abs, ratios))
    ):
        return None
    ratio = ratios[0]
    why = "another learning rate, or a factor that is applied twice or not at all"
    if abs(ratio) < 1e-3:
        why = "these parameters are not updated, or have old values again"
        if alone := _one_optimizers(names, reference):
            why = f"these parameters are not updated, and they are all that {alone} updates: it makes no step, or is given no gradients"
        elif reference.turn and {*names} == {
            name for name, each in reference.gradients.items() if each is not None
        }:
            why = f"these parameters are not updated, and they are all that loss {reference.turn} trains: its optimizer makes no step, or another loss's does"
    elif math.isclose(ratio, 2, rel_tol=1e-3):
        why = "the update is applied a second time, or the learning rate is doubled"
    what = f"The gradients agree, and the updates of {names_of(names)} are {ratio:.4g} times one device's"
    return Cause("optimizer", f"{what}: {why}.")


def _one_optimizers(names: Sequence[str], reference: StepRecord) -> str:
    """The optimizer, or the group of one, of which these are all parameters that have gradients; "": there is none, or no other."""
    of: dict[str, set[str]] = {}
    for what, members in reference.groups.items():
        trained = {name for name in members if reference.gradients.get(name) is not None}
        for whole in (what.partition(" of ")[2], what):
            of[whole] = of.get(whole, set()) | trained
    everything = set[str]().union(*of.values())
    return next((what for what, members in of.items() if members == set(names) != everything), "")


def rounded_updates(
    comparison: Comparison, names: Sequence[str], earlier: Sequence[Comparison]
) -> Cause | None:
    """Whether all wrong updates are one device's but for what rounding leaves: about the same part of each, in no direction that they have in
    common, and no less in the steps before, which passed."""
    wrong = [error for error in comparison.errors if error.kind == "update" and not error.passed]
    known = [(error.elements, *error.multiple) for error in wrong if error.multiple]
    off = [math.hypot(times - 1, rest) for _, times, rest in known]
    if not off or len(off) < len(wrong) or max(off) > min(_LARGEST, _ALIKE * min(off)):
        return None
    typical = math.sqrt(max(off) * min(off))
    # of a few elements the multiple is off by chance
    common = sum(elements * (times - 1) for elements, times, _ in known) / sum(each[0] for each in known)
    before = [
        error.error
        for step in earlier
        if not step.skipped
        for error in step.errors
        if error.kind == "update" and error.name in {each.name for each in wrong}
    ]
    if abs(common) > _COMMON * typical or min(before, default=typical) < min(off) / _ALIKE:
        return None
    what = f"The gradients agree, and elements of the updates of {names_of(names)} differ by about {typical:.0e} of their size, in no direction"
    for dtype in (torch.bfloat16, torch.float16):
        if 0.05 * torch.finfo(dtype).eps < typical < 0.6 * torch.finfo(dtype).eps:
            name = str(dtype).removeprefix("torch.")
            return Cause("rounding", f"{what}, as rounding to {name} makes of them.")
    return None
