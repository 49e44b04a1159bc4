"""The second comparison: one device that runs the chunks against one device that runs the whole batch in one
forward.

They agree where samples do not interact and nothing is drawn at random. A difference is due to the job, not
to a mistake of the plan: it is the second half of the verdict, with its reason. Where chunks draw, both run once more with the draws of the
whole batch, of which each chunk has its rows, so that an interaction shows beside draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import nn

from meshloom.core.errors import CODE_ERRORS, first_line
from meshloom.core.random import Rows
from meshloom.machine.host_memory import free_bytes
from meshloom.machine.process_memory import regained_bytes, trim
from meshloom.verify.compared.compare_chunks import add_outputs, output_error
from meshloom.verify.reference.chunks_of_plan import ReferenceForward
from meshloom.verify.reference.reference import Gradients, Reference
from meshloom.verify.reference.step_records import ChunkRecord, ModuleOutput
from meshloom.verify.tolerances.gradient_errors import relative_errors


@dataclass(frozen=True, kw_only=True)
class WholeBatch:
    """The difference between the chunks and the whole batch: largest error of a gradient; the reason, "" if they agree. interacts: whether
    something else than draws makes it.

    ran: whether the job's code could compute the whole batch in one forward; else the error is infinite.
    """

    error: float
    why: str
    interacts: bool = False
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
        return WholeBatch(error=0.0, why="")
    if not may_fit(reference):
        return None
    try:
        gradients, loss, whole = whole_batch(reference)
        error = _largest_error(gradients, reference.gradients)
        del gradients  # before what follows needs as much memory
        if _with_loss(error, loss, reference.loss) <= tolerance:
            return WholeBatch(error=error, why="")
        draws = any(chunk.draws for chunk in reference.chunks)
        if not (reasons := _batch_norms(reference.model)):
            why = (
                _why_with_equal_draws(reference, tolerance)
                if draws
                else _why(whole, reference.chunks, tolerance)
            )
            reasons = [why] if why else []
        interacts = bool(reasons)
        reasons += ["random draws, such as dropout masks, belong to a chunk"] if draws else []
        return WholeBatch(error=error, why=" and ".join(reasons), interacts=interacts)
    except torch.OutOfMemoryError:
        raise
    except CODE_ERRORS as error:
        # Raised by the job's own code, which never gets so large a batch under the plan (a shorter queue).
        said = first_line(error)
        why = f"the job's own code fails on it: {type(error).__name__}: {said}"
        return WholeBatch(error=math.inf, why=why, ran=False)


def _with_loss(error: float, loss: float, right: float) -> float:
    """The error of gradients or that of the loss, whichever is larger."""
    return max(error, abs(loss - right) / (max(abs(loss), abs(right)) or 1.0))


def _largest_error(ours: Gradients, right: Gradients) -> float:
    """Of a gradient, relative to its norm or a thousandth of the largest one's, as rounding alone is no difference here."""
    return max(relative_errors(ours, right).values(), default=0.0)


def _batch_norms(model: nn.Module) -> list[str]:
    """That batch statistics make a difference, if there are any."""
    kind = nn.modules.batchnorm._BatchNorm  # pyright: ignore[reportPrivateUsage]
    layers = [(name, each) for name, each in model.named_modules() if isinstance(each, kind)]
    norms = [name for name, each in layers if each.training or getattr(each, "running_mean", None) is None]
    shown = f"{', '.join(norms[:3])}{', ...' if len(norms) > 3 else ''}"
    return [f"batch statistics ({shown}) are taken over a chunk, not over the whole batch"] if norms else []


def _why_with_equal_draws(reference: Reference, tolerance: float) -> str:
    """Why the whole batch differs from chunks that draw what it does; "" if it does not."""
    gradients, loss, whole = whole_batch(reference, keyed=True)
    chunked, of_chunks, chunks = _whole_batch_in_chunks(reference)
    error = _largest_error(gradients, chunked)
    return "" if _with_loss(error, loss, of_chunks) <= tolerance else _why(whole, chunks, tolerance)


def _why(whole: Sequence[ChunkRecord], chunks: Sequence[ChunkRecord], tolerance: float) -> str:
    module = _first_that_mixes(whole, chunks, tolerance)
    if module is None:
        where = (
            "the loss, or it averages over something else than samples, such as tokens: return (sum, weight)"
        )
    else:
        where = module or "the model's own forward"
    return f"samples of a batch interact in {where}"


def _first_that_mixes(
    whole: Sequence[ChunkRecord], chunked: Sequence[ChunkRecord], tolerance: float
) -> str | None:
    """The first module in order of execution whose outputs over all chunks do not add up to those on the
    whole batch.

    Modules with the same output on every chunk as on the whole batch, such as position embeddings, do not mix
    samples.
    """
    of_chunks: dict[tuple[str, int], list[ModuleOutput]] = {}
    for output in (output for chunk in chunked for output in chunk.modules):
        of_chunks.setdefault((output.name, output.call), []).append(output)
    for output in (output for chunk in whole for output in chunk.modules):
        parts = of_chunks.get((output.name, output.call))
        if not parts:
            return output.name
        together = reduce(add_outputs, parts)
        if together.count != output.count:
            continue  # not an output per sample: a position table, a loss
        # not <=, as NaN differs
        if not output_error(together, output) <= tolerance and not all(
            output_error(part, output) <= tolerance for part in parts
        ):
            return output.name
    return None


_Rerun = tuple[Gradients, float, Sequence[ChunkRecord]]  # averaged gradients, loss, chunks


def whole_batch(reference: Reference, *, keyed: bool = False) -> _Rerun:
    """Rerun the step's batch as one chunk. keyed: each draw has a key, as in `_whole_batch_in_chunks`."""
    samples = reference.samples
    rows = Rows(0, len(samples), len(samples)) if keyed else None
    return _rerun(reference, [ReferenceForward(key=0, samples=samples, members=[(0, samples)], rows=rows)])


def _whole_batch_in_chunks(reference: Reference) -> _Rerun:
    """Rerun the step's chunks with the draws of the whole batch, of which each has its rows and the seed."""
    start, total, forwards = 0, len(reference.samples), list[ReferenceForward]()
    for forward in reference.forwards(synchronised=False):
        forwards.append(replace(forward, rows=Rows(start, len(forward.samples), total)))
        start += len(forward.samples)
    with reference.chunk_run.seeded_as(lambda key: 0):
        return _rerun(reference, forwards)


def _rerun(reference: Reference, forwards: Sequence[ReferenceForward]) -> _Rerun:
    """These forwards in place of the step's."""
    with reference.rerun():
        loss, weight, chunks = reference.evaluate(forwards)
        return reference.gradients, loss / weight, chunks
