"""What autograd keeps for backward while a step runs, and what the process holds at most, as the number of
microbatches grows.

All ranks of the benchmark GPT run in this process (`devices="simulated"`); a microbatch is one sample.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from gpt import loss, make_data, make_model, make_optimizer
from listening import listen
from torch import Tensor

import meshloom as ml
from meshloom.pipeline.schedules.schedule import Action


def kept_bytes(names: Sequence[str], microbatches: Sequence[int], num_ranks: int) -> list[dict[str, Any]]:
    """A record per schedule and number of microbatches.

    kept: [rank], most bytes at a time of tensors that autograd keeps, parameters left out. peak_rss: most
    that the process held in a step above what it held before it.
    """
    records: list[dict[str, Any]] = []
    for name in names:
        for number in microbatches:
            data = lambda number=number: make_data(2 * number)  # noqa: E731
            job = ml.Job(
                model=make_model,
                loss=loss,
                optimizer=make_optimizer,
                data=data,
                batch_size=number,
                steps=2,
                shuffle=False,
            )
            with ml.Trainer(
                job, f"pp={num_ranks},microbatches={number},schedule={name}", devices="simulated", cache="off"
            ) as trainer:
                batches = trainer.batches()
                trainer.step(next(batches))
                watches = [Kept(replica.model.parameters()) for replica in trainer.replicas]
                for replica, watch in zip(trainer.replicas, watches, strict=True):
                    listen(replica, watch)
                batch = next(batches)
                before = _forget_peak()
                trainer.step(batch)
                peak = _status("VmHWM") - before
                batches.close()
            record: dict[str, Any] = {
                "system": "meshloom",
                "mode": "alive",
                "schedule": name,
                "ranks": num_ranks,
                "microbatches": number,
            }
            records.append(record | {"kept": [watch.most for watch in watches], "peak_rss": peak})
    return records


class Kept:
    """Counts what a rank's forwards save for backward until it is let go. most: bytes of distinct memory at a
    time."""

    def __init__(self, parameters: Any) -> None:
        self.most = 0
        self._own = {each.untyped_storage().data_ptr() for each in parameters}
        self._held: Counter[int] = Counter()  # memory -> how often it is saved
        self._now = 0
        self._lock = threading.Lock()
        self._hooks: AbstractContextManager[Any] | None = None

    def began(self, action: Action) -> None:
        """From now on, what is saved is counted."""
        if action.kind == "F":
            self._hooks = torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: _Saved(self, tensor), lambda saved: saved.tensor
            )
            self._hooks.__enter__()

    def ended(self, action: Action) -> None:
        """No longer."""
        if self._hooks:
            self._hooks.__exit__(None, None, None)
            self._hooks = None

    def add(self, memory: int, num_bytes: int, times: int) -> None:
        """Memory is saved once more (1) or once less (-1)."""
        if memory in self._own:
            return
        with self._lock:
            was = self._held[memory] > 0
            self._held[memory] += times
            self._now += num_bytes * ((self._held[memory] > 0) - was)
            self.most = max(self.most, self._now)


class _Saved:
    def __init__(self, kept: Kept, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        storage = tensor.untyped_storage()
        self._memory = storage.data_ptr(), storage.nbytes()
        self._kept = kept
        kept.add(*self._memory, 1)

    def __del__(self) -> None:
        self._kept.add(*self._memory, -1)


def _forget_peak() -> int:
    """Give free memory back to the system and let its count of the most begin anew; bytes that are held
    now."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024
