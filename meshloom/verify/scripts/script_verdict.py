"""What is said of a script that was run under a plan, by itself and as plain copies."""

from __future__ import annotations

from collections.abc import Sequence

from meshloom.core.plan import Plan
from meshloom.core.units import format_count
from meshloom.replica.model_state import shown_names
from meshloom.verify.scripts.script_comparison import ScriptComparison

_REASONS = (
    "; a mean over what only some samples have (unmasked tokens), a number of the share that goes on into training (loss.item()), a loss or a module "
    "that lets samples interact, or what the loop draws alike on every replica, has this effect"
)


def verdict(
    plan: Plan, whole: ScriptComparison, copies: ScriptComparison | str | None, *, drew: bool, draws: bool, batch_norms: Sequence[str]
) -> list[str]:  # fmt: skip
    """Sentences, the verdict first.

    whole: compared with the script by itself. copies: with plain copies; why they were not compared; or None: there was no need to.
    drew: whether forwards drew. draws: whether they do otherwise than by torch's functions. batch_norms: names of modules that normalize by
    statistics of their batch.
    """
    without = "" if drew else ", without draws of forwards on both sides"
    what = f"{format_count(whole.steps, 'backward' if whole.backwards else 'step')}{'' if whole.backwards else ' of an optimizer'}"
    compared = f"{what}, {whole.tensors:,} tensors{without}"
    number = format_count(whole.left_out, "element")
    left_out = (
        [f"{number} of parameters were left out, whose gradients are rounding."] if whole.left_out else []
    )
    if whole.first is None:
        return [
            f"EQUAL: the script computes under {plan} what it computes by itself on whole batches ({compared}).",
            f"The largest difference is {whole.worst:.1e} of a tensor's size.",
            *left_out,
        ]
    lines = [
        f"DIFFERS: the script computes under {plan} something else than by itself on whole batches ({compared}).",
        f"First in {whole.first}.",
    ]
    if whole.first.factor is not None:
        lines.append(named_factor(whole.first.factor, plan.dp))
    reasons: list[str] = []
    if draws and plan.num_chunks > 1:
        reasons.append("its forward draws random numbers, of which each share has its own")
    if batch_norms and plan.num_chunks > 1 and not plan.sync_batch_norm:
        way_out = (
            "" if plan.divides_loss else " (sync_batch_norm=true in the plan takes them over the whole batch)"
        )
        reasons.append(
            f"{shown_names(batch_norms)}: batch normalization by the statistics of shares{way_out}"
        )
    if reasons:
        lines.append(f"It cannot hold on whole batches: {'; '.join(reasons)}.")
    return [*lines, *_of_copies(plan, copies, explained=bool(reasons)), *left_out]


def why_no_copies(plan: Plan, *, draws: bool, weighs: bool, batch_norms: Sequence[str]) -> str | None:
    """Why plain copies, one for each replica, would not compute what the plan does; None: they would. weighs: whether a module has a weight of its own."""
    if draws:
        return "its forward draws"
    if weighs:
        return "its calls count by parallel(weight=...), and theirs by rows"
    if batch_norms and plan.num_chunks > plan.dp:
        return f"{shown_names(batch_norms)} normalizes by the statistics of microbatches, and they have none"
    if batch_norms and plan.sync_batch_norm:
        return f"{shown_names(batch_norms)} normalizes by the statistics of all replicas' shares, and each of them has its own"
    return None


def held_by_ranks(held: Sequence[tuple[float, float]]) -> str:
    """What ranks have of parameters and of optimizers' state, as shares of the whole.

    >>> held_by_ranks([(0.5, 0.5), (0.5, 0.5)]), held_by_ranks([(0.4, 1.0), (0.6, 1.0)])
    ("A rank holds 50% of the parameters and 50% of the optimizers' state.", "A rank holds 40% to 60% of the parameters and 100% of the optimizers' state.")
    """
    parameters, states = (
        " to ".join(dict.fromkeys(f"{each:.0%}" for each in (min(of_kind), max(of_kind))))
        for of_kind in zip(*held, strict=True)
    )
    return f"A rank holds {parameters} of the parameters and {states} of the optimizers' state."


def is_of_a_sum(factor: float, replicas: int) -> bool:
    """Whether a factor of every gradient is 1/dp: the loss is a sum over samples."""
    return abs(factor * replicas - 1) < 1e-6


def named_factor(factor: float, replicas: int) -> str:
    """What a factor of every gradient means.

    >>> named_factor(0.5, 2)
    'Every gradient is 1/2 of the whole batch, 1/dp: the loss is a sum over samples. Write ml.sum(loss).backward() there.'
    """
    if is_of_a_sum(factor, replicas):
        return f"Every gradient is 1/{replicas} of the whole batch, 1/dp: the loss is a sum over samples. Write ml.sum(loss).backward() there."
    if abs(factor / replicas - 1) < 1e-6:
        return f"Every gradient is {replicas} times the whole batch's, dp: a mean is added up over replicas. Write ml.mean in place of ml.sum."
    return f"Every gradient is {factor:.6g} times the whole batch's."


def _of_copies(plan: Plan, copies: ScriptComparison | str | None, *, explained: bool) -> list[str]:
    mistake = "the mistake is in meshloom, or in code that asks which rank it is."
    if copies is None:
        return [] if explained else [f"The one replica has the whole batch: {mistake}"]
    if isinstance(copies, str):
        return [f"It was not compared with plain copies: {copies}."]
    if copies.equal:
        return [
            f"The plan does what dp={plan.dp} plain copies do, whose gradients are averaged: the loss over shares is not the loss over the whole "
            f"batch{'' if explained else _REASONS}."
        ]
    return [
        f"It differs from dp={plan.dp} plain copies, too, whose gradients are averaged (first in {copies.first}): {mistake}"
    ]
