"""A step of a plan compared with one device's: losses, norms and facts here, tensors in `tolerances/`.

    loss        |a - b| / mean size of a chunk's loss
    norm        of the whole gradient before clipping
    gradient    averaged, before clipping; infinite if one side is None, or if sparse gradients have different rows
    buffer      after the step; integers must be equal
    parameter   after the step
    update      the parameter's change in this step, which reveals what a small learning rate hides in the parameter

Optimizers that divide by the gradient's size turn rounding into a full step wherever a gradient is pure rounding (a bias before
batch norm, the bias of attention keys), and the effect spreads. So the reference updates with each of the plan's gradients that
passed, and continues from the plan's parameters once those passed, too. Then every element can be compared, and the two runs do
not diverge.

Tensors are compared one by one as they arrive: no copy of a step's gradients or parameters is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from meshloom.core.plan import Plan
from meshloom.core.precisions import PRECISIONS, Precision
from meshloom.verify.between_steps.checks import Kind, TensorError, metric_error
from meshloom.verify.compared.compare_chunks import facts_of, first_module, first_output, module_of_names
from meshloom.verify.reference.float64_blocks import relative
from meshloom.verify.reference.reruns import rounds_partial_sums
from meshloom.verify.reference.step_records import Cast, StepRecord, logged_means
from meshloom.verify.tolerances.gradient_errors import TIMES
from meshloom.verify.tolerances.of_precision import most_tolerated, unmeasured, unmeasured_through


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One step of both sides. facts: differences other than numbers, a sentence each. skipped: whether one device skips its update."""

    step: int
    loss: tuple[float, float]  # the plan's, one device's
    errors: Sequence[TensorError]
    facts: Sequence[str]
    # the first in order of execution whose output differs, else the last whose gradient does
    first_module: str | None
    skipped: bool = False

    @property
    def passed(self) -> bool:
        """Whether everything agrees."""
        return not self.facts and all(error.passed for error in self.errors)

    def failed(self, kind: Kind) -> list[str]:
        """Names of the tensors that fail in this kind of comparison."""
        return [error.name for error in self.errors if error.kind == kind and not error.passed]


