"""A DataLoader whose batches are this replica's shares of the script's."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from functools import cache
from itertools import islice
from typing import Any, Literal, cast

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from meshloom.comm.objects import collect
from meshloom.core.errors import CODE_ERRORS, DataError
from meshloom.core.random import preserved_draws
from meshloom.data.samples import SomeSamples
from meshloom.launch.environment import launched_plan
from meshloom.launch.names import rank_name
from meshloom.loops.data_place import DataPlace
from meshloom.loops.loader_parts import (
    BatchPlace,
    PlacedList,
    SharedBatches,
    SharedCollate,
    SharedSamples,
    SharedStream,
)
from meshloom.loops.loop_lines import say, say_that_it_evaluates
from meshloom.loops.ranks import LoopRanks, check_accelerator, ranks, reached
from meshloom.loops.share import Sharer, too_small
from meshloom.loops.taken_shares import TakenShare, saw_whole, took
from meshloom.train.rank_comparison import compare_samples, sample_digest

Collating = Literal["share", "whole"]


def loader(dataloader: Any, *, collate: Collating = "share") -> Any:
    """A loader like `dataloader`, and of its class, whose global batches are those of `dataloader`, and of which this replica gets its share.

    collate: "whole" gives `collate_fn` each global batch and keeps this replica's rows of the result, where padding or a draw is of the whole batch.

    Its data set, batch sampler and collate give the share, also to who makes another loader of them. A share is never empty: see `share`.
    `len()` is the script's. What a sample draws belongs to (seed, epoch, index). `state_dict` and `load_state_dict` keep its place in the data, in
    global batches. In one process without a launcher it is `dataloader` itself. Raises `DataError` for a loader that cannot be shared, and for
    data that differs between ranks.
    """
    here = ranks()
    if here.plan.mesh.size == 1 and launched_plan() is None:
        return dataloader
    check_accelerator()
    seed = torch.initial_seed()
    shared = shared_loader(dataloader, Sharer(here.replica, here.plan.dp), seed=seed, collate=collate)
    notes = _compared(here, shared.dataset, seed) if shared is not dataloader else []
    own = shared.collate_fn.collate if shared is not dataloader else default_collate
    if here.plan.dp > 1 and collate == "share" and own is not default_collate:
        name = getattr(own, "__qualname__", type(own).__name__)
        notes.append(
            f"{name} collates this replica's share of each batch; with ml.loader(..., collate='whole') the whole batch"
        )
    for note in notes:
        say(note)
    return shared


def shared_loader(given: Any, sharer: Sharer, *, seed: int, collate: Collating = "share") -> Any:
    """`loader` of this replica, without regard to other ranks."""
    if isinstance(given, SharedLoader | _HandsOn):
        return given
    held = {name: each for name, each in vars(given).items() if isinstance(each, DataLoader)}
    if held:  # a library's loader around torch's
        within = {
            name: shared_loader(each, sharer, seed=seed, collate=collate) for name, each in held.items()
        }
        return _like(given, _class_of(type(given), DataLoader), within)
    _check(given, sharer, collate)
    if given.batch_sampler is None:
        return given
    is_stream, whole = isinstance(given.dataset, IterableDataset), collate == "whole"
    parts: dict[str, Any] = {"_iterator": None}
    if _place(given) is None:  # else it was made from parts of ours
        place = DataPlace(seed, None if is_stream else given.batch_sampler)
        parts["dataset"] = SharedStream(given.dataset, place) if is_stream else SharedSamples(given.dataset)
        if not is_stream:
            parts["batch_sampler"] = SharedBatches(place, sharer, whole=whole)
    if not isinstance(given.collate_fn, SharedCollate):
        stream = parts.get("dataset", given.dataset) if is_stream else None
        parts["collate_fn"] = SharedCollate(given.collate_fn, sharer, stream, whole=whole)
    return _like(given, _class_of(type(given), SharedLoader), parts)


class SharedLoader(DataLoader[Any]):
    """A loader of ours: it hands batches to the script, and notes which share each is."""

    def __iter__(self) -> Any:
        place, plain = cast(DataPlace, _place(self)), self.collate_fn
        skipped, apart = 0, nullcontext()
        if place.is_resumed:
            self._iterator = None  # workers that stay know of other epochs
            apart = preserved_draws()  # this epoch has drawn as it began
        place.own, self.collate_fn = True, cast(SharedCollate, plain).carrying()
        try:
            with apart:
                if isinstance(self.dataset, SharedStream):
                    with place.beginning() as (self.dataset.epoch, skipped):
                        pass
                carried = super().__iter__()
        finally:
            place.own, self.collate_fn = False, plain
        deque(islice(carried, skipped), maxlen=0)
        return _Handed(carried, place, self.__dict__.get("_pending"))

    def state_dict(self) -> dict[str, Any]:
        """Its place in the data."""
        return cast(DataPlace, _place(self)).state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The next iterator goes on from there, under any plan and number of workers."""
        cast(DataPlace, _place(self)).load_state_dict(state_dict)

    def end_epoch(self) -> None:
        """The script takes no more batches of this epoch: who asks for one more, as a `for` does, need not say so."""
        cast(DataPlace, _place(self)).end()


class _Handed:
    """The batches of an epoch. pending: the shares of those that another's iterator has and the script has not; None: there is no other."""

    def __init__(self, carried: Any, place: DataPlace, pending: deque[TakenShare] | None) -> None:
        self._carried, self._place, self._pending = carried, place, pending

    def __iter__(self) -> _Handed:
        return self

    def __len__(self) -> int:
        return len(self._carried)

    def __next__(self) -> Any:
        self._place.own = True  # a library's sampler around ours begins with its first batch
        try:
            batch, taken, whole = next(self._carried)
        except StopIteration:
            if self._pending is None:
                self._place.end()
            raise
        finally:
            self._place.own = False
        if whole:
            saw_whole(lambda: whole)
        if self._pending is None:
            _hand(self._place, taken, batch)
        else:
            self._pending.append(taken)
        return batch


