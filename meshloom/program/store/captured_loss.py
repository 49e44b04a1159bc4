"""The programs of one loss function, each captured and compared with eager once, on rank 0 for all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.comm.group import Group
from meshloom.comm.objects import collect, share, share_bytes
from meshloom.core.errors import CaptureError, MeshloomError
from meshloom.core.job import Job
from meshloom.program.capture.attempted import CodeFailedError, attempted
from meshloom.program.ir.batch_values import fits, refused_value
from meshloom.program.ir.leaves import Leaves, leaves_of
from meshloom.program.ir.lines import WAY_OUT
from meshloom.program.ir.program import Program
from meshloom.program.ir.transfer import pack, unpack
from meshloom.program.sizes.alike import alike
from meshloom.program.sizes.any_size import (
    AnySize,
    fitted,
    further_batch,
    is_like,
    sizes_of,
    sizes_of_program,
)
from meshloom.program.sizes.symbolic import Dim, Trace, trace
from meshloom.program.store.checked_capture import CheckedCapture
from meshloom.program.store.program_cache import ProgramCache
from meshloom.telemetry.timings import Timings

# training, and each tensor's name, shape and dtype
Key = tuple[bool, tuple[tuple[str, tuple[int, ...], str], ...]]
MAX_VALUES = 16  # programs for batches of equal shapes that differ in other values
MAX_SHAPES = 64  # of batches for which the loss is captured, in each mode
MAX_TRIES = 4  # to find one program for all sizes, in each mode
ANOTHER = "it is another program at other sizes"


class CapturedLoss:
    """Captured programs by mode (training or evaluation) and shapes of the batch, and by the batch's other
    values where the loss depends on them."""

    def __init__(
        self,
        job: Job,
        *,
        dtype: torch.dtype | None = None,
        timings: Timings | None = None,
        stored: ProgramCache | None = None,
    ) -> None:
        self._timings = timings or Timings()
        self._checked = CheckedCapture(job, dtype=dtype, timings=self._timings, stored=stored)
        self._known: dict[Key, list[Program]] = {}
        self._job = job
        # by mode: programs of any size, and why there are no more of them
        self._any_size: dict[bool, list[AnySize]] = {True: [], False: []}
        self._refused: dict[bool, list[str]] = {True: [], False: []}
        self.num_captured = 0  # programs that were captured, here or on rank 0

    def get(self, batch: Any, *, training: bool = True) -> Program | None:
        """The program for batches like `batch`, if there is one."""
        values, known = leaves_of(batch).values, self._known.get(_key(batch, training), ())
        return next((each for each in known if fits(each.others, values)), None)

    def capture(
        self, batches: Sequence[Any], *, training: bool = True, model: nn.Module | None = None
    ) -> Program:
        """The program for batches of these equal shapes: captured from the first, compared on the last two.

        With three batches, the comparison uses batches that the program was not captured from.

        model: the job's freshly built model in this precision and mode, if any; it is left unchanged.
            Otherwise one is built for the capture, unless a program was captured for other sizes and this one
            differs from it in sizes only, which needs shapes alone.
        """
        _check_num_batches(batches)
        program = self.get(batches[0], training=training)
        if program is None:
            key = _key(batches[0], training)
            _check_num_values([each.others for each in self._known.get(key, ())], batches[0])
            self._check_shapes(batches[0], training)
            known = next(iter(self._captured(training)), None)
            program = self._checked.program(batches, known, training=training, model=model)
            self.num_captured += 1
            self._known.setdefault(key, []).append(program)
        return program

    def capture_any(
        self, choices: Sequence[Sequence[Any]], *, training: bool = True, model: nn.Module | None = None
    ) -> Program:
        """As `capture`, with the first of these choices of batches that the loss accepts: failing on
        synthetic batches is no error of the job."""
        for batches in choices[:-1]:
            found, refused = attempted(
                lambda batches=batches: self.capture(batches, training=training, model=model)
            )
            if found is not None:
                return found
            if refused is not None and not isinstance(refused, CodeFailedError):
                raise refused
        return self.capture(choices[-1], training=training, model=model)

    def capture_together(
        self,
        group: Group,
        choices: Sequence[Sequence[Any]],
        *,
        training: bool = True,
        model: nn.Module | None = None,
    ) -> Program:
        """As `capture_any`, on all ranks: rank 0 captures and compares, the others receive and verify the
        hash.

        Collective. choices, model: on rank 0; others may pass none. An error on one rank is raised on all.
        """
        request = _broadcast_from_rank_0(group, lambda: self._request(choices[0], training))
        (mode, shapes), digest = json.loads(request)
        key = mode, tuple((name, tuple(shape), dtype) for name, shape, dtype in shapes)
        local = next((each for each in self._known.get(key, ()) if digest and each.digest() == digest), None)
        if all(collect(group, local is not None)):
            assert local is not None
            return local

        def capture() -> Program:
            return self.capture_any(choices, training=training, model=model)

        return self._handed_on(group, key, capture)

    def _handed_on(self, group: Group, key: Key, capture: Callable[[], Program]) -> Program:
        """The program that rank 0 captures, on all ranks. Collective."""
        captured: list[Program] = []

        def make() -> bytes:
            captured.append(capture())
            with self._timings.of("handing on"):
                return pack(captured[0])

        packed = _broadcast_from_rank_0(group, make)
        with self._timings.of("handing on"):
            program, refused = attempted(lambda: unpack(packed) if group.rank else captured[0])
            outcome = {"hash": program.digest() if program else "", "refused": str(refused or "")}
            outcomes = collect(group, outcome)
        for rank, outcome in enumerate(outcomes):
            if outcome["refused"]:
                raise CaptureError(
                    f"Rank {rank} cannot use the program that rank 0 captured: {outcome['refused']}"
                )
            if outcome["hash"] != outcomes[0]["hash"]:
                raise CaptureError(
                    f"The program that rank 0 captured has the hash {outcomes[0]['hash']}, and what rank {rank} received has {outcome['hash']}. "
                    "Use one version of meshloom and torch on all ranks."
                )
        assert program is not None
        known = self._known.setdefault(key, [])
        local = next((each for each in known if each.digest() == program.digest()), None)
        if local is None:
            known.append(program)
            self.num_captured += 1
        return local or program

    def at_any_size(self, group: Group, batch: Any, *, training: bool = True) -> Program | None:
        """The program for batches like `batch`, computed from those for other sizes, if possible. Collective."""
        if self.get(batch, training=training) is not None:
            return None  # captured itself
        leaves = leaves_of(batch)
        program = self.made_of(leaves, training=training)
        family = [each for each in self._captured(training) if is_like(each, leaves)]
        if program is None and len(family) > 1 and len(self._refused[training]) < MAX_TRIES:
            try:
                if family[0].opaque:
                    raise CaptureError("what a leaf returns is recorded at each shape")
                programs = self._fitted(group, leaves, family)
                program = programs.program(leaves)
                if program is None:
                    raise CaptureError("its sizes cannot be told apart")
                self._any_size[training].append(programs)
            except MeshloomError as error:
                self._refused[training].append(str(error)[:240])
        return program

    def made_of(self, leaves: Leaves, *, training: bool) -> Program | None:
        """The program for batches like this one, by what is known of other sizes: the same on all ranks."""
        found = (each.program(leaves) for each in self._any_size[training])
        return next((each for each in found if each is not None), None)

    def _fitted(self, group: Group, leaves: Leaves, family: Sequence[Program]) -> AnySize:
        """Programs for all sizes at which the loss makes the same calls as for this batch. family: captured programs, in
        order, the same on all ranks."""

        def traced() -> bytes:
            return json.dumps(asdict(trace(self._job, family[0], leaves))).encode()

        parts = json.loads(_broadcast_from_rank_0(group, traced))
        found = Trace(**{name: tuple(each) for name, each in parts.items()})
        asked = [found.broken(sizes_of_program(each)) for each in family]
        points = [each for each, line in zip(family, asked, strict=True) if line is None]
        points = [each for each in points if alike(each, points[0])]
        if len(points) < 2:
            lines = [
                f"it asks for sizes at {found.lines[each].strip('()')}" for each in asked if each is not None
            ]
            raise CaptureError(lines[-1] if lines else ANOTHER)
        batch = further_batch(found, points, leaves)

        def capture() -> Program:
            program = self._checked.at_other_sizes(points[0], batch)
            if program is None:
                raise CaptureError(ANOTHER)
            return program

        key = _key(batch, points[0].training)
        points.append(self._handed_on(group, key, capture))
        return fitted(found, points)

    def _captured(self, training: bool) -> list[Program]:
        """All programs of a mode, in the order of their capture."""
        return [each for (mode, _), programs in self._known.items() if mode == training for each in programs]

    @property
    def programs(self) -> list[Program]:
        """All of them, in the order of their capture."""
        return [each for known in self._known.values() for each in known]

    @property
    def opaque(self) -> Mapping[str, str]:
        """Modules that its programs run as they are, and why."""
        return {path: why for program in self.programs for path, why in program.opaque.items()}

    def size_notes(self) -> list[str]:
        """For users: which captures served which sizes, in each mode that saw batches of several shapes."""
        found: list[str] = []
        for training, programs in self._any_size.items():
            captured = self._captured_shapes(training)
            if len(captured) < 2:
                continue
            if programs:
                found.append("one program serves batches of any size")
            elif self._refused[training]:
                name, dim, seen = _most_varied(captured)
                found.append(
                    f"each of {len(captured)} shapes needed its own capture, because {self._refused[training][-1]}: dim {dim} of {name} has had {len(seen)} sizes, "
                    "and padding it in collate to one size would need one capture"
                )
        return found

    def _captured_shapes(self, training: bool) -> list[dict[str, tuple[int, ...]]]:
        """The shapes of the batches that the loss was captured for."""
        return [
            {name: shape for name, shape, _ in shapes} for mode, shapes in self._known if mode == training
        ]

    def _check_shapes(self, batch: Any, training: bool) -> None:
        """Refuse to capture the loss for too many shapes, naming the dim that had the most sizes."""
        captured = self._captured_shapes(training)
        if len(captured) < MAX_SHAPES or _key(batch, training) in self._known:
            return
        own = {name: tuple(leaf.shape) for name, leaf in leaves_of(batch).tensors.items()}
        name, dim, seen = _most_varied([*captured, own])
        why = (self._refused[training] or ["no one program serves them all"])[-1]
        raise CaptureError(
            f"The loss was captured for batches of {MAX_SHAPES} shapes, and here is another one: dim {dim} of {name} has had {len(seen)} sizes "
            f"({', '.join(map(str, seen[:8]))}, ...). Each needs its own capture, because {why}. "
            f"Pad {name} in collate to one size, or to a few (multiples of 64), or write the loss so that it does not depend on sizes. {WAY_OUT}"
        )

    def _request(self, batches: Sequence[Any], training: bool) -> bytes:
        """Rank 0's request: the key, and the digest of its program if it has one already."""
        _check_num_batches(batches)
        program = self.get(batches[0], training=training)
        return json.dumps([_key(batches[0], training), program.digest() if program else ""]).encode()


