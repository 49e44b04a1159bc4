"""Bugs of data."""

from __future__ import annotations

from dataclasses import replace

from tests.planted.third.planting import Planter, bug


@bug("residual", "dp=2", causes="data")
def epoch_not_advanced(p: Planter) -> None:
    """Every epoch has the order of the first."""
    from meshloom.data import map_data

    p.wrap(
        map_data,
        "sample_order",
        lambda original: lambda seed, epoch, num, shuffle: original(seed, 0, num, shuffle),
    )


@bug("augmented", "dp=2", causes="data")
def augmentation_repeats(p: Planter) -> None:
    """A sample is augmented alike in every epoch."""
    from meshloom.data import map_data

    p.wrap(map_data, "sample_seed", lambda original: lambda seed, epoch, index: original(seed, 0, index))


@bug("augmented", "dp=2", causes="data")
def augmentation_by_position(p: Planter) -> None:
    """A sample's augmentation is drawn by its position in the chunk, not by its number in the dataset: it is the same in all chunks and steps of an epoch."""
    from meshloom.data import map_data as m

    def getitem(self, request):
        samples = {}
        for position, index in enumerate(dict.fromkeys([*request.indices, *(request.partners or ())])):
            m.seed_draws(m.sample_seed(self._seed, request.epoch, position))
            samples[index] = self._dataset[index]
        partners = None if request.partners is None else [samples[index] for index in request.partners]
        return self._collate(
            [samples[index] for index in request.indices],
            request.step,
            request.chunk,
            request.indices,
            partners,
        )

    p.set(m.ChunkSource, "__getitem__", getitem)


@bug("mixed", "dp=2", causes="data")
def partners_of_first_chunk(p: Planter) -> None:
    """Every chunk is mixed with the partners of the batch's first samples."""
    from meshloom.data import map_data as m

    def requests(self, start_step):
        for step in range(start_step, self._stop_step):
            epoch, indices = self._batches.of(step)
            partners = self._batches.partners(step)
            for cut in self._ranges(step, len(indices)):
                own = slice(cut.start, cut.stop)
                if cut.samples:
                    yield m.ReadRequest(
                        step,
                        cut.index,
                        epoch,
                        indices[own],
                        None if partners is None else partners[: cut.samples],
                    )

    p.set(m.MapReader, "_requests", requests)


@bug("residual", "dp=3", causes="data")
def short_batch_rounded_down(p: Planter) -> None:
    """A short last batch is rounded down to a multiple of the chunks: its last sample is not trained."""
    from meshloom.data import map_data as m

    def ranges(self, step, num_samples):
        if num_samples < self._batches._job.batch_size:
            num_samples -= num_samples % self._plan.num_chunks
        return m.share_of(
            self._replica, m.split_batch(num_samples, self._plan, self._shares.of(step)), self._plan
        )

    p.set(m.MapReader, "_ranges", ranges)


@bug("growing", "dp=2", causes="data")
def growth_border(p: Planter) -> None:
    """Where batches grow, the first larger batch begins after as many samples as it has itself: some samples of the epoch are passed over."""
    from meshloom.data import map_data as m

    def make(original):
        def init(self, job, num_samples):
            original(self, job, num_samples)
            if len(self._stretches) > 1:
                one, two = self._stretches
                self._stretches[1] = replace(two, start=min(two.start + two.size - one.size, num_samples))

        return init

    p.wrap(m.Batches, "__init__", make)


@bug("residual", "dp=2", causes="data")
def resumed_a_step_behind(p: Planter) -> None:
    """A reader that begins in the middle of a run begins one step too early: all later batches are those of the step before."""
    from meshloom.data import map_data as m

    def requests(self, start_step):
        for step in range(start_step, self._stop_step):
            epoch, indices = self._batches.of(step - 1 if start_step else step)
            size = self._batches.size(step)
            indices = (indices * 3)[:size]
            for cut in self._ranges(step, size):
                if cut.samples:
                    yield m.ReadRequest(step, cut.index, epoch, indices[cut.start : cut.stop], None)

    p.set(m.MapReader, "_requests", requests)


@bug("stream", "dp=2", causes="data")
def stream_repeats(p: Planter) -> None:
    """A stream is seeded alike in every epoch: the same order and the same augmentation."""
    from meshloom.data import stream_data as s

    p.wrap(
        s,
        "derive",
        lambda original: lambda seed, what, *rest: original(seed, what, *([0] if what == "stream" else rest)),
    )
    p.wrap(s, "sample_seed", lambda original: lambda seed, epoch, position: original(seed, 0, position))


@bug("stream", "dp=2", causes="data")
def stream_resumed_behind(p: Planter) -> None:
    """A stream that is sought passes over one batch too few: after resuming every batch is that of the step before."""
    from meshloom.data import stream_data as s

    p.wrap(
        s, "islice", lambda original: lambda batches, start, stop: original(batches, max(start - 1, 0), stop)
    )


@bug("residual", "dp=2,microbatches=2", causes="data")
def chunks_swapped_in_second_epoch(p: Planter) -> None:
    """A worker that reads ahead over the end of an epoch hands over the first batch of the next one in the old epoch's order."""
    from meshloom.data import map_data as m

    def make(original):
        def of(self, step):
            epoch, indices = original(self, step)
            if epoch and original(self, step - 1)[0] != epoch:
                order = m.sample_order(self._job.seed, epoch - 1, self._num_samples, self._job.shuffle)
                indices = order[: len(indices)]
            return epoch, indices

        return of

    p.wrap(m.Batches, "of", make)


@bug("mixed", "dp=2", causes="data")
def mix_share_constant(p: Planter) -> None:
    """What a mix draws is the same in every step."""
    from meshloom.data import reading

    p.wrap(reading, "mix_seed", lambda original: lambda seed, step: original(seed, 0))


@bug("mixed", "dp=2", causes="data")
def partners_constant(p: Planter) -> None:
    """Partners are drawn by the same permutation in every step."""
    from meshloom.data import map_data

    p.wrap(map_data, "partner_order", lambda original: lambda seed, step, num: original(seed, 0, num))
