"""Bugs in data and draws."""

from __future__ import annotations

from tests.planted.ninth import NINTH

NINTH.edit(
    "mix_drawn_per_chunk",
    "data/reading.py",
    old="seed_draws(mix_seed(self._seed, step))",
    new='seed_draws(derive(self._seed, "mix", step, index))',
    job="reading:mixed",
    plan="dp=2",
    truth=(
        "What `mix` draws is seeded for each chunk instead of for the step's batch: chunks of one batch are mixed in "
        "different shares."
    ),
    says="is the right samples mixed with draws of each chunk alone",
)

NINTH.edit(
    "draws_of_first_sample",
    "data/map_data.py",
    old=(
        "        for index in dict.fromkeys([*request.indices, *(request.partners or ())]):\n"
        "            seed = sample_seed(self._seed, request.epoch, index)\n"
        "            seed_draws(seed)\n"
        "            self._generators.seed(seed)\n"
    ),
    new=(
        "        seed = sample_seed(self._seed, request.epoch, request.indices[0])\n"
        "        seed_draws(seed)\n"
        "        self._generators.seed(seed)\n"
        "        for index in dict.fromkeys([*request.indices, *(request.partners or ())]):\n"
    ),
    job="reading:augmented",
    plan="dp=2",
    truth=(
        "The generators are seeded once for a chunk, by its first sample, instead of for each sample: a sample's "
        "augmentation depends on which chunk and place it is read in."
    ),
)

NINTH.edit(
    "short_batch_is_no_step",
    "data/stream_data.py",
    old="            yield batch\n            step += 1\n        elif",
    new="            yield batch\n        elif",
    job="reading:growing_stream",
    plan="dp=2",
    truth=(
        "A stream's short batch at the end of an epoch is not counted as a step when batch sizes go by steps, so all "
        "later changes of the batch size come one step too late."
    ),
    says="as batch_sizes says of step 6, and 8 on one device: batches have the sizes of other steps",
)

NINTH.edit(
    "epoch_told_too_late",
    "data/stream_data.py",
    old='            if hasattr(dataset, "set_epoch"):\n                dataset.set_epoch(epoch)\n            samples = iter(dataset)',
    new='            samples = iter(dataset)\n            if hasattr(dataset, "set_epoch"):\n                dataset.set_epoch(epoch)',
    job="reading:turning",
    plan="dp=2",
    truth=(
        "A stream is iterated before it is told its epoch, so each epoch has the order of the one before."
    ),
    says="the right samples of a dataset whose set_epoch is given the first epoch",
)

NINTH.edit(
    "long_texts_by_their_beginning",
    "program/ir/batch_values.py",
    old='return text if len(text) < length else f"{text[:40]}... {_hash(text.encode())}"',
    new='return text if len(text) < length else f"{text[:40]}... {len(text) // length}"',
    job="draws:worded",
    plan="tp=2",
    truth=(
        "Long texts in a batch are told apart by their first 40 characters: a batch whose text ends otherwise runs the "
        "program that was captured for another text."
    ),
    says="with the numbers and texts that the batch of step 0 has beside its tensors",
    module="b",
)

NINTH.edit(
    "draws_by_losses_due",
    "core/losses/turns.py",
    old="            found += [LossTurn(name, number, draws + repeated) for repeated in range(each.updates)]\n        draws += each.updates",
    new="            found += [LossTurn(name, number, draws + repeated) for repeated in range(each.updates)]\n            draws += each.updates",
    job="draws:gan",
    plan="dp=2",
    truth=(
        "A turn's random draws are numbered by the turns that are due in the step: in steps without the critic the "
        "generator's dropout has the critic's draws."
    ),
    says="the random draws of chunk 0 of step 0, loss d",
    module="g.2",
)