def choices_of(batches: Sequence[Any]) -> list[list[Any]]:
    """Two or three batches with the first one's shapes to capture and compare with; each choice replaces one that the loss
    cannot compute.

    Further batches of the job if there are some. Otherwise the first with its samples rotated by one. But
    integers have meanings (offsets into other tensors, lengths), so the loss may fail on rotated ones: then
    they stay unchanged.
    """
    first, leaves = batches[0], leaves_of(batches[0])
    for name, each in leaves.tensors.items():
        if each.is_nested:
            raise CaptureError(
                f"The batch holds {name}, a nested tensor, whose parts have other lengths in every batch, and a program is for one shape. "
                f"Pad it in collate, or nest a padded tensor in the model. {WAY_OUT}"
            )
    others = [each for each in map(leaves_of, batches[1:]) if each.shapes == leaves.shapes]
    real = [leaves.rebuild(list(each.tensors.values())) for each in others[:2]]

    def rotated(leaf: Tensor, every: bool) -> Tensor:
        return leaf.roll(1, 0) if leaf.ndim and (leaf.is_floating_point() or every) else leaf

    moved = ([rotated(leaf, every) for leaf in leaves.tensors.values()] for every in (True, False))
    return [*([[first, *real]] if real else []), *([first, leaves.rebuild(each)] for each in moved)]


