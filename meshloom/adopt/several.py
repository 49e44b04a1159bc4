"""Scripts whose steps are not those of one loss and one optimizer: refused by line."""

from __future__ import annotations

from pathlib import Path

from meshloom.adopt.watching.route import Refusal, UntranslatedError
from meshloom.adopt.watching.watch import Watched


def check_one_loss(script: Path, watched: Watched) -> None:
    """Raises `UntranslatedError`."""
    at = sorted({batch.line for each in watched.steps for batch in each})
    if not watched.steps:
        last = watched.frames[-1]
        raise _refused(
            [(str(last.path), last.line)],
            "no optimizer takes a step after this backward(). Use one of torch.optim in place of updates by hand",
        )
    if watched.closure:
        raise _refused(at[:1], "the optimizer evaluates the loss itself (optimizer.step(closure)). Write "
        "Job(loss=..., optimizer=...) by hand: a job has no closure (docs/several_losses.md)")  # fmt: skip
    if len(watched.optimizers) > 1:
        raise _refused(at, f"{len(watched.optimizers)} optimizers take steps. Write "
        f"Job(losses=...) with an Objective for each of them by hand (docs/several_losses.md)")  # fmt: skip
    if len(at) > 1:
        raise _refused(at, f"backward() is called in {len(at)} places. Add up their losses, and call it once")
    if watched.model is None:
        raise _refused(at, "no module that the set-up names has all parameters that the optimizer "
        "trains. Put the parts into one nn.Module, whose parameters the optimizer takes")  # fmt: skip
    counts = {len(each) for each in watched.steps}
    if len(counts) > 1 or 0 in counts:
        raise _refused(
            at,
            f"steps have {' and '.join(map(str, sorted(counts)))} batches. Let each optimizer step have as many",
        )


def _refused(at: list[tuple[str, int]], text: str) -> UntranslatedError:
    return UntranslatedError(*(Refusal(Path(file).name, line, f"{text}.") for file, line in at))
