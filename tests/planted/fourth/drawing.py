"""Bugs of random draws."""

from __future__ import annotations

from tests.planted.fourth.editing import edit

edit(
    "rows_uneven",
    "replica/chunk_scope.py",
    old="Rows(sum(sizes[: self._context.place.dp]), chunk.samples, sum(sizes))",
    new="Rows(self._context.place.dp * chunk.samples, chunk.samples, sum(sizes))",
    job="pictures:job",
    plan="dp=2,keyed_draws=true,sync_batch_norm=true",
    truth=(
        "Where replicas share a chunk unevenly (5+4), the second draws its dropout masks from the "
        "wrong rows of the joint draw."
    ),
    module="drop",
)
edit(
    "turns_draw_alike",
    "core/random.py",
    old='return derive(seed, "turn", draws) if draws else seed',
    new="return seed",
    job="taking_turns:job",
    plan="dp=2",
    truth="All turns of a step (updates of the critic, the generator) draw the same numbers.",
    says=(
        "the random draws of chunk 0 of step 0, loss critic, chunk 1 of step 0, loss critic, whose "
        "seed they have"
    ),
)
edit(
    "own_generator",
    "replica/chunk_scope.py",
    old="        seed_own_generators(self._generators, moment.seed)\n",
    new="",
    job="remembered:noisy",
    plan="dp=2",
    devices="cpu",
    truth=(
        "A generator that a module holds is not seeded anew for each chunk: its draws depend on what "
        "the rank has drawn before."
    ),
    says="its source is a generator in state",
    module="cool",
)
edit(
    "passes_over_too_few",
    "core/random.py",
    old="    for _ in range(count):\n",
    new="    for _ in range(count - 1):\n",
    job="noise:plain",
    plan="pp=2,microbatches=2",
    truth=(
        "A later stage passes over one draw too few of those of earlier stages: its dropout masks are "
        "those of other draws."
    ),
    says="A keyed draw is another one where those before it are passed over, on one device too.",
    module="blocks.2.drop",
)
edit(
    "evaluation_draws_alike",
    "replica/chunk_scope.py",
    old="evaluation_seed(self._job.seed, chunk.step, chunk.index), updates)",
    new="evaluation_seed(self._job.seed, chunk.step, chunk.index % self._plan.microbatches), updates)",
    job="noise:plain",
    plan="dp=2",
    truth=(
        "In evaluations every replica draws the same numbers: the seed has the chunk's number within "
        "the replica and not within the batch."
    ),
    says="Chunk 1 of batch 0 of the evaluation draws from the seed of chunk 0 of batch 0.",
)
edit(
    "same_masks_each_step",
    "core/random.py",
    old='return derive(seed, "chunk", step, chunk)',
    new='return derive(seed, "chunk", chunk)',
    job="tables:adam",
    plan="dp=2",
    truth="The seed of a chunk's draws lacks the step: dropout masks are the same in every step.",
    says="The draws (masks) of step 0, chunk 0 and of step 1, chunk 0 have one seed",
    module="drop",
)
