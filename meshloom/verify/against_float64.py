"""How far a plan, and one device at the same precision, are from one device in float64: what the precision costs, and
that the plan adds nothing to it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from meshloom.verify.reference.float64_blocks import distance, norm
from meshloom.verify.reference.reference import Reference


@dataclass(frozen=True, kw_only=True)
class FromFloat64:
    """Distances from one device in float64 in the first step, of the plan and of one device at the plan's precision.

    losses: |a - b| / |b|. gradients: ||a - b|| / ||b|| of all gradients together.
    """

    losses: tuple[float, float]
    gradients: tuple[float, float]

    @property
    def sentence(self) -> str:
        (loss, of_one), (gradient, gradient_of_one) = self.losses, self.gradients
        return (
            f"from one device in float64, first step: gradients of the plan are {gradient:.1e} away and those of one device at its precision "
            f"{gradient_of_one:.1e}; losses {loss:.1e} and {of_one:.1e}"
        )


class AgainstFloat64:
    """Measures the first step that is not skipped. reference: runs in float64, from the same values on the same chunks and draws."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._squares = {"plan": 0.0, "one device": 0.0, "float64": 0.0}

    def begin(self) -> None:
        """Forward and backward in float64; again where the plan has skipped the step before, so that parameters are the first ones."""
        self._squares = dict.fromkeys(self._squares, 0.0)
        try:
            self._reference.run()
        except Exception as error:
            error.add_note("This is one device in float64, which --against float64 compares with.")
            raise
        found = [norm(each) for each in self._reference.gradients.values() if each is not None]
        self._squares["float64"] = sum(each**2 for each in found)

    def add(self, name: str, ours: Tensor | None, one_device: Tensor | None) -> None:
        """The next averaged gradient; None: unused. Neither is kept."""
        exact = self._reference.gradients.get(name)
        for who, gradient in (("plan", ours), ("one device", one_device)):
            self._squares[who] += _distance(gradient, exact) ** 2

    def result(self, loss: float, of_one_device: float) -> FromFloat64:
        """After all gradients. loss: the plan's."""
        exact, size = self._reference.loss, math.sqrt(self._squares["float64"])
        return FromFloat64(
            losses=(_ratio(abs(loss - exact), abs(exact)), _ratio(abs(of_one_device - exact), abs(exact))),
            gradients=(
                _ratio(math.sqrt(self._squares["plan"]), size),
                _ratio(math.sqrt(self._squares["one device"]), size),
            ),
        )


def _distance(gradient: Tensor | None, exact: Tensor | None) -> float:
    if gradient is None or exact is None:
        there = exact if gradient is None else gradient
        return 0.0 if there is None else norm(there)
    return distance(gradient.to_dense(), exact.to_dense())


def _ratio(difference: float, size: float) -> float:
    return difference / size if size else 0.0 if not difference else math.inf
