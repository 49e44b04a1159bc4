"""A checkpoint that is written in the background, while the next step runs, against one of the same step that was written before."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any, cast

from meshloom.checkpoint.checkpoint import Checkpoint
from meshloom.comm.objects import share
from meshloom.train.trainer import Trainer
from meshloom.verify.between_steps.checks import BetweenSteps
from meshloom.verify.between_steps.saved_check import same_files
from meshloom.verify.reference.mistakes import Cause

_WHAT = "the checkpoint written in the background while the next step ran"
_COPIED = Cause(
    "saved",
    "The same state written in the foreground is right. What is copied for the thread that writes is something else, such as what the next update has "
    "made of it.",
)


def save_in_background(trainer: Trainer, directory: Path, before: Path) -> tuple[BetweenSteps, Path]:
    """Save into `directory` as training does with `Job(checkpoint="background")`, take a step, and compare with `before`, the same
    step's checkpoint. The thread that saves copies nothing until that step's update is over, so everything that only updates change is left
    for training to copy. The trainer is a step further afterwards, which nobody compares: it is for closing. All ranks call it; the comparison is
    rank 0's, the path of what is right on all.
    """
    run = trainer.synchronous
    assert run is not None
    released = Event()
    run.save_into(directory, released)
    try:
        path = trainer.save(wait=False)
        with closing(cast(Any, trainer.batches())) as batches:
            trainer.step(next(batches))
    finally:
        released.set()
    run.finish()
    checked = _compared(before, path) if trainer.world.main else BetweenSteps(what=_WHAT)
    passed = trainer.together(lambda replica: share(replica.context.world, checked.passed))[0]
    return checked, path if passed else before


def _compared(before: Path, path: Path) -> BetweenSteps:
    checked, _ = same_files(before, path, _WHAT)
    one, two = (Checkpoint.open(each, checksums=False).values for each in (before, path))
    facts = [
        f"{key} is {two.get(key)} instead of {value}."
        for key, value in one.items()
        if str(two.get(key)) != str(value)
    ]
    return replace(
        checked, facts=[*checked.facts, *facts], causes=[_COPIED] if checked.facts or facts else []
    )
