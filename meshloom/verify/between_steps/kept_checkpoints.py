"""Which checkpoints a run keeps, and which one is in best/, after more evaluations and saves than it keeps.

evaluation   first    equal    better   equal ...      the best so far is made worse before the third
best/        first    first    third    third ...
kept         the newest `keep_checkpoints`
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from meshloom.checkpoint.checkpoint import Checkpoint
from meshloom.checkpoint.format import step_name
from meshloom.telemetry.best_metric import BestMetric
from meshloom.train.run_checkpoints import BEST
from meshloom.train.trainer import Trainer
from meshloom.verify.between_steps.checks import BetweenSteps

_FURTHER = 2  # saves than are kept
_BETTER = 2  # number of the evaluation that is better than those before


def kept_checkpoints(trainer: Trainer, directory: Path) -> list[BetweenSteps]:
    """Evaluate the first batch and save as after a last step, as if further steps had been taken. The trainer is for closing afterwards. All ranks
    call it; what is found is rank 0's."""
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
    facts += _wrongly_kept(directory, saved, keep)
    return [BetweenSteps(what=f"which of {len(saved)} checkpoints are kept", facts=facts)]


def _wrong_best(directory: Path, expected: int) -> Iterator[str]:
    there = sorted(each.name for each in directory.glob("step-*"))
    if there != [step_name(expected)]:
        yield f"{BEST}/ holds {', '.join(there) or 'nothing'}, and the best evaluation was after step {expected}."
        return
    saved = Checkpoint.open(directory / there[0], checksums=False)
    said = (saved.values.get("best") or {}).get("step")
    if (saved.step, said) != (expected, expected):
        yield f"{BEST}/{there[0]} is of step {saved.step}, and says that step {said} is the best."


def _wrongly_kept(directory: Path, saved: Sequence[int], keep: int) -> Iterator[str]:
    there = sorted(each.name for each in directory.glob("step-*"))
    right = [step_name(each) for each in saved[-keep:]]
    if there != right:
        yield f"With keep_checkpoints={keep}, {', '.join(there) or 'none'} are kept of steps {saved[0]} to {saved[-1]}, and not {', '.join(right)}."
