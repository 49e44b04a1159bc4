"""Causes that show in where a step goes wrong: in the forward of which module or chunk, or on the way back from which module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshloom.core.plan import Plan
from meshloom.verify.compared.compare import Comparison
from meshloom.verify.compared.compare_chunks import (
    filled,
    order_of_modules,
    other_modules,
    place_of_owner,
    ways_of_step,
)
from meshloom.verify.reference.mistakes import Cause, Evidence
from meshloom.verify.reference.step_records import StepRecord
from meshloom.verify.tolerances.gradient_errors import FLOOR

_CHUNK = 4  # times a loss's tolerance, that a chunk's may be off


def from_forward(
    comparison: Comparison, ours: StepRecord, reference: StepRecord, evidence: Evidence
) -> Cause | None:
    """Data, draws and parameters agree, and outputs do not."""
    module, plan = comparison.first_output, evidence.plan
    if module in evidence.batch_norms and plan.sync_batch_norm:
        what = f"The output of {module} is the first that differs, on the same data and parameters"
        return Cause("batch statistics", f"{what}: its statistics are not those of the whole batch.")
    if module is not None:
        if known := ways_of_step("" if module == "the whole model" else module, ours, reference, plan):
            what = f"The output of {module} is the first that differs, on the same data and parameters"
            return Cause("forward", f"{what}: {known}.")
        same, draws = (
            ("data, draws and parameters", "")
            if _run_as_written(plan)
            else ("data and parameters", ", or draws other numbers")
        )
        what = f"The output of {module} is the first that differs, on the same {same}"
        if _run_as_written(plan) and (known := other_modules(ours, reference)):
            return Cause("forward", f"{what}: {known}.")
        why = f"it, or an operation before it, computes something else than on one device{draws}, as with other settings or in another precision"
        return Cause("forward", f"{what}: {why}.")
    wrong = differing_chunks(comparison, ours, reference)
    if plan.pp == 1 or plan.tp > 1 or not wrong:
        return None
    which = ", ".join(map(str, wrong[:8])) + (", ..." if len(wrong) > 8 else "")
    equal = len(filled(reference.chunks)) - len(wrong)
    but = f", and of {equal} others they agree" if equal else ""
    what = f"The losses of chunks {which} differ on the same data and parameters{but}"
    return Cause("stages", f"{what}: what a stage computes of them, draws for them or is sent is wrong.")


def _run_as_written(plan: Plan) -> bool:
    """Whether chunks do, each alone, so that their draws and the calls of modules are compared by themselves."""
    return not (plan.captures or plan.compiles or plan.sync_batch_norm)


def from_backward(
    comparison: Comparison, reference: StepRecord, evidence: Evidence, sizes: Mapping[str, float]
) -> Cause | None:
    """Outputs agree, and gradients do from some module on, but none before it. sizes: norms of one device's gradients."""
    plan, order = evidence.plan, order_of_modules(reference, evidence.plan)
    largest = max(sizes.values(), default=0.0)
    wrong = {place_of_owner(name, order) for name in comparison.failed("gradient")}
    right = {
        place_of_owner(error.name, order)
        for error in comparison.errors
        if error.kind == "gradient" and error.passed and sizes.get(error.name, 0.0) > FLOOR * largest
    }
    if not wrong or not right or max(wrong) >= min(right) or comparison.failed("loss"):
        return None
    before, behind = (list(order)[place] for place in (max(wrong), min(right)))
    what = f"All outputs agree, and so do the gradients of {behind} and all behind it, but none of {before} and before"
    if plan.pp > 1:
        also = ", or the exchange of a stage" if plan.dp > 1 else ""
        return Cause("stages", f"{what}: what stages send back{also} is wrong.")
    between = list(order)[max(wrong) : min(right) + 1]
    norms = [name for name in between if name in evidence.batch_norms]
    if plan.sync_batch_norm and norms:
        why = f"what goes back through the statistics of {norms[0]} is not that of the whole batch"
        return Cause("batch statistics", f"{what}: {why}.")
    return None


def repeated_chunks(comparison: Comparison, ours: StepRecord, reference: StepRecord) -> Cause | None:
    """Whether all chunks whose losses differ have those of others of one device."""
    here, there = filled(ours.chunks), filled(reference.chunks)
    tolerance = max(error.tolerance for error in comparison.errors if error.kind == "loss")
    found: dict[int, int] = {}
    for index in differing_chunks(comparison, ours, reference):
        own = here[index].loss_sum
        like = [
            each
            for each, chunk in there.items()
            if abs(own - chunk.loss_sum) <= tolerance * abs(chunk.loss_sum)
        ]
        if not like:
            return None
        found[index] = like[0]
    if not found:
        return None
    shown = ", ".join(f"chunk {index} has that of chunk {other}" for index, other in [*found.items()][:4])
    what = f"Losses of chunks are those of other chunks ({shown}), though each has its own data"
    return Cause(
        "microbatches", f"{what}: values of another microbatch are used in its place.", explains=True
    )


def differing_chunks(comparison: Comparison, ours: StepRecord, reference: StepRecord) -> list[int]:
    """The chunks of which both sides have losses that differ."""
    tolerance = _CHUNK * max(error.tolerance for error in comparison.errors if error.kind == "loss")
    here = filled(ours.chunks)

    def differing() -> Iterator[int]:
        for index, chunk in filled(reference.chunks).items():
            if index in here and not (
                abs(here[index].loss_sum - chunk.loss_sum) <= tolerance * abs(chunk.loss_sum)
            ):
                yield index

    return list(differing())
