"""The second comparison: one device that runs the chunks against one device that runs the whole batch in one
forward.

They agree where samples do not interact and nothing is drawn at random. A difference is due to the job, not
to a mistake of the plan, so it is reported with its reason and does not affect the verdict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import nn

from meshloom.machine.host_memory import free_bytes
from meshloom.machine.process_memory import regained_bytes, trim
from meshloom.verify.compared.compare_chunks import add_outputs, output_differs
from meshloom.verify.reference.float64_blocks import distance, norm
from meshloom.verify.reference.reference import Gradients, Reference
from meshloom.verify.reference.reruns import whole_batch
from meshloom.verify.reference.step_records import ChunkRecord, ModuleOutput, StepRecord
from meshloom.verify.tolerances.gradient_errors import FLOOR


@dataclass(frozen=True, kw_only=True)
class WholeBatch:
    """The difference between the chunks and the whole batch: largest error of a gradient; the loss on the
    whole batch; the reason, "" if they agree.

    ran: whether the job's code could compute the whole batch in one forward; else error and loss are
    infinite.
    """

    error: float
    loss: float
    why: str
    ran: bool = True

    @property
    def equal(self) -> bool:
        """Whether any difference is rounding."""
        return not self.why


def may_fit(reference: Reference) -> bool:
    """Whether the whole batch is likely to fit into the memory of this host, by what the chunks have taken at their peak and given
    back since; on a GPU True, which says so itself."""
    if reference.device.type != "cpu":
        return True
    trim()
    gradients = sum(
        each.numel() * each.element_size() for each in reference.gradients.values() if each is not None
    )
    return reference.plan.num_chunks * regained_bytes() + gradients <= free_bytes()


def compare_whole_batch(reference: Reference, tolerance: float) -> WholeBatch | None:
    """Rerun the reference's last step on its whole batch; None: that is not likely to fit. To be called before its update."""
    if reference.plan.num_chunks == 1:  # the same forward
        return WholeBatch(error=0.0, loss=reference.loss, why="")
    if not may_fit(reference):
        return None
    try:
        with whole_batch(reference) as (chunked, whole):
            error = _largest_error(reference.gradients, chunked)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # Raised by the job's own code, which never gets so large a batch under the plan (a shorter queue).
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        return WholeBatch(
            error=math.inf,
            loss=math.inf,
            why=f"the job's own code fails on it: {type(error).__name__}: {said}",
            ran=False,
        )
    scale = max(abs(whole.loss), abs(reference.loss)) or 1.0
    equal = error <= tolerance and abs(whole.loss - reference.loss) <= tolerance * scale
    return WholeBatch(
        error=error,
        loss=whole.loss,
        why="" if equal else _why(reference.model, whole, reference.chunks, tolerance),
    )


def _largest_error(ours: Gradients, right: Gradients) -> float:
    """Of a gradient, relative to its norm or a thousandth of the largest one's, as rounding alone is no difference here."""
    norms = {name: norm(each) for name, each in right.items() if each is not None}
    floor = FLOOR * max(norms.values(), default=0.0)
    errors = [0.0]
    for name, each in ours.items():
        other = right.get(name)
        if each is None or other is None:
            errors.append(0.0 if each is other else math.inf)
        elif off := distance(each.to_dense(), other.to_dense()):
            errors.append(off / max(norms[name], floor, 1e-300))
    return max(errors)


def _why(model: nn.Module, whole: StepRecord, chunked: Sequence[ChunkRecord], tolerance: float) -> str:
    reasons: list[str] = []
    batch_norms = nn.modules.batchnorm._BatchNorm  # pyright: ignore[reportPrivateUsage]
    norms = [
        name
        for name, module in model.named_modules()
        if isinstance(module, batch_norms) and _uses_batch(module)
    ]
    if norms:
        reasons.append(
            f"batch statistics ({', '.join(norms[:3])}{', ...' if len(norms) > 3 else ''}) are taken over a chunk, not over the whole batch"
        )
    # entries with a space are operations that may have drawn nothing
    if any(" " not in drawn for chunk in chunked for drawn in chunk.draws):
        reasons.append("random draws, such as dropout masks, belong to a chunk")
    if not reasons and (module := _first_that_mixes(whole, chunked, tolerance)) is not None:
        reasons.append(f"samples of a batch interact in {module}" if module else _IN_THE_MODEL)
    if not reasons:
        reasons.append(
            "the loss of a batch is not the mean of its samples' losses; if it averages over something else, such as tokens, return (sum, weight)"
        )
    return " and ".join(reasons)


_IN_THE_MODEL = (
    "samples of a batch interact in the model's own forward, or the loss in it averages over something else than samples; if that is tokens, "
    "return (sum, weight)"
)


def _uses_batch(module: nn.Module) -> bool:
    return bool(module.training) or getattr(module, "running_mean", None) is None


def _first_that_mixes(whole: StepRecord, chunked: Sequence[ChunkRecord], tolerance: float) -> str | None:
    """The first module in order of execution whose outputs over all chunks do not add up to those on the
    whole batch.

    Modules with the same output on every chunk as on the whole batch, such as position embeddings, do not mix
    samples.
    """
    of_chunks: dict[tuple[str, int], list[ModuleOutput]] = {}
    for output in (output for chunk in chunked for output in chunk.modules):
        of_chunks.setdefault((output.name, output.call), []).append(output)
    for output in (output for chunk in whole.chunks for output in chunk.modules):
        parts = of_chunks.get((output.name, output.call))
        if not parts:
            return output.name
        together = reduce(add_outputs, parts)
        if output.name and together.count != output.count:
            continue  # not an output per sample: a position table, a loss
        if any(output_differs(part, output, tolerance) for part in parts) and output_differs(
            together, output, tolerance
        ):
            return output.name
    return None
