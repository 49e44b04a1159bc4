"""The programs of a job, each read and compared with eager once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from meshloom.errors import CaptureError
from meshloom.graph.capture import capture
from meshloom.graph.check import check_against_eager
from meshloom.graph.leaves import leaves_of
from meshloom.graph.program import Program
from meshloom.job import Job

Key = tuple[bool, tuple[tuple[str, tuple[int, ...], torch.dtype], ...]]


class Programs:
    """Programs by (training or evaluation, shapes of the batch)."""

    def __init__(self, job: Job, *, dtype: torch.dtype | None = None) -> None:
        self._job = job
        self._dtype = dtype
        self._known: dict[Key, Program] = {}

    def get(self, batch: Any, *, training: bool = True) -> Program | None:
        """The program for batches like `batch`, if it was read before."""
        return self._known.get(_key(batch, training))

    def read(self, batches: Sequence[Any], *, training: bool = True) -> Program:
        """The program for batches like these, which are alike: read from the first two, compared with eager on the last two.

        With four batches the comparison is on ones that the program was not read from.
        """
        if len(batches) < 2:
            raise CaptureError(f"Reading a loss takes two batches of the same shapes, and there are {len(batches)}.")
        key = _key(batches[0], training)
        if key not in self._known:
            program = capture(self._job, (batches[0], batches[1]), training=training, dtype=self._dtype)
            check_against_eager(program, self._job, batches[-2:])
            self._known[key] = program
        return self._known[key]


def _key(batch: Any, training: bool) -> Key:
    return training, tuple((name, tuple(leaf.shape), leaf.dtype) for name, leaf in leaves_of(batch).tensors.items())
