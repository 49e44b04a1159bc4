"""Bugs in what is read and drawn."""

from __future__ import annotations

from tests.planted.seventh import SEVENTH

SEVENTH.edit(
    "epoch_told_after_reading",
    "data/map_data.py",
    old=(
        '        if request.epoch != EVALUATION and hasattr(self._dataset, "set_epoch"):\n'
        "            self._dataset.set_epoch(request.epoch)\n"
        "        for index in dict.fromkeys([*request.indices, *(request.partners or ())]):\n"
        "            seed = sample_seed(self._seed, request.epoch, index)\n"
        "            seed_draws(seed)\n"
        "            self._generators.seed(seed)\n"
        "            try:\n"
        "                samples[index] = self._dataset[index]\n"
        "            except Exception as error:\n"
        '                return ReadFailure.of(f"Reading sample {index} (step {request.step})", error)\n'
    ),
    new=(
        "        for index in dict.fromkeys([*request.indices, *(request.partners or ())]):\n"
        "            seed = sample_seed(self._seed, request.epoch, index)\n"
        "            seed_draws(seed)\n"
        "            self._generators.seed(seed)\n"
        "            try:\n"
        "                samples[index] = self._dataset[index]\n"
        "            except Exception as error:\n"
        '                return ReadFailure.of(f"Reading sample {index} (step {request.step})", error)\n'
        '        if request.epoch != EVALUATION and hasattr(self._dataset, "set_epoch"):\n'
        "            self._dataset.set_epoch(request.epoch)\n"
    ),
    job="data:epochs",
    plan="dp=2,microbatches=2",
    truth=(
        "A dataset is told of a new epoch after a chunk was read, so the first chunk of every replica in the second epoch (step 2) has "
        "samples of the epoch before."
    ),
    says="the right samples of a dataset whose set_epoch is given the first epoch",
    module=None,
)
SEVENTH.edit(
    "short_evaluation_batch_dropped",
    "data/map_data.py",
    old="    starts = range(0, len(dataset), size)[:num_batches]\n",
    new="    starts = range(0, len(dataset) - (size - 1 if job.drop_last else 0), size)[:num_batches]\n",
    job="metrics:dropping",
    plan="dp=2",
    truth="drop_last of training holds in evaluations as well: metrics leave out the last 5 of the 17 held-out samples.",
    says="Chunk 0 of batch 2 of the evaluation is not evaluated under the plan",
    module=None,
)
SEVENTH.edit(
    "mix_draws_of_chunk",
    "data/reading.py",
    old=(
        "                others = self._collated(partners, step, index)\n"
        '                what = what.replace("Collating", "Mixing", 1)\n'
        "                seed_draws(mix_seed(self._seed, step))\n"
    ),
    new=(
        "                seed_draws(mix_seed(self._seed, step))\n"
        "                others = self._collated(partners, step, index)\n"
        '                what = what.replace("Collating", "Mixing", 1)\n'
    ),
    job="data:mixed",
    plan="dp=2",
    truth=(
        "What `mix` draws goes on from the seed of the chunk's collation and not from the step's, so each chunk is mixed in another "
        "proportion than one device's whole batch."
    ),
    says="mixed with draws of each chunk alone",
    module=None,
)
SEVENTH.edit(
    "stream_short_batch_is_no_step",
    "data/stream_data.py",
    old=("        if batch and not job.drop_last:\n            yield batch\n            step += 1\n"),
    new=("        if batch and not job.drop_last:\n            yield batch\n"),
    job="data:stream",
    plan="dp=2",
    devices="cpu",
    truth=(
        "The short batch at the end of an epoch of a stream is not counted as a step, so batches grow one step late: that of step 2 has 8 "
        "samples and not 12."
    ),
    says="batches have the sizes of other steps",
    module=None,
)
SEVENTH.edit(
    "rows_of_even_shares",
    "replica/chunk_scope.py",
    old="            return index, Rows(sum(sizes[: self._context.place.dp]), chunk.samples, sum(sizes))\n",
    new="            return index, Rows(self._context.place.dp * chunk.samples, chunk.samples, sum(sizes))\n",
    job="conv:uneven",
    plan="dp=2,sync_batch_norm=true,keyed_draws=true",
    truth=(
        "Where replicas share a chunk of 13 samples as 7 and 6, the second takes its draws from row 6 on and not from row 7 on: its dropout"
        " masks are shifted by one sample."
    ),
    says="other rows than theirs of what all replicas draw together, the seed is theirs",
    module="drop",
)
SEVENTH.edit(
    "numpy_seed_of_31_bits",
    "core/random.py",
    old="    return random.Random(seed), numpy.random.RandomState(seed % 2**32)\n",
    new="    return random.Random(seed), numpy.random.RandomState(seed % 2**31)\n",
    job="states:jittered",
    plan="pp=2,microbatches=3,cuts=mid",
    truth=(
        "In programs numpy draws from a seed of 31 bits, so what it draws is wrong in the chunks whose seed has the 32nd bit (the first "
        "ones in step 1)."
    ),
    says="the output of jitter is the first that differs: what a stage computes there is wrong",
    module="jitter",
)
