"""A change of a value that several may want: it is paid once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from meshloom.tensor_parallel.search.bucket_elimination import Floats

Wants = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A value is changed to what others want. source: the unknown that says what it is changed from.

    costs: [values of source, targets]; inf: cannot be. wants: unknown -> [its values, targets], which of them
    it wants. Each target is paid once. always: [targets], which are wanted whatever is chosen.
    """

    source: int
    costs: Floats
    wants: Mapping[int, Wants]
    always: Wants


def cost_of(values: Sequence[int], own: Sequence[Floats], changes: Sequence[Change]) -> float:
    """What a combination costs."""
    total = math.fsum(float(each[value]) for each, value in zip(own, values, strict=True))
    for change in changes:
        wanted = change.always.copy()
        for user, wants in change.wants.items():
            wanted |= wants[values[user]]
        total += float(change.costs[values[change.source]][wanted].sum())
    return total


def kept_of(change: Change, kept: Sequence[npt.NDArray[np.intp]]) -> Change:
    """The change with the values of each unknown that are left."""
    wants = {user: wants[kept[user]] for user, wants in change.wants.items()}
    return replace(change, costs=change.costs[kept[change.source]], wants=wants)
