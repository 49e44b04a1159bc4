"""Bugs of data, and of programs that are given other data than they are for."""

from __future__ import annotations

from tests.planted.fifth.listing import edit

edit(
    "stale_number_of_batch",
    "pipeline/runtime/stage.py",
    old="            inputs[each.value] if each.value in inputs else tensor_of(batch, each) for each in program.inputs\n",
    new=(
        "            inputs[each.value] if each.value in inputs\n"
        '            else tensor_of(batch, each) if each.name in batch.tensors else self.__dict__.setdefault(f"number {each.name}", tensor_of(batch, each))\n'
        "            for each in program.inputs\n"
    ),
    job="jobs/noisy_signals:job",
    plan="tp=2",
    truth=(
        "A number in the batch (level) is given to a program as it was in the first batch of that "
        "shape, for ever (a stale cache)."
    ),
    says="of chunk 0 level of the batch is",
    module="down",
)

edit(
    "long_texts_by_their_beginning",
    "program/ir/batch_values.py",
    old='return text if len(text) < length else f"{text[:40]}... {_hash(text.encode())}"',
    new='return text if len(text) < length else f"{text[:40]}..."',
    job="jobs/prompted:job",
    plan="tp=2",
    truth=(
        "Programs are known by the first 40 characters of a long text in the batch (task), so the "
        "program of one task runs for the other."
    ),
    says=(
        "All gradients are those of a forward with the numbers and texts that the batch of step 0 "
        "has beside its tensors"
    ),
)

edit(
    "python_draws_of_first_chunk",
    "program/store/drawn_batches.py",
    old="            found.append((yield from self.with_draws(batch, moment, loss)))",
    new="            found.append((yield from self.with_draws(batch, batches[0][1], loss)))",
    job="jobs/outer_draws:job",
    plan="tp=2,microbatches=2",
    truth=(
        "What the loss draws with random and numpy is, in every microbatch of a step, that of the first one."
    ),
    says="of chunk 1 what its loss draws with random or numpy, or makes of the step, is",
    module="enter",
)

edit(
    "sample_draws_by_step",
    "data/map_data.py",
    old="seed = sample_seed(self._seed, request.epoch, index)",
    new="seed = sample_seed(self._seed, request.step, index)",
    job="jobs/noisy_pictures:job",
    plan="dp=2,microbatches=2",
    truth=(
        "What a sample draws when it is read (augmentation) is keyed by the step instead of the "
        "epoch, so samples are others from step 1 on."
    ),
    says="is the right samples read with draws that are seeded by the step in place of the epoch",
)

edit(
    "stream_resumes_one_early",
    "data/stream_data.py",
    old="islice(batches, self._steps.start, None)",
    new="islice(batches, max(self._steps.start - 1, 0), None)",
    job="jobs/flowing:job",
    plan="dp=2",
    truth=(
        "A stream that is resumed begins one batch too early: the last batch before the "
        "checkpoint is trained again."
    ),
    says=("the samples of chunk 0 of step 0, chunk 1 of step 0: the data does not go on where it should"),
)

edit(
    "position_where_size_changes",
    "data/map_data.py",
    old="            start = min(start + size, num_samples)\n",
    new="            start = min(start, num_samples)\n",
    job="jobs/growing_batches:job",
    plan="dp=2",
    truth=(
        "Where the batch size changes, the batch before it is read again: the new position does "
        "not pass over it."
    ),
    says="is what the batch would be if it began 6 samples earlier in its epoch",
)

edit(
    "partners_of_first_chunk",
    "data/map_data.py",
    old="others = None if partners is None else partners[own]",
    new="others = None if partners is None else partners[: cut.samples]",
    job="jobs/growing_batches:job",
    plan="dp=2,microbatches=2",
    truth=(
        "Every chunk is mixed with the partners of the batch's first samples instead of those of "
        "its own samples."
    ),
    says="is the right samples mixed with the partners of the first chunk's",
)

edit(
    "drop_last_not_kept",
    "data/map_data.py",
    old="return full + (1 if rest and not self._job.drop_last else 0)",
    new="return full + (1 if rest else 0)",
    job="jobs/tied_halves:job",
    plan="dp=2",
    truth="drop_last=True is not kept: the short last batch of an epoch is trained.",
    says=(
        "has the 5 samples that are left at the end of an epoch, and 8 on one device: "
        "drop_last=True leaves them out"
    ),
)

edit(
    "order_of_first_epoch",
    "data/map_data.py",
    old="        if self._order[0] != epoch:",
    new="        if self._order[0] < 0:",
    job="jobs/queueing:job",
    plan="dp=2",
    truth="Every epoch has the order of the first: the shuffled order is kept and not drawn anew.",
    says="is what the batch would be in the order of the epoch before",
)

edit(
    "collate_draws_same_in_chunks",
    "data/reading.py",
    old='seed_draws(derive(self._seed, "collate", step, index))',
    new='seed_draws(derive(self._seed, "collate", step))',
    job="jobs/noisy_signals:job",
    plan="dp=2",
    truth="collate draws the same numbers in all chunks of a step: its seed leaves out the chunk.",
    says="is the right samples, collated with the same draws in all chunks",
)
