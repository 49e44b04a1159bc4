"""Causes of wrong data: one device reads, augments or mixes the batch of the step once more, in ways that would be wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

from meshloom.core.job import Job
from meshloom.verify.reference.mistakes import Cause
from meshloom.verify.reference.observers import digest_values
from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference.samples_of_epoch import WayToRead, num_samples, reader_of_step, size_of_step
from meshloom.verify.reference.step_records import StepRecord

_STEPS = 256  # into data, up to which it is read once more
_SAMPLES = 4096  # of a batch

_RIGHT = "the right samples"
Chunks = Mapping[int, Sequence[Any]]  # the samples of each chunk, by its index


def cause_of_data(ours: StepRecord, reference: Reference) -> Cause | None:
    """The way that gives the data of all chunks that have other data than on one device, if one does. ours: of the step that `reference` has
    computed."""
    job, step = reference.job, reference.step
    right = {each.index: each for each in reference.chunks if each.samples}
    here, there = (sum(each.samples for each in of) for of in (ours.chunks, right.values()))
    if here != there:
        length = num_samples(job) if job.drop_last and not job.batch_sizes else None
        if length is not None and here == length % size_of_step(job, step):
            what = f"The batch has the {here} samples that are left at the end of an epoch, and {there} on one device"
            return Cause("data", f"{what}: drop_last=True leaves them out.")
        others = [each for each in (step - 1, step + 1, 0) if each >= 0 and size_of_step(job, each) == here]
        if not others or size_of_step(job, step) != there:
            return None
        what = f"The batch has {here} samples, as batch_sizes says of step {others[0]}, and {there} on one device"
        return Cause("data", f"{what}: batches have the sizes of other steps.")
    wrong = {
        each.index: each.data
        for each in ours.chunks
        if each.index in right and each.data != right[each.index].data
    }
    if not wrong or step > _STEPS or there > _SAMPLES:
        return None
    for what, digests in _ways(reference):
        found: Mapping[int, str] = {}
        with suppress(Exception):  # the job's own code may refuse what is wrong
            found = digests()
        if all(found.get(index) == data for index, data in wrong.items()):
            which = ", ".join(map(str, wrong))
            return Cause(
                "data",
                f"The data of {'chunk' if len(wrong) == 1 else 'chunks'} {which} is {what}.",
                explains=True,
            )
    return None


def _ways(reference: Reference) -> Iterator[tuple[str, Callable[[], Mapping[int, str]]]]:
    """What is other, and what gives the digest of each chunk's data then."""
    run, step = reference.chunk_run, reference.step
    members = {index: samples for each in reference.forwards() for index, samples in each.members}
    chunks: Chunks = dict(sorted(members.items()))

    def digests(
        of_chunks: Chunks, mixed_at: Callable[[int], Sequence[int]] = lambda index: (step,)
    ) -> Mapping[int, str]:
        return {
            index: digest_values(run.collate(samples, step, index, mixed_at=mixed_at(index)))
            for index, samples in of_chunks.items()
        }

    def unmixed() -> Mapping[int, str]:
        own = {index: [each for each, _ in samples] for index, samples in chunks.items()}
        return {
            index: digest_values(run.collate_unmixed(samples, step, index)) for index, samples in own.items()
        }

    def with_partners(partners_of: Callable[[Sequence[Any]], Sequence[Any]]) -> Mapping[int, str]:
        return digests(
            {
                index: [(own, other) for (own, _), other in zip(samples, partners_of(samples), strict=False)]
                for index, samples in chunks.items()
            }
        )

    if reference.job.mix is not None:
        of_first = [partner for _, partner in next(iter(chunks.values()))]
        yield f"{_RIGHT} without mixing", unmixed
        yield (
            f"{_RIGHT} mixed with the partners of the first chunk's",
            partial(with_partners, lambda samples: of_first),
        )
        yield (
            f"{_RIGHT} mixed with themselves",
            partial(with_partners, lambda samples: [own for own, _ in samples]),
        )
        for other in {0, step - 1, step + 1} - {step, -1}:
            what = f"{_RIGHT} mixed with what mix draws in step {other}"
            yield what, partial(digests, chunks, lambda index, other=other: (other,))
        alone = f"{_RIGHT} mixed with draws of each chunk alone"
        yield f"{alone}, which go on from those of collating", partial(digests, chunks, lambda index: ())
        for places in ((step,), ()):
            yield alone, partial(digests, chunks, lambda index, places=places: (*places, index))

    def collated(place_of: Callable[[int], Sequence[int]]) -> Mapping[int, str]:
        return {
            index: digest_values(run.collate(samples, *place_of(index))) for index, samples in chunks.items()
        }

    if reference.job.collate is not None:
        alike = f"{_RIGHT}, collated with the same draws in all chunks"
        for places in ((step,), (step, 0), ()):
            yield alike, partial(collated, lambda index, places=places: places)
        yield (
            f"{_RIGHT}, collated with the draws of the first step",
            partial(collated, lambda index: (0, index)),
        )
        yield (
            f"{_RIGHT}, collated with draws that are seeded by the chunk, and not by the step",
            partial(collated, lambda index: (index,)),
        )
    read = reader_of_step(reference.job, step)

    def read_again(reading: WayToRead) -> Mapping[int, str]:
        batch = iter(read(reading))
        return digests({index: list(islice(batch, len(samples))) for index, samples in chunks.items()})

    for reading in _readings(chunks, reference.job, step):
        yield reading.what, partial(read_again, reading)


