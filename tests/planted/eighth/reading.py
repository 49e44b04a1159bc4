"""Bugs in data."""

from __future__ import annotations

from tests.planted.eighth import EIGHTH

EIGHTH.edit(
    "python_random_unseeded_in_samples",
    "data/reading.py",
    old="    random.seed(value)\n    numpy.random.seed",
    new="    numpy.random.seed",
    job="reading:job",
    plan="dp=2,microbatches=2",
    truth=(
        "While samples are read, Python's random is not seeded by the sample: augmentation with it depends on what else drew "
        "before, on the chunk and on the process."
    ),
)
EIGHTH.edit(
    "dropped_samples_begin_next_epoch",
    "data/stream_data.py",
    old="        batch: list[Sample] = []\n        seed = ",
    new="        batch: list[Sample] = batch if epoch and job.drop_last else []\n        seed = ",
    job="reading:stream",
    plan="dp=2",
    truth=(
        "With drop_last=True the samples left over at the end of a stream's epoch are not dropped but begin the next epoch's "
        "first batch, so all batches from then on are shifted."
    ),
)
EIGHTH.edit(
    "remainder_of_shares_not_trained",
    "core/plan_shares.py",
    old="for replica in by_remainder[: num_samples - sum(sizes)]:",
    new="for replica in by_remainder[: num_samples % len(shares)]:",
    job="mlps:job",
    plan="dp=2,shares=3+2",
    truth=(
        "What is left of a batch after whole proportions is counted by the number of replicas and not by what is missing, so "
        "with shares=3+2 one of 12 samples of each batch is given to no replica."
    ),
    says="The batch has 11 samples, and 12 on one device",
)
