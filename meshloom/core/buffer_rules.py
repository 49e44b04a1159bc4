"""The rules by which what a step's chunks leave in a buffer becomes one value.

Every chunk reads a buffer as the step found it, b0, and leaves e_k. Chunks that leave their samples out do not count.

    "last"      b = what the last chunk left
    "sum"       b = b0 + sum over chunks of (e_k - b0)
    ema(d)      for chunks in order, elementwise: b <- d b + (e_k - d b0); elements with e_k = b0 stay
    a function  b = function(b0, [e_1, e_2, ...])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import Tensor

from meshloom.core.errors import JobError

_EXAMPLE = 'buffers={"teacher.*": ml.ema(0.99), "seen": "sum", "queue*": "last"}'


@dataclass(frozen=True)
class Ema:
    """The rule of a moving average that keeps `decay` of its value in every chunk."""

    decay: float


BufferRule = Literal["last", "sum"] | Ema | Callable[[Tensor, Sequence[Tensor]], Tensor]


def ema(decay: float) -> Ema:
    """The rule of a buffer, or of an untrained parameter, that each chunk moves as a moving average does, keeping `decay` of it.

    Raises `JobError` unless 0 <= decay <= 1.

    >>> ema(0.99)
    Ema(decay=0.99)
    """
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay <= 1:
        raise JobError(f"ml.ema({decay!r}) must be a number from 0 to 1, like ml.ema(0.99).")
    return Ema(float(decay))


def rule_of(name: str, rules: Mapping[str, BufferRule]) -> BufferRule | None:
    """The rule of the first pattern that the name of a tensor fits.

    >>> rule_of("teacher.0.weight", {"teacher.*": ema(0.9), "*": "sum"}), rule_of("seen", {})
    (Ema(decay=0.9), None)
    """
    return next((rule for pattern, rule in rules.items() if fnmatchcase(name, pattern)), None)


def check_rules(rules: Any) -> None:
    """Raises `JobError` for what is no mapping of patterns to rules."""
    if not isinstance(rules, Mapping) or not all(isinstance(pattern, str) for pattern in rules):
        raise JobError(f"Job(buffers=...) must be rules by names or patterns of names, like {_EXAMPLE}.")
    for pattern, rule in rules.items():
        if not (rule in ("last", "sum") or isinstance(rule, Ema) or callable(rule)):
            raise JobError(
                f'Job(buffers={{{pattern!r}: {rule!r}}}) must be "last", "sum", ml.ema(decay) or a function of a buffer and of what '
                f"the chunks left in it, like {_EXAMPLE}."
            )