@dataclass(kw_only=True)
class Comparer:
    """Compares step after step. precision: of the parameters. autocast: what the plan computes losses under.
    lowered: what the plan rounds parameters to, of which copies in `precision` are updated."""

    plan: Plan
    precision: torch.dtype
    autocast: torch.dtype | None = None
    lowered: torch.dtype | None = None
    _casts: set[Cast] = field(default_factory=set[Cast])

    @property
    def casts(self) -> tuple[Cast, ...]:
        """All reductions of precision in the reference so far, but those of the plan's autocast."""
        plans = self.autocast, self.lowered
        casts = {replace(each, in_gradients=False) for each in self._casts}
        own = [each for each in casts if each.in_optimizer or getattr(torch, each.dtype) not in plans]
        return tuple(sorted(own, key=lambda cast: (cast.in_optimizer, cast.place, cast.dtype)))

    def note(self, casts: Sequence[Cast]) -> None:
        """Casts in the reference's newest step."""
        self._casts |= set(casts)

    @property
    def partial(self) -> torch.dtype | None:
        """The lowest precision that partial sums are rounded to, if operators are divided; None: that of parameters."""
        if not rounds_partial_sums(self.plan):
            return None
        lower = [getattr(torch, cast.dtype) for cast in self._casts if not cast.in_optimizer]
        lower += [self.lowered] if self.lowered else []
        return max(lower, key=most_tolerated, default=None)

    @property
    def values(self) -> float:
        """The tolerance of a loss that needs no measuring. Casts are of
        equal values wherever operators run on whole chunks, so they widen nothing there (decision 40); but gradients that a loss
        takes itself are added up in a program's order."""
        if not rounds_partial_sums(self.plan):
            own = [each.dtype for each in self._casts if each.in_gradients and self.plan.divides_loss]
            return max([unmeasured(self.precision), *(most_tolerated(getattr(torch, each)) for each in own)])
        return max(unmeasured_through(self.precision), most_tolerated(self.partial))

    @property
    def modules(self) -> float:
        """The tolerance of modules' outputs on the whole batch and on its chunks, which are compared to find out what mixes samples."""
        lower = [most_tolerated(getattr(torch, cast.dtype)) for cast in self._casts if not cast.in_optimizer]
        return max([most_tolerated(self.precision), *lower])

    @property
    def outputs(self) -> float:
        """The tolerance of modules' outputs on equal chunks, which are compared where something differs, to find out where. Equal values
        are cast to equal ones."""
        return max(most_tolerated(self.precision), most_tolerated(self.partial))

    def under(self, dtype: torch.dtype | None) -> str:
        """What losses are computed under, in a sentence; "": nothing. dtype: of both sides; None: the job's own."""
        plan = self.plan
        if dtype == torch.float64 and PRECISIONS[plan.precision] != Precision():
            why = "autocast casts nothing in float64" if self.autocast else "both sides are in float64"
            return f"precision={plan.precision} is left out on both sides, as {why}"
        rounded = self.autocast or self.lowered
        if rounded is None:
            return ""
        name = name_of(rounded)
        if self.autocast:
            what = f"losses are computed under autocast to {name}, on one device too"
            if PRECISIONS[plan.precision].scaled:
                what += ", and scaled, by each with a scale of its own"
        else:
            what = f"parameters are {name}, each the rounding of a copy in {name_of(self.precision)} that is updated and compared, on one device too"
        if not rounds_partial_sums(plan):
            return what
        if plan.compiles:
            return f"{what}; compiled operators round to it in other places, so gradients may differ as far as rounding moves one device's"
        setting = f"tp={plan.tp}" if plan.tp > 1 else "sync_batch_norm=true"
        return f"{what}; with {setting} partial sums are rounded to it, so gradients may differ as far as rounding moves one device's"

    def compare(
        self,
        ours: StepRecord,
        reference: StepRecord,
        tensor_errors: Sequence[TensorError],
        *,
        grows: bool = False,
        loss_effect: Callable[[], float] | None = None,
    ) -> Comparison:
        """The comparison of the next step. tensor_errors: of its gradients, buffers and parameters. grows: whether rounding was
        measured to move some of them beyond what is tolerated. loss_effect: measures how far it moves the loss."""
        tolerance = max(self.values, most_tolerated(self.precision) if grows else 0.0)
        of_norm = unmeasured_through(self.precision)
        errors = [*_loss_errors(ours, reference, tolerance, of_norm), *tensor_errors]
        facts = [*facts_of(ours, reference, self.plan, self.values)]
        if not facts:
            errors = self._with_moved_loss(errors, abs(reference.loss), loss_effect)
        module = None
        if facts or not all(error.passed for error in errors):
            module = first_output(ours, reference, self.outputs, self.plan)
            module = module or first_module(reference, errors, self.plan)
            # both begin with a name
            apart = [*ours.apart, *(each.split(" ", 1)[0] for each in ours.inconsistent)]
            module = module or module_of_names(apart, reference, self.plan)
        return Comparison(
            step=reference.step, loss=(ours.loss, reference.loss), errors=errors, facts=facts, first_module=module, skipped=reference.skipped
        )  # fmt: skip

    def _with_moved_loss(
        self, errors: list[TensorError], size: float, effect: Callable[[], float] | None
    ) -> list[TensorError]:
        """The errors, where nothing but the loss differs, with the tolerance of one that rounding moves so far. size: of the loss."""
        wrong = [each for each in errors if not each.passed]
        is_loss = [each.name for each in wrong] == ["loss"] and wrong[0].error < math.inf
        if not is_loss or effect is None or not rounds_partial_sums(self.plan):
            return errors
        allowed = min(relative(TIMES * effect(), size), most_tolerated(self.precision))
        moved = replace(wrong[0], tolerance=max(wrong[0].tolerance, allowed))
        return [moved if each is wrong[0] else each for each in errors]


def name_of(dtype: torch.dtype | None) -> str:
    """As a user writes it."""
    return str(dtype).removeprefix("torch.")


def _loss_errors(
    ours: StepRecord, reference: StepRecord, tolerance: float, of_norm: float
) -> Iterator[TensorError]:
    of_loss = partial(TensorError, kind="loss", step=reference.step, tolerance=tolerance)
    size = abs(reference.loss)
    if reference.weight:
        size = max(size, sum(abs(chunk.loss_sum) for chunk in reference.chunks) / reference.weight)
    error = relative(abs(ours.loss - reference.loss), size)
    if reference.skipped and not math.isfinite(reference.loss):
        error = math.inf if math.isfinite(ours.loss) else 0.0
    yield of_loss(name="loss", error=error)
    if ours.gradient_norm is not None and reference.gradient_norm is not None:
        error = relative(abs(ours.gradient_norm - reference.gradient_norm), reference.gradient_norm)
        yield TensorError(
            name="gradient norm", kind="norm", step=reference.step, error=error, tolerance=of_norm
        )
    for name, value in logged_means(reference.chunks).items():
        yield of_loss(name=f"logged {name}", error=metric_error(ours.logged.get(name, math.nan), value))
