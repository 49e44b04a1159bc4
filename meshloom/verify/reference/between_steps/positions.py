"""Going on with the data of a later step, and what must be true of orders and seeds whatever the plan.

Seeds and orders come from functions that the plan and the reference share, so a mistake in them makes no difference between
the two: they are checked by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import nn

from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.random import (
    KeyedDraws,
    chunk_seed,
    evaluation_seed,
    partner_order,
    pass_over_draws,
    preserved_draws,
    sample_order,
    sample_seed,
    seed_torch,
)
from meshloom.parameters.values.keyed_init import call_model
from meshloom.telemetry.best_metric import BestMetric
from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference.samples_of_epoch import read_batches
from meshloom.verify.reference.trained_losses import turns

_MANY = 8  # steps, epochs, samples
_DRAWN = 64  # numbers of a draw, which no two draws have alike by chance


def go_to(reference: Reference, step: int) -> None:
    """The next step is the one of this number; parameters, optimizers and schedules are as they are."""
    reference.turns_left = turns(reference.losses, read_batches(reference.job, step), step)


def mistakes_on_both_sides(job: Job, plan: Plan) -> Iterator[str]:
    """What is wrong on both sides, a sentence each: two chunks, steps, samples, epochs or keyed draws of a chunk that draw alike, an order that
    is no permutation, or the same in two epochs; an evaluation that is kept as the best and is not, or training that stops at another one."""
    if plan.keyed_draws or plan.captures:
        yield from _mistakes_of_keys(job)
    yield from _alike(lambda step, chunk: chunk_seed(job.seed, step, chunk), "step", "chunk", "masks")
    yield from _alike(
        lambda epoch, index: sample_seed(job.seed, epoch, index), "epoch", "sample", "augmentation"
    )
    if job.evaluate:
        yield from _alike(
            lambda batch, chunk: evaluation_seed(job.seed, batch, chunk), "batch", "chunk", "metrics"
        )
    if job.mix and partner_order(job.seed, 0, _DRAWN) == partner_order(job.seed, 1, _DRAWN):
        yield "Two steps mix the samples of a batch with the same partners, on one device too."
    for samples in (2, 37):
        orders = [sample_order(job.seed, epoch, samples, job.shuffle) for epoch in range(3)]
        if any(sorted(order) != list(range(samples)) for order in orders):
            yield f"An epoch of {samples} samples does not read each of them once, on one device too."
    if job.shuffle and (orders[0] == orders[1] or orders[1] == orders[2]):
        yield "Two epochs have the same order, on one device too."
    if job.init == "keyed":
        small = [replace(job, seed=seed, model=lambda: nn.Linear(5, 3)) for seed in (job.seed, job.seed + 1)]
        with preserved_draws():
            weights = [call_model(each).state_dict()["weight"] for each in small]
        if torch.equal(*weights):
            yield "Initial values of two seeds are the same, on one device too."
    if job.evaluate and job.evaluate.best:
        yield from _mistakes_of_the_best(job.evaluate.best)


def _mistakes_of_the_best(text: str) -> Iterator[str]:
    """text: of `Evaluate.best`."""
    metric, _, which = text.rpartition(":")
    values = [0.5, 0.75, 0.25, 0.25, 0.5] if which == "min" else [0.5, 0.25, 0.75, 0.75, 0.5]
    found, stopped = BestMetric.of(text, patience=2), list[bool]()
    for step, value in enumerate(values, 1):
        found = found.after(step, {metric: value})
        stopped.append(found.stops)
    if found.step != 3:
        yield f"Of evaluations of {values} the one after step {found.step} is kept as the best by {text}, on one device too."
    again = BestMetric.of(text, patience=2)
    for step, value in enumerate(values, 1):  # a run that is resumed after each
        again = BestMetric.of(text, patience=2).going_on(again.to_dict()).after(step, {metric: value})
    if again != found:
        yield f"Resumed after each of evaluations of {values}, {text} has waited for {again.waited} since step {again.step}, not for {found.waited} since {found.step}."
    elif found.step == 3 and stopped != [False, False, False, False, True]:
        yield f"With patience=2 training does not stop at the fifth of evaluations of {values} by {text} alone, on one device too."


def _mistakes_of_keys(job: Job) -> Iterator[str]:
    """Draws of a chunk have keys of their own, whichever are made before them."""
    seed = chunk_seed(job.seed, 0, 0)
    with preserved_draws(), KeyedDraws():
        seed_torch(seed)
        drawn = [torch.rand(_DRAWN) for _ in range(3)]
        seed_torch(seed)
        pass_over_draws(2)
        third = torch.rand(_DRAWN)
    for first, second in ((0, 1), (1, 2), (0, 2)):
        if torch.equal(drawn[first], drawn[second]):
            yield f"Keyed draws {first} and {second} of a chunk are the same, on one device too: they have one key."
            return
    if not torch.equal(third, drawn[2]):
        yield "A keyed draw is another one where those before it are passed over, on one device too."


def _alike(seed: Callable[[int, int], int], first: str, second: str, what: str) -> Iterator[str]:
    seen: dict[int, tuple[int, int]] = {}
    for pair in ((a, b) for a in range(_MANY) for b in range(_MANY)):
        if (other := seen.setdefault(seed(*pair), pair)) != pair:
            places = [f"{first} {a}, {second} {b}" for a, b in (other, pair)]
            yield f"The draws ({what}) of {places[0]} and of {places[1]} have one seed, on one device too."
            return
