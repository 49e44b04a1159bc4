"""`adopt`: a training script becomes a job in a file beside it, with the reasons and a proof."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshloom.adopt.leaving_out import left_out
from meshloom.adopt.parts import parts_of
from meshloom.adopt.proof import Proof, prove
from meshloom.adopt.reduction_kind import kind_of_loss
from meshloom.adopt.several import check_one_loss
from meshloom.adopt.watching.route import Refusal, UntranslatedError, follow
from meshloom.adopt.watching.script import Script
from meshloom.adopt.watching.watch import watch
from meshloom.adopt.writing import write
from meshloom.core.errors import JobError

NOT_PROVED = (
    "# NOT PROVED: this job was not found to take the script's steps. See what meshloom adopt says.\n"
)
NEITHER = (
    "the loss of a batch is not the mean of the losses of its halves, so more ranks or microbatches are other training than one device. If it is a mean over something "
    "else than samples (tokens, pixels), return (sum, number) in training_loss."
)


@dataclass(frozen=True)
class Adoption:
    """script, target: files. reasons: (line of the script, text). left_out: statements without a counterpart. refusals: why
    there is no job; then there is no proof either."""

    script: Path
    target: Path
    before: str
    after: str = ""
    reasons: tuple[tuple[int, str], ...] = ()
    left_out: tuple[Refusal, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    proof: Proof | None = None

    @property
    def proved(self) -> bool:
        return self.proof is not None and self.proof.holds

    def difference(self) -> Iterator[str]:
        """Lines of a unified diff; before each hunk the reasons of its changes."""
        left = sorted(set(self.reasons))
        for line in difflib.unified_diff(
            self.before.splitlines(),
            self.after.splitlines(),
            self.script.name,
            self.target.name,
            n=2,
            lineterm="",
        ):
            if match := re.match(r"@@ -(\d+)(?:,(\d+))?", line):
                first, count = int(match[1]), int(match[2] or 1)
                yield line
                yield from (f"# line {at}: {text}" for at, text in left if first <= at < first + count)
            else:
                yield line


def adopt(
    script: Path,
    words: Sequence[str] = (),
    *,
    target: Path | None = None,
    steps: int = 4,
    overwrite: bool = False,
) -> Adoption:
    """Watch `script` for `steps` optimizer steps, write the job to `target` (default: beside it, as SCRIPT_job.py), and
    train the job for as many steps.

    words: the script's arguments. Raises `JobError` for a script that takes no step, and for a target that exists.
    """
    target = target or script.with_name(f"{script.stem}_job.py")
    check_target_free(target, overwrite)
    before = script.read_text(encoding="utf-8")
    watched = watch(script, words, steps)
    try:
        check_one_loss(script, watched)
        found = Script(watched, follow(watched))
        parts = parts_of(found)
        after = write(found, parts)
    except UntranslatedError as error:
        return Adoption(script, target, before, refusals=tuple(error.refusals))
    target.write_text(after, encoding="utf-8")
    notes = list(left_out(found, parts))
    kind = kind_of_loss(target, tuple(words), watched)
    end = found.route.end
    if kind == "sum" and end is not None:
        try:
            found.sums = True
            after = write(found, parts_of(found))
        except UntranslatedError as error:
            target.unlink()
            return Adoption(script, target, before, refusals=tuple(error.refusals))
        target.write_text(after, encoding="utf-8")
    elif kind == "neither" and end is not None:
        notes.append(Refusal(end.source.path.name, end.at, NEITHER))
    proof = prove(target, tuple(words), watched)
    if not proof.holds:
        after = NOT_PROVED + after
        target.write_text(after, encoding="utf-8")
    return Adoption(script, target, before, after, tuple(found.reasons), tuple(notes), (), proof)


def check_target_free(target: Path, overwrite: bool) -> None:
    """Raises `JobError`."""
    if not target.parent.is_dir():
        raise JobError(
            f"{target} cannot be written: there is no directory {target.parent}. Give --to a file in one that exists."
        )
    if target.exists() and not overwrite:
        raise JobError(f"{target} exists. Remove it, give another file as --to FILE.py, or use --overwrite.")
