"""The setting `compile`: what of a step torch.compile compiles, and how that is told.

compile=none    operators are run one by one (default)
compile=true    forward and backward of the loss: the user's whole loss function; where a captured program runs, its
                operators between collectives, in regions; under zero=3 the modules that are gathered, one by one
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from meshloom.core.errors import PlanError
from meshloom.core.plan_text import check_known
from meshloom.core.units import format_count

COMPILE = ("none", "true")
GRAPHS = "graphs"  # CUDA graphs of whole stages, which is not built
MOST_VARIANTS = 8  # of a function, for inputs of other kinds; further ones run uncompiled


class CompileSettings(Protocol):
    """The settings of a plan that are used here."""

    @property
    def exchange(self) -> str: ...
    @property
    def compile(self) -> str: ...


def complete_compile(value: object) -> object:
    """The setting as text, also where it was given as a bool: `Plan(compile=True)`.

    >>> complete_compile(True), complete_compile(False), complete_compile("true"), complete_compile("false")
    ('true', 'none', 'true', 'none')
    """
    if isinstance(value, bool):
        return "true" if value else "none"
    return "none" if value == "false" else value


def check_compile(plan: CompileSettings) -> None:
    """Raise `PlanError` for values other than none that `compile` cannot have, alone or with other settings."""
    if plan.compile == GRAPHS:
        raise PlanError(
            "compile=graphs would replay steps as CUDA graphs, which is not built: only a GPU can show that what it replays reads and writes the right memory. "
            "Use compile=true."
        )
    check_known("compile", plan.compile, COMPILE)
    if plan.exchange == "async":
        raise PlanError(
            "compile=true compiles what replicas compute that take steps together, and exchange=async has workers. Use another exchange, or compile=none."
        )


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What was compiled on a rank so far.

    functions: given to the compiler: one loss, or regions of programs, alike ones once. graphs: that came of them, each
    with its backward. breaks: places where a function could not be compiled in one piece. hits, misses: of kept code, of
    graphs forward and backward. seconds: of the forwards in which something was compiled. uncompiled: functions that got
    more kinds of inputs than are compiled. directory: where code is kept.
    """

    functions: int
    graphs: int
    breaks: int
    reasons: tuple[str, ...]
    hits: int
    misses: int
    seconds: float
    uncompiled: int
    directory: str

    def __str__(self) -> str:
        text = (
            f"torch.compile: {format_count(self.graphs, 'graph')} of {format_count(self.functions, 'function')} in {self.seconds:.1f} s, "
            f"{format_count(self.breaks, 'graph break')}; {self.hits} of {self.hits + self.misses} found in {self.directory}"
        )
        if self.reasons:
            text += f"; breaks: {'; '.join(self.reasons[:3])}" + ("; ..." if len(self.reasons) > 3 else "")
        if self.uncompiled:
            met = f"{format_count(self.uncompiled, 'function')} met {MOST_VARIANTS} kinds of inputs"
            text += f"; {met} (shapes, dtypes), the most that are compiled: further kinds run uncompiled"
        return f"{text}."
