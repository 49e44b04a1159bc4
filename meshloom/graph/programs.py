"""The programs of a job, each read and compared with eager once."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from meshloom.comm.group import Group
from meshloom.comm.turns import Steps
from meshloom.comm.values import collect, share, share_bytes
from meshloom.errors import CaptureError, MeshloomError
from meshloom.graph.capture import capture, capture_module
from meshloom.graph.check import check_against_eager, check_against_module
from meshloom.graph.leaves import leaves_of
from meshloom.graph.lines import describe_line, line_of_error
from meshloom.graph.precision import default_precision
from meshloom.graph.program import Program
from meshloom.graph.transfer import pack, unpack
from meshloom.job import Job

T = TypeVar("T")
Key = tuple[bool, tuple[tuple[str, tuple[int, ...], str], ...]]  # training, and each tensor's name, shape and dtype


class Programs:
    """Programs by (training or evaluation, shapes of the batch)."""

    def __init__(self, job: Job, *, dtype: torch.dtype | None = None) -> None:
        self._job = job
        self._dtype = dtype
        self._known: dict[Key, Program] = {}
        # Models are built as the first one was: some compute numbers of their own, like rates of layers, in the default precision.
        self._default = torch.get_default_dtype()

    def get(self, batch: Any, *, training: bool = True) -> Program | None:
        """The program for batches like `batch`, if it was read before."""
        return self._known.get(_key(batch, training))

    def read(self, batches: Sequence[Any], *, training: bool = True, model: nn.Module | None = None) -> Program:
        """The program for batches like these, which are alike: read from the first two, compared with eager on the last two.

        With four batches the comparison is on ones that the program was not read from.
        model: the job's, as it was built, in this precision and mode, if one is there already; it stays as it is. Else one is built, and let go.
        """
        key = _key_of(batches, training)
        if key not in self._known:
            with default_precision(self._default):
                self._known[key] = self._read(batches, training, model)
        return self._known[key]

    def _read(self, batches: Sequence[Any], training: bool, model: nn.Module | None) -> Program:
        if model is None:
            program = capture(self._job, (batches[0], batches[1]), training=training, dtype=self._dtype)
            gc.collect()  # torch.export leaves the model in cycles, and the comparison builds another one
            check_against_eager(program, self._job, batches[-2:])
        else:
            program = capture_module(model, self._job.loss, (batches[0], batches[1]), dtype=self._dtype)
            gc.collect()
            check_against_module(program, model, self._job.loss, batches[-2:])
        return program

    def read_together(self, group: Group, batches: Sequence[Any] | None, *, training: bool = True, model: nn.Module | None = None) -> Steps[Program]:
        """As `read`, once for all ranks: rank 0 reads and compares with eager, the others receive the program and compare its hash.

        All ranks call it. batches, model: on rank 0; the others may pass None. Whatever goes wrong on one rank is raised on all.
        """
        asked = yield from _from_rank_0(group, lambda: json.dumps(_key_of(batches or (), training)).encode())
        key = _key_from(json.loads(asked))
        if all((yield from collect(group, key in self._known))):
            return self._known[key]
        packed = yield from _from_rank_0(group, lambda: pack(self.read(batches or (), training=training, model=model)))
        program, refused = _attempt(lambda: unpack(packed) if group.rank else self._known[key])
        outcomes = yield from collect(group, {"hash": program.digest() if program else "", "refused": str(refused or "")})
        for rank, outcome in enumerate(outcomes):
            if outcome["refused"]:
                raise CaptureError(f"Rank {rank} cannot take the program that rank 0 read: {outcome['refused']}")
            if outcome["hash"] != outcomes[0]["hash"]:
                raise CaptureError(
                    f"The program that rank 0 read has the hash {outcomes[0]['hash']}, and what rank {rank} received has {outcome['hash']}. "
                    "Use one version of meshloom and torch on all ranks."
                )
        assert program is not None
        return self._known.setdefault(key, program)


def _from_rank_0(group: Group, make: Callable[[], bytes]) -> Steps[bytes]:
    """What `make` gives on rank 0, on every rank; or its error, on every rank."""
    made, refused = _attempt(make) if group.rank == 0 else (b"", None)
    error: str | None = yield from share(group, str(refused) if refused else None)
    if error is not None:
        raise refused or CaptureError(error)
    return (yield from share_bytes(group, made or b""))


def _attempt(make: Callable[[], T]) -> tuple[T | None, MeshloomError | None]:
    try:
        return make(), None
    except MeshloomError as error:
        return None, error
    except Exception as error:  # the job's own code: the other ranks would wait for ever
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        refused = CaptureError(f"Reading the loss failed at {describe_line(line_of_error(error.__traceback__))}: {type(error).__name__}: {first}")
        refused.__cause__ = error
        return None, refused


def _key_of(batches: Sequence[Any], training: bool) -> Key:
    if len(batches) < 2:
        raise CaptureError(f"Reading a loss takes two batches of the same shapes, and there are {len(batches)}.")
    return _key(batches[0], training)


def _key(batch: Any, training: bool) -> Key:
    return training, tuple((name, tuple(leaf.shape), str(leaf.dtype)) for name, leaf in leaves_of(batch).tensors.items())


def _key_from(value: list[Any]) -> Key:
    """The key that JSON made lists of."""
    training, leaves = value
    return training, tuple((name, tuple(shape), dtype) for name, shape, dtype in leaves)
