"""The data of a job, as the chunks that one replica runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from meshloom.comm.group import Group
from meshloom.comm.objects import agree
from meshloom.comm.steps import Steps
from meshloom.core.errors import DataError, JobError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.random import derive, preserved_draws
from meshloom.data.chunks import Chunk, Reader
from meshloom.data.map_data import MapReader, map_chunks
from meshloom.data.reading import seed_draws
from meshloom.data.shares import Shares
from meshloom.data.stream_data import StreamReader
from meshloom.data.to_device import to_device

__all__ = ["Chunk", "Reader", "build_dataset", "evaluation_chunks", "open_reader", "to_device"]


def open_reader(
    job: Job, plan: Plan, group: Group, start_step: int, stop_step: int, shares: Shares | None = None
) -> Steps[Reader]:
    """Build the job's data and read it from `start_step` up to `stop_step`; replica = `group.rank`, of
    `plan.dp` in `group`.

    shares: of the run, if they may change; the process asks for those of a step when it begins to read it.
    Raises `DataError` when the ranks built different
    data or there is none, `JobError` for what is no dataset, `PlanError` when a batch cannot be run under
    `plan`.
    """
    dataset = build_dataset(job.data, job.seed)
    stream = is_stream(dataset, "Job(data=...)")
    num_samples = None if stream else len(dataset)
    yield from agree(
        group,
        {
            "the kind of dataset": "iterable" if stream else "map-style",
            "the number of samples in the dataset": num_samples,
        },
        "Job(data=...) must build the same dataset on every rank.",
        DataError,
    )
    shares = shares or Shares(plan)
    if num_samples is None:
        return StreamReader(dataset, job, plan, shares, group, start_step, stop_step)
    return MapReader(dataset, num_samples, job, plan, shares, group.rank, start_step, stop_step)


def build_dataset(build: Callable[[], Any], seed: int) -> Any:
    """What `build` returns; whatever it draws while it builds is decided by `seed`, so that all ranks build
    the same."""
    with preserved_draws():
        seed_draws(derive(seed, "data"))
        return build()


def evaluation_chunks(
    dataset: Any,
    job: Job,
    plan: Plan,
    group: Group,
    shares: Sequence[int] = (),
    num_batches: int | None = None,
) -> Iterator[Chunk]:
    """This replica's part of `dataset` in order, once: batches of `job.batch_size` cut as in training, empty
    chunks left out.

    shares: as of `Plan.sizes`. num_batches: only so many of them, the first ones.
    `step` of a chunk is the number of its batch. Draws made while reading are the same in every evaluation.
    Replicas may get
    different numbers of chunks; none of them waits for another. Raises as `open_reader` does, before the
    first chunk.
    """
    if is_stream(dataset, "Evaluate(data=...)"):
        raise JobError(
            f"Evaluate(data=...) built an iterable {type(dataset).__name__}. Evaluation needs a map-style dataset: __len__ and __getitem__."
        )
    if not len(dataset):
        raise DataError("The evaluation dataset is empty. Evaluate(data=...) must build one with samples.")
    return map_chunks(dataset, job, plan, group.rank, shares, num_batches)


def is_stream(dataset: Any, where: str) -> bool:
    """Whether `dataset` is iterable rather than map-style."""
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise JobError(
            f"{where} built a DataLoader. Return its dataset, and give batch_size, collate and num_workers to Job."
        )
    if isinstance(dataset, IterableDataset) or (
        hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    ):
        return True
    if not hasattr(dataset, "__getitem__"):
        raise JobError(
            f"{where} built {kind}, which is no dataset. It needs __len__ and __getitem__ (map-style) or __iter__ (iterable)."
        )
    if not hasattr(dataset, "__len__"):
        raise JobError(
            f"{where} built {kind}, which has __getitem__ but no __len__. A map-style dataset needs both."
        )
    return False
