"""Bugs in random draws and in recomputation."""

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
    says="(replicas 0 and 1) use the same random draws",
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
    says="under a plan that recomputes, other draws or values there",
    module="layers.2.out",
)
SIXTH.edit(
    "rows_of_equal_shares",
    "replica/chunk_scope.py",
    old="Rows(sum(sizes[: self._context.place.dp]), chunk.samples, sum(sizes))",
    new="Rows(self._context.place.dp * chunk.samples, chunk.samples, sum(sizes))",
    job="duel:job",
    plan="dp=2,microbatches=2,sync_batch_norm=true,keyed_draws=true",
    truth="Of the draws of a chunk that replicas share, a replica takes the rows that would be its own if all had as many samples.",
    says="other rows than theirs of what all replicas draw together, the seed is theirs",
    module="painter.0",
)
