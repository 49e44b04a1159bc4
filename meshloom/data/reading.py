"""Runs the job's dataset and `collate`, here or in worker processes, with defined seeds.

Each sample and each `collate` has its own seed of the CPU generators of torch, `random` and numpy. An
exception becomes a `ReadFailure` where it is raised, since one that crosses processes loses its traceback.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import select
import signal
import sysconfig
import threading
import traceback
from collections.abc import Callable, Generator, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from meshloom.core.errors import DataError
from meshloom.core.job import Job
from meshloom.core.modules.packages import is_of_package
from meshloom.core.modules.sample_copies import copied_samples
from meshloom.core.random import derive, mix_seed, preserved_draws


def seed_draws(value: int) -> None:
    """Seed the CPU generators. Takes 10 us; `torch.manual_seed` visits every kind of device in 200 us."""
    torch.default_generator.manual_seed(value)
    random.seed(value)
    numpy.random.seed(value % 2**32)


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
    """The job's `collate` under a seed of each chunk, and its `mix` under one of each batch, with described failures."""

    def __init__(self, job: Job) -> None:
        self._collate: Callable[[list[Any]], Any] = job.collate or default_collate
        self._mix, self._may_change = job.mix, job.collate is not None
        self._seed = job.seed
        self._sendable = False

    def __call__(
        self,
        samples: list[Any],
        step: int,
        index: int,
        names: Iterable[object],
        partners: list[Any] | None = None,
    ) -> Any:
        """The batch of `samples` for chunk `index` of `step`, or a `ReadFailure` that has their `names`. partners: what each is
        mixed with; None: nothing is."""
        what = f"Collating chunk {index} of step {step} (samples {', '.join(map(str, names))})"
        try:
            if partners is not None and self._may_change:
                partners = copied_samples(partners)  # a sample may be another's partner, too
            data = self._collated(samples, step, index)
            if self._mix is not None and partners is not None:
                others = self._collated(partners, step, index)
                what = what.replace("Collating", "Mixing", 1)
                seed_draws(mix_seed(self._seed, step))
                data = self._mix(data, others)
            if get_worker_info() is not None and not self._sendable:
                # once per worker: the parent would wait forever for what cannot be pickled
                pickle.dumps(data)
                self._sendable = True
        except Exception as error:
            return ReadFailure.of(what, error)
        return data

    def _collated(self, samples: list[Any], step: int, index: int) -> Any:
        seed_draws(derive(self._seed, "collate", step, index))
        return self._collate(samples)


# Of torch's loader whose processes have ended; the last two where one was killed as it handed a batch over.
_BROKEN = (RuntimeError, OSError, EOFError)


def read_ahead(
    source: Dataset[Any], num_workers: int, requests: Iterable[Any] | None = None
) -> Generator[Any, None, None]:
    """`source[request]` of each request in order (all items of an iterable `source`).

    num_workers: forked processes that read, which end when the iterator is closed; 0: read here. The caller's
    generators are restored. Raises the `DataError` of a `ReadFailure`.
    """
    loader: DataLoader[Any] = DataLoader(
        source,
        batch_size=None,  # a request is a full chunk
        sampler=requests,
        num_workers=num_workers,
        collate_fn=_unchanged,
        generator=torch.Generator(),  # or the loader would draw from the caller's
        # nothing of a job is pickled
        multiprocessing_context=multiprocessing.get_context("fork") if num_workers else None,
        worker_init_fn=partial(_end_with, os.getpid()),
    )
    # Nothing below may keep a reference to the loader's iterator, not even an exception's traceback: its
    # processes end with it.
    iterator = _without_handler(loader)
    try:
        while True:
            broken = ""
            with nullcontext() if num_workers else preserved_draws():
                try:
                    item = next(iterator)
                except StopIteration:
                    return
                except _BROKEN as error:
                    broken, item = str(error) or repr(error), None
            if broken:
                raise DataError(
                    f"The processes that read data failed: {_how_ended(iterator) or broken} Continue from a checkpoint with --resume; fewer workers need less memory, "
                    "and Job(num_workers=0) reads in the rank's own process."
                )
            if isinstance(item, ReadFailure):
                raise item.to_error()
            yield item
    finally:
        del iterator


def _without_handler(loader: DataLoader[Any]) -> Any:
    """The loader's iterator, without torch's signal handler. That one raises the error of a worker that ends
    wherever the main thread is, even in a destructor; here it is raised where data is read."""
    before = signal.getsignal(signal.SIGCHLD)
    iterator = iter(loader)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGCHLD) != before:
        signal.signal(signal.SIGCHLD, before)
    return iterator


def _how_ended(iterator: Any) -> str:
    """A clause about a process of the loader that was killed; "" if none was."""
    for worker in getattr(iterator, "_workers", ()):
        if worker.exitcode is not None and worker.exitcode < 0:
            killer = signal.Signals(-worker.exitcode)
            hint = " (the system does that when memory runs out)" if killer == signal.SIGKILL else ""
            return f"process {worker.pid} was killed by {killer.name}{hint}."
    return ""


def _end_with(parent: int, _worker: int) -> None:
    """End this process as soon as `parent` ends, even by kill -9: it holds copies of the parent's
    connections, which peers watch.

    A parent-death signal would not do: it is sent at the end of the parent's *thread*.
    """
    if not hasattr(os, "pidfd_open"):
        return  # torch's own watchdog sees it within seconds
    descriptor = os.pidfd_open(parent)

    def watch() -> None:
        select.select([descriptor], [], [])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _unchanged(item: Any) -> Any:
    return item
