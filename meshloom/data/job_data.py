"""The data of a job: built, checked, and opened as the chunks of one replica."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from meshloom.comm.group import Group
from meshloom.comm.objects import agree
from meshloom.core.errors import DataError, JobError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.random import derive, preserved_draws, seed_draws
from meshloom.data.chunks import Chunk, Reader
from meshloom.data.map_data import MapReader, map_chunks
from meshloom.data.shares import Shares
from meshloom.data.stream_data import StreamReader


def open_reader(
    job: Job, plan: Plan, group: Group, start_step: int, stop_step: int, shares: Shares | None = None
) -> Reader:
    """Build the job's data; a reader of it from `start_step` up to `stop_step`.

    group: the ranks along dp; `group.rank` is the replica. shares: of the run, if they may change; those of a
    step are looked up when its reading begins. Raises `DataError` if ranks built different data or none,
    `JobError` for what is not a dataset, `PlanError` for a batch that cannot be run under `plan`.
    """
    dataset = build_dataset(job.data, job.seed)
    iterable = is_iterable(dataset, "Job(data=...)")
    num_samples = None if iterable else len(dataset)
    built = {
        "the kind of dataset": "iterable" if iterable else "map-style",
        "the number of samples in the dataset": num_samples,
    }
    agree(group, built, "Job(data=...) must build the same dataset on every rank.", DataError)
    shares = shares or Shares(plan)
    if num_samples is None:
        return StreamReader(dataset, job, plan, shares, group, start_step, stop_step)
    return MapReader(dataset, num_samples, job, plan, shares, group.rank, start_step, stop_step)


def build_dataset(build: Callable[[], Any], seed: int) -> Any:
    """The result of `build`, with generators seeded by `seed`, so that all ranks build the same."""
    with preserved_draws():
        seed_draws(derive(seed, "data"))
        return build()


def evaluation_chunks(
    dataset: Any, job: Job, plan: Plan, group: Group, shares: Sequence[int] = (),
    num_batches: int | None = None,
) -> Iterator[Chunk]:  # fmt: skip
    """This replica's nonempty chunks of one pass over `dataset`, in batches that are split as in training.

    shares: as of `Plan.sizes`. num_batches: number of batches; None: all. The `step` of a chunk is the number
    of its batch. Draws during reading are the same in every evaluation. Replicas may get different numbers of
    chunks; none waits for another. Raises as `open_reader` does, before the first chunk.
    """
    if is_iterable(dataset, "Evaluate(data=...)"):
        raise JobError(
            f"Evaluate(data=...) built an iterable {type(dataset).__name__}. Evaluation needs a map-style dataset: __len__ and __getitem__."
        )
    if not len(dataset):
        raise DataError("The evaluation dataset is empty. Evaluate(data=...) must build one with samples.")
    return map_chunks(dataset, job, plan, group.rank, shares, num_batches)


def is_iterable(dataset: Any, where: str) -> bool:
    """Whether `dataset` is iterable rather than map-style."""
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise JobError(
            f"{where} built a DataLoader. Return its dataset, and give batch_size, collate and num_workers to Job."
        )
    has_items = hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and not has_items):
        return True
    if not has_items:
        raise JobError(
            f"{where} built {kind}, which is not a dataset. It needs __len__ and __getitem__ (map-style) or __iter__ (iterable)."
        )
    if not hasattr(dataset, "__len__"):
        raise JobError(
            f"{where} built {kind}, which has __getitem__ but no __len__. A map-style dataset needs both."
        )
    return False
