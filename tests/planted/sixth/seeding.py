"""Bugs in random draws, recomputation and compiling."""

from __future__ import annotations

from tests.planted.sixth import SIXTH

SIXTH.edit(
    "replicas_draw_alike",
    "replica/chunk_scope.py",
    old="        return chunk.index, None",
    new="        return chunk.index % self._plan.microbatches, None",
    job="letters:averaged",
    plan="dp=2,microbatches=2,zero=1",
    truth="Chunks are seeded by their number within the replica, so all replicas draw the same dropout masks.",
    module="layers.0.drop",
)
SIXTH.edit(
    "recomputed_with_other_masks",
    "program/run/segment_runner.py",
    old="    seed_torch(seed)\n    try:\n        yield",
    new="    try:\n        yield",
    job="letters:dropping",
    plan="tp=2,recompute=full",
    truth="Recomputation does not go back to the seed of its segment, so backward has other dropout masks than forward.",
    module="layers.2.drop",
)
SIXTH.edit(
    "compiled_decay_of_one_call",
    "replica/buffers/norm_statistics.py",
    old="self.decay = (1.0 - (self.module.momentum or 0.0)) ** self.calls",
    new="self.decay = 1.0 - (self.module.momentum or 0.0)",
    job="duel:job",
    plan="dp=2,microbatches=2,compile=true",
    truth="In compiled models running statistics are decayed once for a replica's step, however often the layer was called.",
    module="painter.1",
)
SIXTH.edit(
    "rows_of_equal_shares",
    "replica/chunk_scope.py",
    old="Rows(sum(sizes[: self._context.place.dp]), chunk.samples, sum(sizes))",
    new="Rows(self._context.place.dp * chunk.samples, chunk.samples, sum(sizes))",
    job="duel:job",
    plan="dp=2,microbatches=2,sync_batch_norm=true,keyed_draws=true",
    truth="Of the draws of a chunk that replicas share, a replica takes the rows that would be its own if all had as many samples.",
    module="painter.0",
)