def _broadcast_from_rank_0(group: Group, make: Callable[[], bytes]) -> bytes:
    """The result of `make` on rank 0, or its error, on every rank."""
    captured, refused = attempted(make) if group.rank == 0 else (b"", None)
    error: str | None = share(group, str(refused) if refused else None)
    if error is not None:
        raise refused or CaptureError(error)
    return share_bytes(group, captured or b"")


def _check_num_batches(batches: Sequence[Any]) -> None:
    if len(batches) < 2:
        raise CaptureError(f"Capturing a loss takes two batches of equal shapes, got {len(batches)}.")


def _check_num_values(known: Sequence[Mapping[str, str | None]], batch: Any) -> None:
    """Refuse to capture the loss for too many values, naming the one that changed the most."""
    if len(known) < MAX_VALUES:
        return
    values = leaves_of(batch).values
    counts = {name: len({each.get(name) for each in known} - {None}) for name in values}
    name = max(counts, key=counts.__getitem__, default="")
    if name:
        why = f"it has had {counts[name]} values so far, and the loss was captured for each"
        raise refused_value(name, values[name], why)


def _most_varied(shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> tuple[str, int, list[int]]:
    """The dim of the batch's tensors that had the most sizes, and these."""
    sizes: dict[Dim, set[int]] = {}
    for each in shapes:
        for place, size in sizes_of(each).items():
            sizes.setdefault(place, set()).add(size)
    (name, dim), seen = max(sizes.items(), key=lambda each: len(each[1]))
    return name, dim, sorted(seen)


def _key(batch: Any, training: bool) -> Key:
    return training, leaves_of(batch).shapes
