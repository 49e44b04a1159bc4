"""The programs of one loss, each captured and compared with eager once, by one rank for all."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from meshloom.comm.group import Group
from meshloom.comm.objects import collect, share, share_bytes
from meshloom.comm.steps import Steps
from meshloom.core.errors import CaptureError, MeshloomError
from meshloom.core.job import Job
from meshloom.core.units import plural
from meshloom.program.ir.batch_values import fits, refused_value
from meshloom.program.ir.leaves import leaves_of
from meshloom.program.ir.lines import WAY_OUT, describe_line, line_of_error
from meshloom.program.ir.program import Program
from meshloom.program.ir.transfer import pack, unpack
from meshloom.program.sizes.any_size import AnySize, Proofs
from meshloom.program.store.checked_capture import CheckedCapture
from meshloom.program.store.program_key import shapes_of
from meshloom.program.store.stored import Stored
from meshloom.telemetry.timings import Timings

T = TypeVar("T")
# training, and each tensor's name, shape and dtype
Key = tuple[bool, tuple[tuple[str, tuple[int, ...], str], ...]]
MOST = 16  # programs for batches of the same shapes, which differ in what else they hold
MOST_SHAPES = 64  # of batches, in one mode, for each of which the loss is captured


class CapturedLoss:
    """Programs by (training or evaluation, shapes of the batch), and by what else the batch holds where a
    loss looks at it."""

    def __init__(
        self,
        job: Job,
        *,
        dtype: torch.dtype | None = None,
        timings: Timings | None = None,
        stored: Stored | None = None,
    ) -> None:
        self._timings = timings or Timings()
        self._checked = CheckedCapture(job, dtype=dtype, timings=self._timings, stored=stored)
        self._known: dict[Key, list[Program]] = {}
        self._proofs = {training: Proofs(job) for training in (True, False)}
        self.num_captured = 0  # programs that were captured, here or on rank 0

    def get(self, batch: Any, *, training: bool = True) -> Program | None:
        """The program for batches like `batch`, if it was captured."""
        values = leaves_of(batch).values
        return next(
            (each for each in self._known.get(_key(batch, training), ()) if fits(each.others, values)), None
        )

    def capture(
        self, batches: Sequence[Any], *, training: bool = True, model: nn.Module | None = None
    ) -> Program:
        """The program for these batches, which have equal shapes: captured from the first two, compared with
        eager on the last two.

        With four batches the comparison is on ones that the program was not captured from.
        model: the job's, as it was built, in this precision and mode, if there is one; it is left unchanged.
            Otherwise one is built for the capture, unless a program was captured for other sizes and this one
            differs from it in sizes only: that takes shapes alone.
        """
        _check_two(batches)
        program = self.get(batches[0], training=training)
        if program is None:
            key = _key(batches[0], training)
            _check_number([each.others for each in self._known.get(key, ())], batches[0])
            self._check_shapes(batches[0], training)
            known = next(iter(self._captured(training)), None)
            program = self._checked.program(batches, known, training=training, model=model)
            self.num_captured += 1
            self._known.setdefault(key, []).append(program)
        return program

    def capture_any(
        self, choices: Sequence[Sequence[Any]], *, training: bool = True, model: nn.Module | None = None
    ) -> Program:
        """As `capture`, with the first of these batches that the loss can compute: what made-up ones do to its
        own code is no fault of the job's."""
        for batches in choices[:-1]:
            try:
                return self.capture(batches, training=training, model=model)
            except MeshloomError:
                raise
            except Exception:  # of the job's code
                continue
        return self.capture(choices[-1], training=training, model=model)

    def capture_together(
        self,
        group: Group,
        choices: Sequence[Sequence[Any]],
        *,
        training: bool = True,
        model: nn.Module | None = None,
    ) -> Steps[Program]:
        """As `capture_any`, once for all ranks: rank 0 captures and compares with eager, the others receive the
        program and compare its hash.

        All ranks call it. choices, model: on rank 0; the others may pass none. Whatever goes wrong on one
        rank is raised on all.
        """
        asked = yield from _from_rank_0(group, lambda: self._asked(choices[0], training).encode())
        key, digest = json.loads(asked)
        key = _key_from(key)
        here = next((each for each in self._known.get(key, ()) if digest and each.digest() == digest), None)
        if all((yield from collect(group, here is not None))):
            assert here is not None
            return here
        made: list[Program] = []

        def make() -> bytes:
            made.append(self.capture_any(choices, training=training, model=model))
            with self._timings.of("handing on"):
                return pack(made[0])

        packed = yield from _from_rank_0(group, make)
        with self._timings.of("handing on"):
            program, refused = _attempt(lambda: unpack(packed) if group.rank else made[0])
            outcomes = yield from collect(
                group, {"hash": program.digest() if program else "", "refused": str(refused or "")}
            )
        for rank, outcome in enumerate(outcomes):
            if outcome["refused"]:
                raise CaptureError(
                    f"Rank {rank} cannot take the program that rank 0 captured: {outcome['refused']}"
                )
            if outcome["hash"] != outcomes[0]["hash"]:
                raise CaptureError(
                    f"The program that rank 0 captured has the hash {outcomes[0]['hash']}, and what rank {rank} received has {outcome['hash']}. "
                    "Use one version of meshloom and torch on all ranks."
                )
        assert program is not None
        if here is None and group.rank:
            self._known.setdefault(key, []).append(program)
            self.num_captured += 1
        return here or program

    def of_any_size(self, batch: Any, *, training: bool = True) -> AnySize | None:
        """What was proved of programs for sizes like those of `batch`, if anything."""
        return self._proofs[training].get(leaves_of(batch))

    def prove_together(self, group: Group, batch: Any, *, training: bool = True) -> Steps[AnySize | None]:
        """Try to prove that there is one program for sizes like those of `batch`, of which nothing was
        proved. All ranks call it."""

        def capture(other: Any, known: Program) -> Program | None:
            self.num_captured += 1
            return self._checked.at_other_sizes(known, other)

        known = self._captured(training)
        proved = yield from self._proofs[training].prove_together(group, batch, known, capture)
        self.num_captured += 1 if proved and group.rank else 0
        return proved

    def _captured(self, training: bool) -> list[Program]:
        """All programs of a mode, in the order in which they were captured."""
        return [each for (mode, _), programs in self._known.items() if mode == training for each in programs]

    def told(self) -> list[str]:
        """Which readings served which sizes, for people: of each mode that was read for several."""
        found: list[str] = []
        for training, proofs in self._proofs.items():
            had = self._shapes_read(training)
            if len(had) < 2:
                continue
            for each in proofs.found:
                names: dict[str, list[str]] = {}
                for name, dim in each.dims:
                    names.setdefault(name, []).append(str(dim))
                sizes = ", ".join(
                    f"{name} ({plural('dim', len(dims))} {' and '.join(dims)})"
                    for name, dims in names.items()
                )
                found.append(f"one program serves batches of any size of {sizes}")
            if not proofs.found and proofs.why:
                name, dim, seen = _varied(had)
                found.append(
                    f"each of {len(had)} shapes took a reading, because {proofs.why}: dim {dim} of {name} has had {len(seen)} sizes, "
                    "and padding it in collate to one of them would take one reading"
                )
        return found

    def _shapes_read(self, training: bool) -> list[dict[str, tuple[int, ...]]]:
        """Of the batches that the loss was read for."""
        return [
            {name: shape for name, shape, _ in shapes} for mode, shapes in self._known if mode == training
        ]

    def _check_shapes(self, batch: Any, training: bool) -> None:
        """Refuse to read the loss for yet other shapes, naming the dim that has had most."""
        had = self._shapes_read(training)
        if len(had) < MOST_SHAPES or _key(batch, training) in self._known:
            return
        name, dim, seen = _varied(
            [*had, {name: tuple(leaf.shape) for name, leaf in leaves_of(batch).tensors.items()}]
        )
        raise CaptureError(
            f"The loss was read for batches of {MOST_SHAPES} shapes, and here is another one: dim {dim} of {name} has had {len(seen)} sizes "
            f"({', '.join(map(str, seen[:8]))}, ...). Each takes a reading, because {self._proofs[training].why or 'no one program serves them all'}. "
            f"Pad {name} in collate to one size, or to a few (multiples of 64), or write the loss so that it does not ask for its sizes. {WAY_OUT}"
        )

    def _asked(self, batches: Sequence[Any], training: bool) -> str:
        """What rank 0 wants, for the others: the key, and which of its programs if there is one already."""
        _check_two(batches)
        program = self.get(batches[0], training=training)
        return json.dumps([_key(batches[0], training), program.digest() if program else ""])


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
        refused = CaptureError(
            f"Reading the loss failed at {describe_line(line_of_error(error.__traceback__))}: {type(error).__name__}: {first}"
        )
        refused.__cause__ = error
        return None, refused


