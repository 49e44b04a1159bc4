"""Where a difference is, besides the numbers: the first module whose output differs where ranks run programs, and the first operator of divided ones,
in lockstep."""

from __future__ import annotations

import torch

from meshloom.data.samples import first_batches
from meshloom.data.to_device import to_device
from meshloom.parameters.file_weights import build_filled_model
from meshloom.replica.program_stages import ProgramStages
from meshloom.replica.replica import Replica
from meshloom.train.contract import Batch
from meshloom.train.trainer import Trainer
from meshloom.verify.compared.compare import first_differing
from meshloom.verify.comparison_run import ComparisonRun
from meshloom.verify.lockstep_check import first_wrong_operator
from meshloom.verify.stage_outputs import Values, values_of_modules


def place_of(
    trainer: Trainer, one: ComparisonRun | None, batch: Batch, dtype: torch.dtype | None
) -> tuple[str, str]:
    """The operator, in a sentence, and its module, after the step of `batch`, which differs; on rank 0. "": none was looked for, or is wrong. The first
    module is noted in the steps of `one`. All ranks call it."""
    values = _values_again(trainer, batch, one)
    if one is None:
        return "", ""
    module = one.place(values) if values is not None else None
    wrong_step, division = first_differing(one.result().steps), trainer.replicas[0].engine.stages.division
    followed = module or (wrong_step and (wrong_step.failed("gradient") or wrong_step.failed("loss")))
    if division is None or not followed:
        return "", ""
    replica = trainer.replicas[0]
    device, job = replica.context.device, replica.job
    batches = first_batches(job, 1, replica.plan.largest_share(job.batch_size)[0])
    model = build_filled_model(job, device, dtype)
    (example,) = (to_device(each, device, dtype) for each in batches)
    return first_wrong_operator(division.first, model, example)


def _values_again(
    trainer: Trainer, batch: Batch, one: ComparisonRun | None
) -> dict[int, list[Values]] | None:
    """What modules output in the step's forwards, once more, on parameters that one device gets; None: ranks run no programs."""
    first = trainer.replicas[0]
    if (
        not isinstance(first.engine.stages, ProgramStages)
        or first.plan.sync_batch_norm
        or first.inner.compiles
    ):
        return None

    def look(replica: Replica) -> dict[int, list[Values]]:
        adopt = one.adopt if one and replica is first else lambda name, ours: None
        return values_of_modules(replica, batch.shares[trainer.replicas.index(replica)], adopt)

    return trainer.together(look)[0]
