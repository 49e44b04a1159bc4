"""A change of a value that several may want: it is paid once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshloom.graph.least import Floats

Wants = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A value is changed to what others want. source: the unknown that says what it is changed from.

    costs: [values of source, targets]; inf: cannot be. wants: unknown -> [its values, targets], which of them it wants. Each target is paid once.
    always: [targets], which are wanted whatever is chosen.
    """

    source: int
    costs: Floats
    wants: Mapping[int, Wants]
    always: Wants