def _check_two(batches: Sequence[Any]) -> None:
    if len(batches) < 2:
        raise CaptureError(
            f"Reading a loss takes two batches of the same shapes, and there are {len(batches)}."
        )


def _check_number(known: Sequence[Mapping[str, str | None]], batch: Any) -> None:
    """Refuse to read the loss once more for another value, naming the one that has had most."""
    if len(known) < MOST:
        return
    values = leaves_of(batch).values
    had = {name: {each.get(name) for each in known} - {None} for name in values}
    name = max(had, key=lambda each: len(had[each]), default="")
    if name:
        raise refused_value(
            name,
            values[name],
            f"it has had {len(had[name])} values so far, for each of which the loss was read",
        )


def _varied(shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> tuple[str, int, list[int]]:
    """The dim of the batch's tensors that has had most sizes, and these."""
    sizes: dict[tuple[str, int], set[int]] = {}
    for each in shapes:
        for name, shape in each.items():
            for dim, size in enumerate(shape):
                sizes.setdefault((name, dim), set()).add(size)
    (name, dim), seen = max(sizes.items(), key=lambda each: len(each[1]))
    return name, dim, sorted(seen)


def _key(batch: Any, training: bool) -> Key:
    return training, shapes_of(leaves_of(batch))


def _key_from(value: list[Any]) -> Key:
    """The key that JSON made lists of."""
    training, leaves = value
    return training, tuple((name, tuple(shape), dtype) for name, shape, dtype in leaves)
