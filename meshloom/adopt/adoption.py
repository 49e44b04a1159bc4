"""`adopt`: a training script becomes a job in a file beside it, with the reasons and a proof."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshloom.adopt.leaving_out import left_out
from meshloom.adopt.parts import JobParts, parts_of
from meshloom.adopt.proving.evaluated import ExpectedMetrics
from meshloom.adopt.proving.no_gpus import no_gpus
from meshloom.adopt.proving.proof import Proof, prove
from meshloom.adopt.proving.reduction_kind import kind_of_loss
from meshloom.adopt.several import check_one_loss
from meshloom.adopt.watching.no_batch import no_batch
from meshloom.adopt.watching.route import Refusal, UntranslatedError, follow
from meshloom.adopt.watching.script import Script
from meshloom.adopt.watching.source import is_docstring, used
from meshloom.adopt.watching.watch import Watched, watch
from meshloom.adopt.watching.zipped import with_zipped_loader
from meshloom.adopt.writing import write
from meshloom.core.errors import JobError
from meshloom.telemetry.timings import Timings

UNZEROED = (
    "nothing sets gradients to zero, so this backward() adds to those of the steps before, and a job's step has its own. "
    "Call optimizer.zero_grad() in each step."
)
NOT_PROVED = (
    "# NOT PROVED: this job was not found to take the script's steps. See what meshloom adopt says.\n"
)
NEITHER = (
    "the loss of a batch is not the mean of the losses of its halves, so more ranks or microbatches are other training than one device. If it is a mean over something "
    "else than samples (tokens, pixels), return (sum, number) in training_loss."
)

UNDIVIDED = (
    "the loss fails on half of a batch, so it trains under plans that divide none (tp, pp with microbatches=1) alone. Take sizes from the batch itself (len(x)) "
    "in place of the batch size of the settings."
)

BY_HAND = "Write Job(evaluate=ml.Evaluate(data=..., metrics=..., every=...)) by hand."


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


@no_gpus()
def adopt(
    script: Path,
    words: Sequence[str] = (),
    *,
    target: Path | None = None,
    steps: int = 4,
    overwrite: bool = False,
    timings: Timings | None = None,
) -> Adoption:
    """Watch `script` for `steps` optimizer steps, write the job to `target` (default: beside it, as SCRIPT_job.py), and
    train the job for as many steps. Both are on the CPU, unless the script names another device without asking whether it is there.

    words: the script's arguments. timings: of what is done, with the steps that have been watched. Raises `JobError` for a script
    that takes no step, and for a target that exists.
    """
    if steps < 1:
        raise JobError(f"--steps {steps} must be 1 or more.")
    target = target or script.with_name(f"{script.stem}_job.py")
    check_target_free(target, overwrite)
    if target.exists() and target.samefile(script):
        raise JobError(f"The job would replace the script, {script}. Give another file as --to FILE.py.")
    try:
        before = script.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise JobError(f"{script} is no text in UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}. Give a Python file.") from None  # fmt: skip
    was = target.read_text(encoding="utf-8") if target.exists() else None
    timings = timings or Timings()
    with timings.of("running the script"):
        watched = watch(script, words, steps, timings.counted)
    rejected: dict[str, Refusal] = {}
    try:
        check_one_loss(script, watched)
        watched = with_zipped_loader(watched, follow(watched.frames))
        while True:
            with timings.of("writing the job"):
                found, parts, after, notes = _written(script, target, tuple(words), watched, set(rejected))
            with timings.of("comparing the job with the script"):
                proof = prove(target, tuple(words), watched, _expected(parts))
            new = _rejected(proof, parts, watched)
            if not new:
                break
            rejected |= new
    except UntranslatedError as error:
        target.unlink(missing_ok=True) if was is None else target.write_text(was, encoding="utf-8")
        return Adoption(script, target, before, refusals=tuple(error.refusals))
    if not proof.holds:
        after = NOT_PROVED + after
        target.write_text(after, encoding="utf-8")
        if not any(
            each in source.text for source in found.route.sources for each in ("zero_grad", ".grad = None")
        ):
            last = watched.frames[-1]
            notes.append(Refusal(last.path.name, last.line, UNZEROED))
    notes = [*rejected.values(), *notes]
    return Adoption(script, target, before, after, tuple(found.reasons), tuple(notes), (), proof)


def _written(
    file: Path, target: Path, words: tuple[str, ...], watched: Watched, without: set[str]
) -> tuple[Script, JobParts, str, list[Refusal]]:
    """The script, the parts of the job, its text, which is in `target`, and notes. Raises `UntranslatedError`."""
    found = Script(watched, follow(watched.frames))

    def text() -> str:
        written = write(found, parts)
        beside = target.resolve().parent == file.resolve().parent
        return written if beside else _as_if_beside(file.resolve(), written, watched.own_modules)

    parts = parts_of(found, without)
    after = text()
    target.write_text(after, encoding="utf-8")
    notes = list(left_out(found, parts))
    kind = kind_of_loss(target, words, watched)
    end = found.route.end
    if found.whole and kind not in ("mean", "sum"):
        raise no_batch(found)
    if kind == "sum" and end is not None:
        found.sums = True
        parts = parts_of(found, without)
        after = text()
        target.write_text(after, encoding="utf-8")
    elif kind == "undivided" and end is not None:
        notes.append(Refusal(end.source.path.name, end.at, UNDIVIDED))
    elif kind == "neither" and end is not None:
        notes.append(Refusal(end.source.path.name, end.at, NEITHER))
    return found, parts, after, notes


def _as_if_beside(script: Path, text: str, own_modules: bool) -> str:
    """The text of a job in another folder than the script, which finds files and modules there."""
    first = next(
        each
        for each in ast.parse(text).body
        if not is_docstring(each) and getattr(each, "module", None) != "__future__"
    )
    new = ["import sys", "", f'sys.path.insert(0, "{script.parent.as_posix()}")'] if own_modules else []
    if "__file__" in used(ast.parse(text)):
        new.append(f'__file__ = "{script.as_posix()}"  # paths are those of the script')
    lines = text.split("\n")
    lines[first.lineno - 1 : first.lineno - 1] = [*new, ""] if new else []
    return "\n".join(lines)


def _expected(parts: JobParts) -> ExpectedMetrics | None:
    evaluation = parts.evaluation
    if evaluation is None:
        return None
    return ExpectedMetrics(
        seen=evaluation.seen,
        means={name: each.mean for name, each in evaluation.totals.items()},
        lowered=evaluation.lowered,
        by_batch=frozenset(name for name, each in evaluation.totals.items() if each.over == "batches"),
    )


def _rejected(proof: Proof, parts: JobParts, watched: Watched) -> dict[str, Refusal]:
    """What does not do what the script was seen to do, and so is left out, with the reason."""
    found: dict[str, Refusal] = {}
    evaluation, average, last = parts.evaluation, watched.average, watched.frames[-1]
    if proof.problem:
        if evaluation is not None:
            found["evaluate"] = Refusal(evaluation.file, evaluation.line, f"this evaluation is left out: with it {proof.problem}. {BY_HAND}")  # fmt: skip
        if parts.average and average is not None:
            found["average"] = Refusal(last.path.name, last.line, f"{average.name!r} is left out: with it {proof.problem}.")  # fmt: skip
        return found
    for each in proof.metrics:
        if evaluation is not None and not each.equal:
            why = each.problem or f"as a metric it is {each.own:.6g}, and {each.script:.6g} in the script"
            found[each.name] = Refusal(
                evaluation.file, evaluation.line, f"{each.name!r} of this evaluation is left out: {why}. {BY_HAND}"
            )  # fmt: skip
    if average is not None and proof.average is not None and proof.average > 1e-3:
        found["average"] = Refusal(
            last.path.name, last.line, f"{average.name!r} is left out: a job's average differs by {proof.average:.1e} of what training changed. See docs/watching.md."
        )  # fmt: skip
    return found


def check_target_free(target: Path, overwrite: bool) -> None:
    """Raises `JobError`."""
    if not target.parent.is_dir():
        raise JobError(
            f"{target} cannot be written: there is no directory {target.parent}. Give --to a file in one that exists."
        )
    if target.exists() and not overwrite:
        raise JobError(f"{target} exists. Remove it, give another file as --to FILE.py, or use --overwrite.")