class _HandsOn:
    """A loader whose class iterates in a way of its own, and may read ahead: a batch is the script's when it comes out of there."""

    def __iter__(self) -> Iterator[Any]:
        pending, place = _source(self)
        pending.clear()
        for batch in cast(Any, super()).__iter__():
            if pending:
                _hand(place, pending.popleft(), batch)
            yield batch
        place.end()

    def state_dict(self) -> dict[str, Any]:
        """Its place in the data."""
        return _source(self)[1].state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The next iterator goes on from there, under any plan and number of workers."""
        _source(self)[1].load_state_dict(state_dict)

    def end_epoch(self) -> None:
        """As of `SharedLoader`."""
        _source(self)[1].end()


def _hand(place: DataPlace, taken: TakenShare, batch: Any) -> None:
    reached()
    place.hand()
    took(taken, batch)
    if len(taken.sizes) > 1 and not torch.is_grad_enabled():
        say_that_it_evaluates()


def _source(handing: Any) -> tuple[deque[TakenShare], DataPlace]:
    """What the loader of ours within it has given."""
    shared = next((each for each in vars(handing).values() if isinstance(each, SharedLoader)), handing)
    return vars(shared).setdefault("_pending", deque()), cast(DataPlace, _place(shared))


@cache
def _class_of(given: type[Any], base: type[Any]) -> type[Any]:
    """A class of that name that iterates as `given` does over what `base` gives."""
    if given is DataLoader:
        return SharedLoader
    bases = (given, base) if base is SharedLoader else (given,)
    if given.__iter__ is not DataLoader.__iter__:
        bases = (_HandsOn, *bases)
    return type(given.__name__, bases, {"__module__": given.__module__, "__qualname__": given.__qualname__})


def _like(given: Any, kind: type[Any], changes: Mapping[str, Any]) -> Any:
    """A loader of class `kind` with all that `given` has, but for `changes`: constructors of other classes take other arguments."""
    made = object.__new__(kind)
    vars(made).update({**vars(given), **changes})
    return made


def _place(given: Any) -> DataPlace | None:
    """Of a loader with parts of ours; None: it has none."""
    if isinstance(given.dataset, SharedStream):
        return given.dataset.place
    batches = given.batch_sampler
    while batches is not None and not isinstance(batches, SharedBatches):
        batches = getattr(batches, "batch_sampler", None)  # a library's around it
    return None if batches is None else batches.place


def _check(given: Any, sharer: Sharer, collate: str) -> None:
    """Raise `DataError` for a loader that cannot be shared."""
    if not isinstance(given, DataLoader):
        raise DataError(
            f"ml.loader takes a torch DataLoader, and got {type(given).__name__}. Share the batches of another one as they come: batch = ml.share(batch)."
        )
    if collate not in ("share", "whole"):
        raise DataError(f"ml.loader(collate={collate!r}): write 'share' or 'whole'.")
    batches = given.batch_sampler
    for each in (given.dataset, given.sampler, batches, getattr(batches, "sampler", None)):
        parts = max(getattr(each, "num_replicas", 1), getattr(each, "num_processes", 1))
        if parts > 1:
            raise DataError(
                f"The loader has a {type(each).__name__}, which gives each of {parts} ranks samples of its own. Pass the plain loader: ml.loader shares its batches."
            )
    if batches is None and sharer.replicas > 1:
        raise DataError(
            "The loader has batch_size=None: its items are batches, or samples that are none. Share them as they come: batch = ml.share(batch)."
        )
    if not getattr(given, "in_order", True):
        raise DataError(
            "The loader has in_order=False, so that ranks would have shares of different batches. Leave it out."
        )
    size = getattr(batches, "batch_size", None)
    if isinstance(size, int) and size < sharer.replicas:
        raise too_small(size, sharer.replicas)


def _compared(here: LoopRanks, dataset: Any, seed: int) -> list[str]:
    """Notes on what could not be compared between ranks. Raises `DataError` for seeds, and `JobError` for data, that differ."""
    mesh = here.plan.mesh
    read = None if isinstance(dataset, SharedStream) else vars(_some(dataset, seed))
    everyone = collect(here.everyone, [seed, read])
    for rank, (theirs, _) in enumerate(everyone):
        if theirs != everyone[0][0]:
            raise DataError(
                f"torch's seed is {everyone[0][0]} on {rank_name(0, mesh)} and {theirs} on {rank_name(rank, mesh)}, and ml.loader shares batches that all "
                "ranks draw alike. Seed them alike: meshloom does when it is imported."
            )
    have = {rank: SomeSamples(**theirs) for rank, (_, theirs) in enumerate(everyone) if theirs is not None}
    return compare_samples(have, mesh, "The data set of ml.loader")


def _some(dataset: Any, seed: int) -> SomeSamples:
    """Its length and first, middle and last sample, each read twice with the draws of epoch 0."""
    length = len(dataset)
    found: dict[str, list[str]] = {}
    wanted = sorted({0, length // 2, length - 1}) if length else []
    for index in wanted:
        with suppress(*CODE_ERRORS):
            request = PlacedList([index], BatchPlace(seed, 0, 0, TakenShare((1,), 0)))
            found[str(index)] = [sample_digest(dataset.__getitems__(request)[0]) for _ in range(2)]
    return SomeSamples(length=length, samples=found, is_whole=len(found) == len(wanted))
