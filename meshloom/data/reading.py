"""Runs the job's dataset and `collate` with defined seeds.

Each sample and each `collate` has its own seed of the CPU generators of torch, `random` and numpy. An
exception becomes a `ReadFailure` where it is raised, since one that crosses processes loses its traceback.
"""

from __future__ import annotations

import pickle
import sysconfig
import traceback
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, default_collate, get_worker_info

from meshloom.core.errors import DataError
from meshloom.core.job import Job
from meshloom.core.modules.packages import is_of_package
from meshloom.core.random import derive, draws_of, seed_draws


@dataclass(frozen=True)
class ReadFailure:
    """A failure of the job's own code: one sentence, and its traceback."""

    sentence: str
    traceback: str = ""
    error: Exception | None = field(default=None, compare=False)  # only in the process where it happened

    @staticmethod
    def of(what: str, error: Exception) -> ReadFailure:
        """The failure of `what`, which names the sample or the chunk; adds the user's source line."""
        frames = traceback.extract_tb(error.__traceback__)
        users = [
            each
            for each in frames
            if not (each.filename.startswith(_NOT_USERS) or is_of_package(each.filename))
        ]
        frame = (users or frames)[-1]
        text = "".join(traceback.format_exception(error))
        reason = " ".join(str(error).split())
        sentence = f"{what} failed at {frame.filename}:{frame.lineno} in {frame.name}: {type(error).__name__}: {reason}"
        return ReadFailure(sentence, text, error if get_worker_info() is None else None)

    def to_error(self) -> DataError:
        """A `DataError` caused by the user's exception, or by the text of a worker's traceback."""
        error = DataError(self.sentence)
        error.__cause__ = self.error or (WorkerError(f"\n{self.traceback}") if self.traceback else None)
        return error


class WorkerError(Exception):
    """The traceback of an exception in a worker process, as text."""


_NOT_USERS = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")),
    str(Path(__file__).parents[1]),
    "<",
)


class Collation:
    """The job's `collate` under a seed of each chunk, with described failures."""

    def __init__(self, job: Job) -> None:
        self._collate: Callable[[list[Any]], Any] = job.collate or default_collate
        self._seed = job.seed
        self._unsent = job.num_workers > 0  # nothing was seen to be picklable yet

    def __call__(self, samples: list[Any], step: int, index: int, names: Iterable[object]) -> Any:
        """The batch of `samples` for chunk `index` of `step`, or a `ReadFailure` that has their `names`."""
        try:
            seed_draws(derive(self._seed, "collate", step, index))
            data = self._collate(samples)
            if self._unsent and get_worker_info() is not None:
                # once for each worker process: its parent would wait for ever for what cannot be pickled
                pickle.dumps(data)
                self._unsent = False
        except Exception as error:
            what = f"Collating chunk {index} of step {step} (samples {', '.join(map(str, names))})"
            return ReadFailure.of(what, error)
        return data


def read_here(source: Dataset[Any], requests: Iterable[Any] | None) -> Generator[Any, None, None]:
    """`source[request]` of each request in order (all items of an iterable `source`), read in this process. The caller's generators are restored.
    Raises the `DataError` of a `ReadFailure`."""
    items = iter(source) if requests is None else map(source.__getitem__, requests)  # pyright: ignore[reportArgumentType]
    while True:
        with draws_of(0):
            item = next(items, _END)
        if item is _END:
            return
        if isinstance(item, ReadFailure):
            raise item.to_error()
        yield item


_END = object()
