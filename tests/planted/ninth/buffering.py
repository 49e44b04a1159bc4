"""Bugs in buffers, attributes and checkpoints."""

from __future__ import annotations

from tests.planted.ninth import NINTH

NINTH.edit(
    "spread_between_uneven_parts",
    "replica/buffers/batch_norm.py",
    old="delta.square() * (size * (total - size) / least)",
    new="delta.square() * (size * size / least)",
    job="kept:normed",
    plan="dp=2,sync_batch_norm=true,shares=3+1",
    truth=(
        "Synchronised batch norm joins the replicas' variances as if they had equally many samples: with uneven shares "
        "the spread between their means has the wrong weight, in the normalised output and in running_var."
    ),
    says="its statistics are not those of the whole batch",
    module="norm",
)

NINTH.edit(
    "calls_counted_once_for_a_cumulative_mean",
    "replica/buffers/norm_statistics.py",
    old="scales = torch.where(self._cumulative, calls / total, 1.0)",
    new="scales = torch.where(self._cumulative, calls.clamp(max=1) / total, 1.0)",
    job="kept:cumulative",
    plan="dp=2,microbatches=2",
    truth=(
        "Running statistics of batch norm with momentum=None: a replica's chunks of a step count as one in the "
        "cumulative mean, so that with several microbatches they weigh too little."
    ),
    module="norm",
)

NINTH.edit(
    "evaluations_cool_the_model",
    "replica/chunk_scope.py",
    old="        with self._numbers.kept():\n            yield\n        self.carried.clear()",
    new="        yield\n        self.carried.clear()",
    job="kept:cooling",
    plan="dp=2",
    truth=(
        "Numbers in attributes that forwards set (a temperature) are not put back after an evaluation: its forwards "
        "lower the temperature with which training goes on."
    ),
)

NINTH.edit(
    "first_replica_gives_the_shape",
    "replica/buffers/reshaped_buffers.py",
    old="last = max(rank for rank, row in enumerate(rows) if row[0])",
    new="last = min(rank for rank, row in enumerate(rows) if row[0])",
    job="kept:observed",
    plan="dp=2",
    truth=(
        "A buffer that gets its shape in the first step becomes what the first replica's last chunk made of it, not "
        "what the last chunk of the step did."
    ),
    module="",
)

NINTH.edit(
    "state_of_the_last_evaluation",
    "replica/attributes/carried_tensors.py",
    old="if number not in left and _is_kept(now) and not _is_same(was, _mark(now)):",
    new="if _is_kept(now) and not _is_same(was, _mark(now)):",
    job="carried:searched",
    plan="dp=2",
    truth=(
        "With LBFGS the hidden state that a step leaves is that of the last evaluation of the loss, not of the first."
    ),
)

NINTH.edit(
    "one_piece_of_a_background_copy",
    "checkpoint/writing/host_copy.py",
    old="        while self._left:\n",
    new="        if self._left:\n",
    job="stages:written",
    plan="tp=2",
    truth=(
        "Before an update a save in the background copies one part of what is left, not all: the others are what the "
        "copy's memory held before (of the save before it). Training is right, the checkpoint is not."
    ),
    says="What is copied for the thread that writes is something else",
)
