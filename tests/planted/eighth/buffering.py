"""Bugs in what forwards write."""

from __future__ import annotations

from tests.planted.eighth import EIGHTH

EIGHTH.edit(
    "instance_norm_cumulative",
    "replica/buffers/norm_statistics.py",
    old="return self.module.momentum is None and self._counts",
    new="return self.module.momentum is None",
    job="convs:job",
    plan="dp=2",
    truth=(
        "An InstanceNorm with momentum=None, which never moves its running statistics, is merged like a cumulative average: "
        "running_mean and running_var become zeros."
    ),
    module="inner",
)
EIGHTH.edit(
    "joined_chunks_count_each_replica",
    "replica/buffers/chunk_writes.py",
    old="                maps = maps[-1:]\n",
    new="                maps = maps[:]\n",
    job="convs:job",
    plan="dp=2,sync_batch_norm=true",
    truth=(
        "With sync_batch_norm the replicas' parts of one chunk each apply their write to a buffer, so the counter `seen` "
        "counts replicas and not steps."
    ),
)
EIGHTH.edit(
    "changing_factors_never_looked_for",
    "replica/buffers/varying_factors.py",
    old="elif each.varies or _is_due(each):",
    new="elif each.varies:",
    job="states:centres",
    plan="dp=2,microbatches=2",
    truth=(
        "It is never looked whether the decay of a moving average differs between chunks: class centres, whose rate depends "
        "on how many samples of a class a chunk has, are merged with the rate of the first chunk."
    ),
    module="",
)
EIGHTH.edit(
    "reshaped_buffer_of_first_replica",
    "replica/buffers/reshaped_buffers.py",
    old="last = max(rank for rank, row in enumerate(rows) if row[0])",
    new="last = min(rank for rank, row in enumerate(rows) if row[0])",
    job="states:last",
    plan="dp=2",
    truth=(
        "A buffer that forwards give another shape (the memory of the last chunk) becomes what the first replica made of it "
        "and not the last one."
    ),
    module="",
)
EIGHTH.edit(
    "teacher_rate_of_first_step",
    "replica/buffers/chunk_writes.py",
    old="if len(self._chunks) == 1:  # the first one of the step",
    new="if len(self._chunks) == 1 and not self._steps:",
    job="states:teacher",
    plan="dp=2,microbatches=2",
    truth=(
        "The rate at which a teacher's parameters follow is found in the first step alone, so in later steps, where the job "
        "has smaller rates, replicas' chunks are merged with the wrong decay."
    ),
    module="teacher",
)
EIGHTH.edit(
    "synced_norm_backward_by_own_count",
    "replica/buffers/batch_norm.py",
    old="average = (sums / ctx.count).to(precision)",
    new="average = (sums / (x.numel() // x.shape[1])).to(precision)",
    job="convs:job",
    plan="dp=2,sync_batch_norm=true",
    truth=(
        "In the backward of synchronised batch norm the sums over all replicas are divided by this replica's number of "
        "values: the mean terms in the gradient of the input are twice too large."
    ),
    says="what goes back through the statistics of bn2",
    module="two",
)
EIGHTH.edit(
    "all_rows_scaled",
    "replica/buffers/row_limits.py",
    old="part.scale(torch.where(used, scales, 1.0))",
    new="part.scale(scales)",
    job="tables:limited",
    plan="dp=2",
    truth="Rows of a table with max_norm are scaled in the weight whether or not the step has looked them up.",
    says="rows are limited to the norm of 1.5 by other norms than their own",
    module="users",
)
EIGHTH.edit(
    "written_values_dropped",
    "replica/step_checks.py",
    old="            memory.copy_(parameter.data)\n            parameter.data = memory\n",
    new="            parameter.data = memory\n",
    job="states:bounded",
    plan="dp=2",
    truth=(
        "What a forward gives a trained parameter by `.data = ...` (weights held within bounds) is lost after the chunks: "
        "the optimizer updates the values from before."
    ),
    module="body",
)
