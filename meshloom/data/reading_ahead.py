"""Reads a job's data ahead, in worker processes; without any in the rank's own, as it is asked for."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import threading
from collections.abc import Generator, Iterable
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from meshloom.core.errors import DataError
from meshloom.data.reading import ReadFailure, read_here

# Of torch's loader whose processes have ended; the last two where one was killed as it handed a batch over.
_BROKEN = (RuntimeError, OSError, EOFError)


def read_ahead(
    source: Dataset[Any], num_workers: int, requests: Iterable[Any] | None = None
) -> Generator[Any, None, None]:
    """`source[request]` of each request in order (all items of an iterable `source`).

    num_workers: forked processes that read, which end when the iterator is closed; 0: read here. The caller's
    generators are restored. Raises the `DataError` of a `ReadFailure`.
    """
    return _from_processes(source, num_workers, requests) if num_workers else read_here(source, requests)


def _from_processes(
    source: Dataset[Any], num_workers: int, requests: Iterable[Any] | None
) -> Generator[Any, None, None]:
    loader: DataLoader[Any] = DataLoader(
        source,
        batch_size=None,  # a request is a full chunk
        sampler=requests,
        num_workers=num_workers,
        collate_fn=_unchanged,
        generator=torch.Generator(),  # or the loader would draw from the caller's
        # nothing of a job is pickled
        multiprocessing_context=multiprocessing.get_context("fork"),
        worker_init_fn=partial(_end_with, os.getpid()),
    )
    # Nothing below may keep a reference to the loader's iterator, not even an exception's traceback: its
    # processes end with it.
    iterator = _without_handler(loader)
    try:
        while True:
            broken = ""
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
    descriptor = os.pidfd_open(parent)

    def watch() -> None:
        select.select([descriptor], [], [])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _unchanged(item: Any) -> Any:
    return item
