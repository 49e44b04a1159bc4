"""How much faster n ranks can be: Amdahl's law, without and with the cost of communication (R8.1).

S(n) = 1 / (1 - f + f/n)                                        f: the share of one rank's step that can be parallelised
S(n) = T_1 / (T_serial + T_parallel / n + T_communication(n))   T_1 = T_serial + T_parallel
"""

from __future__ import annotations

from dataclasses import dataclass

from meshloom.core.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class AmdahlWork:
    """One rank's step: seconds that do not depend on the number of ranks, and seconds that are split over
    them."""

    serial_seconds: float
    parallel_seconds: float

    def __post_init__(self) -> None:
        if self.serial_seconds < 0 or self.parallel_seconds < 0 or not self.seconds:
            raise PlanError(
                f"A step of {self.serial_seconds} s serial and {self.parallel_seconds} s parallel work is not possible. Both are 0 or more."
            )

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.serial_seconds + self.parallel_seconds

    @property
    def parallel_share(self) -> float:
        """f."""
        return self.parallel_seconds / self.seconds


def bound(work: AmdahlWork, num_ranks: int) -> float:
    """The speedup of `num_ranks` ranks if communication costs nothing (Amdahl, 1967).

    >>> bound(AmdahlWork(serial_seconds=1.0, parallel_seconds=3.0), 3)
    2.0
    """
    return 1.0 / (1.0 - work.parallel_share + work.parallel_share / num_ranks)


def with_communication(work: AmdahlWork, num_ranks: int, communication_seconds: float) -> float:
    """The speedup if communication takes so many seconds of the step.

    >>> with_communication(AmdahlWork(serial_seconds=1.0, parallel_seconds=3.0), 3, 2.0)
    1.0
    """
    return work.seconds / (work.serial_seconds + work.parallel_seconds / num_ranks + communication_seconds)
