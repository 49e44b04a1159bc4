"""Bugs in precisions with few digits or a small range."""

from __future__ import annotations

from tests.planted.sixth import SIXTH

SIXTH.edit(
    "overflows_of_own_slices",
    "replica/step_checks.py",
    old="    if replicas.size > 1:\n        work = replicas.all_reduce(flag)",
    new="    if replicas.size > 1 and not values:\n        work = replicas.all_reduce(flag)",
    job="coarse:job",
    plan="dp=2,zero=1,precision=fp16-mixed",
    truth="Each rank skips a step if its own slices of gradients have overflowed, whatever those of others have.",
    says="they are not all told of an overflow, or each goes by its own part of the gradients",
    module=None,
)
SIXTH.edit(
    "skipped_steps_step_schedulers",
    "optimizer/updater.py",
    old="for scheduler in turn.schedulers if not skip else ():",
    new="for scheduler in turn.schedulers:",
    job="coarse:job",
    plan="dp=2,zero=1,precision=fp16-mixed",
    truth="A step that is skipped because gradients overflowed steps the schedulers nevertheless.",
    says="The update is skipped on both sides: what comes after one was done all the same",
    module=None,
)
