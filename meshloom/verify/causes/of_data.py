"""Causes of wrong data: one device reads, augments or mixes the batch of the step once more, in ways that would be wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch.utils.data import default_collate

from meshloom.core.random import derive, mix_seed, preserved_draws, seed_everything
from meshloom.verify.reference.mistakes import Cause
from meshloom.verify.reference.observers import digest_values
from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference.samples_of_epoch import WayToRead, batch_of_step, size_of_step
from meshloom.verify.reference.step_records import StepRecord

_STEPS = 256  # into data, up to which it is read once more
_SAMPLES = 4096  # of a batch

Chunks = Mapping[int, Sequence[Any]]  # the samples of each chunk, by its index


def cause_of_data(ours: StepRecord, reference: Reference) -> Cause | None:
    """The way that gives the data of all chunks that have other data than on one device, if one does. ours: of the step that `reference` has
    computed."""
    job, step = reference.job, reference.step
    right = {each.index: each for each in reference.chunks if each.samples}
    here, there = (sum(each.samples for each in of) for of in (ours.chunks, right.values()))
    if here != there:
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
        if all(digests.get(index) == data for index, data in wrong.items()):
            which = ", ".join(map(str, wrong))
            return Cause(
                "data",
                f"The data of {'chunk' if len(wrong) == 1 else 'chunks'} {which} is the right samples {what}.",
                explains=True,
            )
    return None


def _ways(reference: Reference) -> Iterator[tuple[str, Mapping[int, str]]]:
    """What is other, and the digest of each chunk's data then."""
    chunks = {index: samples for each in reference.forwards() for index, samples in each.members}
    chunks = dict(sorted(chunks.items()))
    if reference.job.mix is not None:
        for what, make in _ways_to_mix(reference, chunks):
            digests: dict[int, str] = {}
            with suppress(Exception):  # the job's function may refuse what is wrong
                digests = {index: make(index, samples) for index, samples in chunks.items()}
            yield what, digests
    for reading in _readings(chunks, reference.step):
        try:
            batch = batch_of_step(reference.job, reference.step, reading)
        except Exception:  # the dataset may refuse what is wrong
            continue
        if len(batch) != sum(map(len, chunks.values())):
            continue
        found, start = dict[int, str](), 0
        for index, samples in chunks.items():
            found[index] = _digest(reference, batch[start : start + len(samples)], index)
            start += len(samples)
        yield reading.what, found


def _ways_to_mix(
    reference: Reference, chunks: Chunks
) -> Iterator[tuple[str, Callable[[int, Sequence[Any]], str]]]:
    first = next(iter(chunks.values()))

    def unmixed(index: int, samples: Sequence[Any]) -> str:
        return digest_values(_collated(reference, [own for own, _ in samples], index))

    def with_first(index: int, samples: Sequence[Any]) -> str:
        pairs = zip(samples, first, strict=False)
        return _digest(reference, [(own, partner) for (own, _), (_, partner) in pairs], index)

    def with_itself(index: int, samples: Sequence[Any]) -> str:
        return _digest(reference, [(own, own) for own, _ in samples], index)

    yield "without mixing", unmixed
    yield "mixed with the partners of the first chunk's", with_first
    yield "mixed with themselves", with_itself
    for step in {0, reference.step - 1, reference.step + 1} - {reference.step, -1}:
        yield (
            f"mixed with what mix draws in step {step}",
            lambda index, samples, step=step: _digest(reference, samples, index, step),
        )


def _readings(chunks: Chunks, step: int) -> Iterator[WayToRead]:
    places = [(index, place) for index, samples in chunks.items() for place in range(len(samples))]
    yield WayToRead(what="read with the draws of the first epoch", epoch=lambda epoch: 0)
    yield WayToRead(
        what="read with draws that are seeded by the step in place of the epoch", epoch=lambda epoch: step
    )
    yield WayToRead(what="read with the draws of the next epoch", epoch=lambda epoch: epoch + 1)
    yield WayToRead(
        what="read with draws that are seeded by the chunk in place of the sample",
        index=lambda index, place: places[place][0],
    )
    yield WayToRead(
        what="read with draws that are seeded by the place in the batch", index=lambda index, place: place
    )
    yield WayToRead(
        what="read with draws that are seeded by the place in the chunk",
        index=lambda index, place: places[place][1],
    )
    yield WayToRead(what="read with one seed for all", index=lambda index, place: 0)
    yield WayToRead(what="of a dataset whose set_epoch is given the step", told=lambda epoch: step)
    yield WayToRead(what="of a dataset whose set_epoch is given the first epoch", told=lambda epoch: 0)
    yield WayToRead(what="of a dataset whose set_epoch is given the next epoch", told=lambda epoch: epoch + 1)


def _digest(reference: Reference, samples: Sequence[Any], index: int, step: int | None = None) -> str:
    """Of the data of a chunk with these samples. step: whose draws mixing has; None: its own."""
    job = reference.job
    if job.mix is None:
        return digest_values(_collated(reference, samples, index))
    own, partners = zip(*samples, strict=True)
    with preserved_draws():
        batch, others = (_collated(reference, each, index) for each in (own, partners))
        seed_everything(mix_seed(job.seed, reference.step if step is None else step))
        return digest_values(job.mix(batch, others))


def _collated(reference: Reference, samples: Sequence[Any], index: int) -> Any:
    with preserved_draws():
        seed_everything(derive(reference.job.seed, "collate", reference.step, index))
        return (reference.job.collate or default_collate)(list(samples))
