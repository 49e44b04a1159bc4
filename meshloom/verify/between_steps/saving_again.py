"""Checkpoints of one state that are written in two ways: in the background while the next step runs, and once more after resuming."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from meshloom.comm.objects import share
from meshloom.launch.environment import scratch_directory
from meshloom.train.evaluation import TeamEvaluation
from meshloom.train.run_checkpoints import BEST
from meshloom.train.trainer import Trainer
from meshloom.verify.between_steps.checks import BetweenSteps
from meshloom.verify.between_steps.kept_checkpoints import kept_checkpoints
from meshloom.verify.between_steps.saved_check import same_files

_QUICKLY_WRITTEN = 1 << 28  # bytes
_BACKGROUND = "the checkpoint written in the background while the next step ran"
_BEST = "the checkpoint of the best evaluation"


T = TypeVar("T")


def save_in_background(trainer: Trainer, directory: Path, before: Path) -> tuple[BetweenSteps, Path]:
    """Save into `directory` as training does with `Job(checkpoint="background")`, take a step, and compare with `before`, the same
    step's checkpoint. The trainer is a step further afterwards, which nobody compares: it is for closing. All ranks call it; the comparison is
    rank 0's, the path of what is right on all.
    """
    run = trainer.synchronous
    assert run is not None
    run.save_into(directory)
    path = trainer.save(wait=False)
    with closing(cast(Any, trainer.batches())) as batches:
        trainer.step(next(batches))
    run.finish()
    checked = BetweenSteps(what=_BACKGROUND)
    if trainer.world.main:
        checked = same_files(before, path, _BACKGROUND, with_values=True)
    return checked, path if of_first_rank(trainer, checked.passed) else before


def best_saved(directory: Path, path: Path, evaluation: TeamEvaluation) -> list[BetweenSteps]:
    """Of a job that keeps the checkpoint of the best evaluation, which the first is unless its metric is not a number: compared with `path`, of the
    same step."""
    best = evaluation.best
    if best is None or math.isnan(evaluation.newest[0][best.metric]):
        return []
    kept = directory / BEST / path.name
    if kept.exists():
        return [same_files(path, kept, _BEST)]
    return [BetweenSteps(what=_BEST, facts=[f"{BEST}/ does not have it, and no evaluation was before this one."])]  # fmt: skip


def saved_after_resuming(
    trainer: Trainer, path: Path, compare: Callable[[Path, str], BetweenSteps] | None
) -> list[BetweenSteps]:
    """The next checkpoint of a Trainer that has resumed the one in `path` and taken steps, and which of further ones are kept; none where writing
    them takes long. The trainer is for closing. compare: with one device, on rank 0. All ranks call it."""
    run = trainer.synchronous
    assert run is not None
    size = sum(each.stat().st_size for each in path.rglob("*") if each.is_file()) if trainer.world.main else 0
    if (size := of_first_rank(trainer, size)) > _QUICKLY_WRITTEN:
        return []
    run.save_into(path.parent / "resumed")
    saved = trainer.save()
    checked = [compare(saved, "the next checkpoint of the run that was resumed,")] if compare else []
    if size * trainer.job.keep_checkpoints > _QUICKLY_WRITTEN:
        return checked
    return [*checked, *kept_checkpoints(trainer, path.parent / "kept")]


def saved_again(opened: AbstractContextManager[Trainer], path: Path, elsewhere: str = "") -> BetweenSteps:
    """Compare the checkpoint in `path` with what `opened`, a Trainer that has resumed it, saves before any step. elsewhere: under which
    other plan than the one that wrote it. All ranks call it."""
    what = f"the checkpoint resumed{f' under {elsewhere}' if elsewhere else ''} and saved again"
    with opened as trainer, saving_directory(trainer) as directory:
        run = trainer.synchronous
        assert run is not None
        run.save_into(directory)
        again = trainer.save()
        if not trainer.world.main:
            return BetweenSteps(what=what)
        return same_files(path, again, what, with_values=not elsewhere)


@contextmanager
def saving_directory(trainer: Trainer) -> Iterator[Path]:
    """A directory for checkpoints, of one name on all ranks; the first one removes it. The trainer is not held until then."""
    made = tempfile.mkdtemp(prefix="meshloom-verify-", dir=scratch_directory()) if trainer.world.main else ""
    directory = Path(of_first_rank(trainer, made))
    del trainer
    try:
        yield directory
    finally:
        if made:
            shutil.rmtree(made, ignore_errors=True)


def of_first_rank(trainer: Trainer, value: T) -> T:
    """What rank 0 gives. All ranks call it."""
    return trainer.together(lambda replica: share(replica.context.world, value))[0]
