"""Bugs of random draws."""

from __future__ import annotations

from tests.planted.fifth.listing import edit

edit(
    "rows_of_full_batch",
    "replica/chunk_scope.py",
    old="sizes = plan.sizes(chunk.batch)[index::m]",
    new="sizes = plan.sizes(self._job.batch_size)[index::m]",
    job="small_jobs/wide_rows:job",
    plan="dp=2,sync_batch_norm=true,keyed_draws=true",
    truth=(
        "In a short last batch a replica takes its rows of the chunk's draws by the sizes of a "
        "full batch: wrong rows of the dropout mask."
    ),
    says="Chunk 1: other random draws than on one device: other rows than theirs of what all replicas draw together",
    module="drop",
)

edit(
    "draws_of_first_turn",
    "replica/chunk_scope.py",
    old="return Moment(seed_of_turn(seed, self.turn.draws), chunk.step)",
    new="return Moment(seed, chunk.step)",
    job="small_jobs/two_turns:job",
    plan="dp=2",
    truth=(
        "The turn of the second loss draws the same random numbers (noise) as that of the first: "
        "the seed of the turn is left out."
    ),
    says=("the random draws of chunk 0 of step 0, loss d, chunk 1 of step 0, loss d, whose seed they have"),
    module="gen.0",
)

edit(
    "metrics_share_draws",
    "replica/metrics.py",
    old=("            for name, metric in metrics.items():\n                replica.scope.seed(moment)\n"),
    new=("            replica.scope.seed(moment)\n            for name, metric in metrics.items():\n"),
    job="jobs/noisy_signals:job",
    plan="dp=2",
    truth=(
        "The second metric (sharp) is not seeded anew for a chunk but goes on with the draws of "
        "the first, so its noise is other noise."
    ),
    says=("All metrics are those whose draws go on after those of the metric before, and do not begin anew"),
)

edit(
    "repeated_updates_draw_alike",
    "core/losses/turns.py",
    old="LossTurn(name, number, draws + repeated) for repeated",
    new="LossTurn(name, number, draws) for repeated",
    job="jobs/repeated_turns:job",
    plan="dp=2",
    truth="The second update of the critic in a step draws the same noise and masks as the first.",
    says=(
        "the random draws of chunk 0 of step 0, loss critic, chunk 1 of step 0, loss critic, "
        "whose seed they have"
    ),
    module="generator.0",
)
