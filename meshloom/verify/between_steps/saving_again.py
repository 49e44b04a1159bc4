"""The checkpoints that a run writes otherwise than once: in the background while the next step runs, after resuming, the best, the newest few."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from meshloom.checkpoint.checkpoint import Checkpoint
from meshloom.checkpoint.format import step_name
from meshloom.comm.objects import share
from meshloom.launch.environment import scratch_directory
from meshloom.telemetry.best_metric import BestMetric
from meshloom.train.evaluation import TeamEvaluation
from meshloom.train.run_checkpoints import BEST
from meshloom.train.trainer import Trainer
from meshloom.verify.between_steps.checks import BetweenSteps
from meshloom.verify.between_steps.saved_check import same_files

_QUICKLY_WRITTEN = 1 << 28  # bytes
_BACKGROUND = "the checkpoint written in the background while the next step ran"
_BEST = "the checkpoint of the best evaluation"
_FURTHER = 2  # saves than are kept
_BETTER = 2  # number of the evaluation that is better than those before

T = TypeVar("T")


def save_in_background(trainer: Trainer, directory: Path, before: Path) -> tuple[BetweenSteps, Path]:
    """Save into `directory` as training does with `Job(checkpoint="background")`, take a step, and compare with `before`, the same
    step's checkpoint. The trainer is a step further afterwards, which nobody compares: it is for closing. All ranks call it; the comparison is
    rank 0's, the path of what is right on all.
    """
    path = saved_into(trainer, directory, wait=False)
    with closing(cast(Any, trainer.batches())) as batches:
        trainer.step(next(batches))
    assert trainer.synchronous is not None
    trainer.synchronous.finish()
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
    size = sum(each.stat().st_size for each in path.rglob("*") if each.is_file()) if trainer.world.main else 0
    if (size := of_first_rank(trainer, size)) > _QUICKLY_WRITTEN:
        return []
    saved = saved_into(trainer, path.parent / "resumed")
    checked = [compare(saved, "the next checkpoint of the run that was resumed,")] if compare else []
    if size * trainer.job.keep_checkpoints > _QUICKLY_WRITTEN:
        return checked
    return [*checked, *_kept_checkpoints(trainer, path.parent / "kept")]


def saved_again(opened: AbstractContextManager[Trainer], path: Path, elsewhere: str = "") -> BetweenSteps:
    """Compare the checkpoint in `path` with what `opened`, a Trainer that has resumed it, saves before any step. elsewhere: under which
    other plan than the one that wrote it. All ranks call it."""
    what = f"the checkpoint resumed{f' under {elsewhere}' if elsewhere else ''} and saved again"
    with opened as trainer, saving_directory(trainer) as directory:
        again = saved_into(trainer, directory)
        if not trainer.world.main:
            return BetweenSteps(what=what)
        return same_files(path, again, what, with_values=not elsewhere)


def saved_into(trainer: Trainer, directory: Path, *, wait: bool = True) -> Path:
    """The checkpoint that the trainer writes there now, as all further ones. wait: until it is written. All ranks call it."""
    assert trainer.synchronous is not None
    trainer.synchronous.save_into(directory)
    return trainer.save(wait=wait)


def _kept_checkpoints(trainer: Trainer, directory: Path) -> list[BetweenSteps]:
    """Which checkpoints a run keeps, and which one is in best/, after more evaluations, of the first batch, and saves than it keeps.

    evaluation   first    equal    better   equal ...      the best so far is made worse before the third
    best/        first    first    third    third ...
    kept         the newest `keep_checkpoints`
    """
    run, keep, given = trainer.synchronous, trainer.job.keep_checkpoints, trainer.job.evaluate
    assert run is not None
    run.save_into(directory)
    run.evaluation.best = BestMetric.of(given.best, None) if given and given.best else None
    saved, expected, facts = list[int](), 0, list[str]()
    with run.evaluation.of_first(1):
        for number in range(max(keep + _FURTHER, _BETTER + 2)):
            run.next_step += 1
            best = run.evaluation.best
            if best is not None and number == _BETTER:
                run.evaluation.best = replace(best, value=best.value - 1 if best.largest else best.value + 1)
            run.after_step(last=True)
            saved.append(run.next_step)
            if best is not None and not math.isnan(run.evaluation.newest[0][best.metric]):
                expected = run.next_step if number in (0, _BETTER) else expected
                facts += _wrong_best(directory / BEST, expected) if trainer.world.main else ()
    if not trainer.world.main:
        return []
    there, right = _steps_in(directory), [step_name(each) for each in saved[-keep:]]
    if there != right:
        facts.append(
            f"With keep_checkpoints={keep}, {', '.join(there) or 'none'} are kept of steps {saved[0]} to {saved[-1]}, and not {', '.join(right)}."
        )
    return [BetweenSteps(what=f"which of {len(saved)} checkpoints are kept", facts=facts)]


def _wrong_best(directory: Path, expected: int) -> Iterator[str]:
    there = _steps_in(directory)
    if there != [step_name(expected)]:
        yield f"{BEST}/ holds {', '.join(there) or 'nothing'}, and the best evaluation was after step {expected}."
        return
    saved = Checkpoint.open(directory / there[0], checksums=False)
    said = (saved.values.get("best") or {}).get("step")
    if (saved.step, said) != (expected, expected):
        yield f"{BEST}/{there[0]} is of step {saved.step}, and says that step {said} is the best."


def _steps_in(directory: Path) -> list[str]:
    return sorted(each.name for each in directory.glob("step-*"))


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
