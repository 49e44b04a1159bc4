"""The result of comparing what happens between steps with one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshloom.verify.compare import TensorError


@dataclass(frozen=True, kw_only=True)
class BetweenSteps:
    """What was compared, such as "the evaluation after 2 steps". facts: differences other than numbers, a sentence each."""

    what: str
    errors: Sequence[TensorError] = ()
    facts: Sequence[str] = ()

    @property
    def passed(self) -> bool:
        """Whether everything agrees."""
        return not self.facts and all(error.passed for error in self.errors)