def _readings(chunks: Chunks, job: Job, step: int) -> Iterator[WayToRead]:
    ordered = "what the batch would be in the order of"
    yield WayToRead(what=f"{ordered} the first epoch", order=lambda epoch: 0)
    yield WayToRead(what=f"{ordered} the epoch before", order=lambda epoch: max(epoch - 1, 0))
    yield WayToRead(what=f"{ordered} the next epoch", order=lambda epoch: epoch + 1)
    yield WayToRead(what=f"{ordered} an epoch of the step's number", order=lambda epoch: step)
    yield WayToRead(what=f"{ordered} the dataset, not shuffled", order=lambda epoch: None)
    sizes = {size for each in (step - 1, step, step + 1) if each >= 0 and (size := size_of_step(job, each))}
    for shift in sorted({sign * each for each in (1, *sizes) for sign in (-1, 1)}, key=abs):
        when = (
            f"{abs(shift)} {'sample' if abs(shift) == 1 else 'samples'} {'earlier' if shift < 0 else 'later'}"
        )
        yield WayToRead(what=f"what the batch would be if it began {when} in its epoch", shift=shift)
    places = [(index, place) for index, samples in chunks.items() for place in range(len(samples))]
    yield WayToRead(what=f"{_RIGHT} read with the draws of the first epoch", epoch=lambda epoch: 0)
    yield WayToRead(
        what=f"{_RIGHT} read with draws that are seeded by the step in place of the epoch",
        epoch=lambda epoch: step,
    )
    yield WayToRead(what=f"{_RIGHT} read with the draws of the next epoch", epoch=lambda epoch: epoch + 1)
    yield WayToRead(
        what=f"{_RIGHT} read with draws that are seeded by the chunk in place of the sample",
        index=lambda index, place: places[place][0],
    )
    yield WayToRead(
        what=f"{_RIGHT} read with draws that are seeded by the place in the batch",
        index=lambda index, place: place,
    )
    yield WayToRead(
        what=f"{_RIGHT} read with draws that are seeded by the place in the chunk",
        index=lambda index, place: places[place][1],
    )
    yield WayToRead(what=f"{_RIGHT} read with one seed for all", index=lambda index, place: 0)
    yield WayToRead(what=f"{_RIGHT} of a dataset whose set_epoch is given the step", told=lambda epoch: step)
    yield WayToRead(
        what=f"{_RIGHT} of a dataset whose set_epoch is given the first epoch", told=lambda epoch: 0
    )
    yield WayToRead(
        what=f"{_RIGHT} of a dataset whose set_epoch is given the next epoch", told=lambda epoch: epoch + 1
    )
