"""Bugs in reading, mixing and dividing data."""

from __future__ import annotations

from tests.planted.sixth import SIXTH

SIXTH.edit(
    "mixing_drawn_by_chunk",
    "data/reading.py",
    old="seed_draws(mix_seed(self._seed, step))",
    new='seed_draws(derive(self._seed, "mix", step, index))',
    job="tiles:job",
    plan="dp=2,microbatches=2",
    truth="The share of mixed pictures is drawn for each chunk instead of once for the batch.",
    says="mixed with draws of each chunk alone",
    module=None,
)
SIXTH.edit(
    "samples_drawn_by_chunk",
    "data/map_data.py",
    old="seed = sample_seed(self._seed, request.epoch, index)",
    new="seed = sample_seed(self._seed, request.epoch, len(samples))",
    job="tiles:cumulative",
    plan="dp=2,microbatches=2",
    truth="What reading a sample draws depends on its place in its chunk instead of its number in the data.",
    says="read with draws that are seeded by the place in the chunk",
    module=None,
)
SIXTH.edit(
    "stream_begins_anew",
    "data/stream_data.py",
    old="for step, batch in zip(self._steps, islice(batches, self._steps.start, None), strict=False):",
    new="for step, batch in zip(self._steps, islice(batches, None), strict=False):",
    job="tickers:job",
    plan="dp=2",
    truth="A resumed run reads its stream from the beginning instead of from the step that it goes on with.",
    says="the data does not go on where it should",
    module=None,
)
SIXTH.edit(
    "short_batch_counts_as_full",
    "data/map_data.py",
    old="return min(size, self._num_samples - start)",
    new="return size",
    job="tiles:cumulative",
    plan="dp=2,microbatches=2",
    truth="The last, short batch of an epoch is divided as if it were full, so its chunks count with other weights than their samples.",
    says="Chunk 0 has weight 3 instead of 2",
    module=None,
)
SIXTH.edit(
    "partners_of_the_first_chunk",
    "data/map_data.py",
    old="others = None if partners is None else partners[own]",
    new="others = None if partners is None else partners[: cut.samples]",
    job="tiles:job",
    plan="dp=2,microbatches=2",
    truth="Samples of every chunk are mixed with the partners of the batch's first samples.",
    says="mixed with the partners of the first chunk's",
    module=None,
)
