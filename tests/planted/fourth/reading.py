"""Bugs of data: streams, mixing, augmentation, epochs, sizes of batches."""

from __future__ import annotations

from tests.planted.fourth.editing import edit

edit(
    "stream_partners",
    "data/stream_data.py",
    old="partners[cut.start : cut.stop]",
    new="partners[: cut.samples]",
    job="stream:mixed",
    plan="dp=2",
    truth="Every chunk of a stream's batch is mixed with the partners of the first chunk's samples.",
    says="The data of chunk 1 is the right samples mixed with the partners of the first chunk's.",
)
edit(
    "mix_unseeded",
    "data/reading.py",
    old="                seed_draws(mix_seed(self._seed, step))\n",
    new="",
    job="pictures:mixed",
    plan="dp=2,microbatches=2",
    truth=(
        "What mix draws is not the same in all chunks of a step: it is not seeded by the step, so "
        "each chunk has its own share."
    ),
    says="mixed with draws of each chunk alone",
)
edit(
    "augmented_by_chunk",
    "data/map_data.py",
    old="seed = sample_seed(self._seed, request.epoch, index)",
    new="seed = sample_seed(self._seed, request.epoch, request.chunk)",
    job="pictures:workers",
    plan="dp=2",
    devices="cpu",
    truth=(
        "Augmentation draws are seeded by the chunk and not by the sample: all samples of a chunk are "
        "augmented alike, and depend on the plan."
    ),
    says="the right samples read with draws that are seeded by the chunk in place of the sample",
)
edit(
    "batch_size_late",
    "core/job.py",
    old="for each in self.batch_sizes if each <= step), default",
    new="for each in self.batch_sizes if each < step), default",
    job="stream:growing",
    plan="dp=2",
    truth="A new batch size (batch_sizes) begins one step late.",
    says=(
        "The batch has 6 samples, as batch_sizes says of step 1, and 3 on one device: batches have "
        "the sizes of other steps."
    ),
)
edit(
    "stream_epochs_alike",
    "data/stream_data.py",
    old="seed = sample_seed(job.seed, epoch, position)",
    new="seed = sample_seed(job.seed, 0, position)",
    job="stream:job",
    plan="dp=2",
    truth="Samples of a stream are read with the draws of the first epoch in every epoch.",
    says="the right samples read with the draws of the first epoch",
)
edit(
    "epoch_is_step",
    "data/map_data.py",
    old="self._dataset.set_epoch(request.epoch)",
    new="self._dataset.set_epoch(request.step)",
    job="pictures:job",
    plan="dp=2",
    truth="The dataset's set_epoch is given the step's number in place of the epoch's.",
    says="the right samples of a dataset whose set_epoch is given the step",
)
edit(
    "evaluation_drops_last",
    "data/map_data.py",
    old="starts = range(0, len(dataset), size)[:num_batches]",
    new="starts = range(0, len(dataset) - size + 1, size)[:num_batches]",
    job="tables:job",
    plan="dp=2",
    devices="cpu",
    truth="Evaluation leaves out the short last batch.",
    says="Chunk 0 of batch 2 of the evaluation is not evaluated under the plan.",
)
