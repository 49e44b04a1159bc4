"""Bugs in draws."""

from __future__ import annotations

from tests.planted.eighth import EIGHTH

EIGHTH.edit(
    "own_generators_draw_alike",
    "core/modules/own_generators.py",
    old="generator.manual_seed(derive(seed, name))",
    new="generator.manual_seed(seed)",
    job="states:noisy",
    plan="dp=2",
    truth=(
        "All generators that modules hold are seeded with the chunk's seed itself and not each by its name, so the second "
        "noise layer draws the same numbers as the first."
    ),
    says="its generator is a generator in state",
    module="one",
)
EIGHTH.edit(
    "recurrent_masks_by_time",
    "core/random.py",
    old="        self.dim = 1\n",
    new="        self.dim = 0\n",
    job="rnns:job",
    plan="dp=2,sync_batch_norm=true,keyed_draws=true",
    truth=(
        "Where replicas share a chunk, the dropout masks between the layers of an LSTM, [time, samples, features], are cut "
        "along time instead of along samples: each replica has masks of the wrong samples."
    ),
    module="rnn",
)
EIGHTH.edit(
    "row_draws_from_first_row",
    "core/random.py",
    old='seed_torch(derive(chain, "row", first + row))',
    new='seed_torch(derive(chain, "row", row))',
    job="states:counts",
    plan="dp=2,sync_batch_norm=true,keyed_draws=true",
    truth=(
        "Draws of which each row has its own seed (poisson) are numbered within the replica's part of a shared chunk, so the "
        "second replica draws with the seeds of the first one's rows."
    ),
    module="out",
)
EIGHTH.edit(
    "recompute_without_gap_of_draws",
    "program/recompute/saved_tensors.py",
    old="if at is not None and node.draw != at:",
    new="if at is not None and node.draw < at:",
    job="gpt:noisy",
    plan="recompute=full,microbatches=2",
    truth=(
        "Recomputation does not pass over the numbers of draws that it leaves out (added noise), so dropouts behind them in "
        "a segment have other masks in backward than in forward."
    ),
    says="under a plan that recomputes, other draws or values there",
    module="blocks.2.down",
)
EIGHTH.edit(
    "first_recomputation_counts_from_program",
    "program/run/segment_runner.py",
    old="seed = seed_of_draw(special.seed, numbers[recipe.first_draw] - numbers[str(first_draw)])",
    new="seed = seed_of_draw(special.seed, numbers[recipe.first_draw])",
    job="gpt:untied",
    plan="recompute=full,microbatches=2",
    truth=(
        "In the first run of a segment the seed of its recomputation is counted from the program's first draw and not from "
        "the segment's, so in the first microbatch of the first step backward has other dropout masks than forward; later "
        "ones are right."
    ),
    says="under a plan that recomputes, other draws or values there",
    module="head",
)
