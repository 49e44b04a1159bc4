"""The cache of captured programs and of choices made for them (`core/cache.py`): entries are used where
all that they depend on is equal, and validated before use."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import nn

from meshloom.core.cache import Cache
from meshloom.core.errors import CaptureError, MeshloomError
from meshloom.core.job import Job
from meshloom.program.ir.batch_values import fits
from meshloom.program.ir.leaves import Leaves
from meshloom.program.ir.nodes import Variable
from meshloom.program.ir.program import Program
from meshloom.program.ir.transfer import pack, unpack
from meshloom.program.ir.written_parameters import named_buffers
from meshloom.program.sizes.any_size import Smaller
from meshloom.program.store.capture_key import capture_key, versions
from meshloom.program.store.object_text import NoTextError
from meshloom.program.store.typed_json import plain, typed
from meshloom.telemetry.timings import Timings

T = TypeVar("T")
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class ProgramCacheKey:
    """The cache key of a captured program. place: what it is for; parts: texts of what it depends on."""

    place: str
    parts: Mapping[str, str]


class ProgramCache:
    """Captured programs and choices in `cache`. timings: its notes say what was reused, or why not."""

    def __init__(self, cache: Cache, timings: Timings | None = None) -> None:
        self.warnings: list[str] = []  # cached entries that are not trusted, and those that cannot be saved
        self._cache = cache
        self._note = (timings or Timings()).note

    def entry(
        self, job: Job, model: nn.Module, leaves: Leaves, *, kind: str, values: bool = True
    ) -> ProgramCacheKey | None:
        """The key of capturing the job's loss for such batches; None where something has no text.

        kind: mode and precision. values: whether the model's tensors have values.
        """
        try:
            parts = capture_key(job, model, leaves, values=values, known=self._versions)
        except NoTextError as error:
            self._note(f"The captured loss is not cached: {error.what} cannot be written as text.")
            return None
        loss: Any = job.loss
        shapes = list(leaves.shapes)
        named = [getattr(loss, "__module__", ""), getattr(loss, "__qualname__", type(loss).__qualname__)]
        place = repr([named, type(model).__qualname__, shapes, kind])
        return ProgramCacheKey(place=place, parts={**parts, "kind": kind})

    def take(
        self,
        entry: ProgramCacheKey,
        model: nn.Module,
        leaves: Leaves,
        *,
        training: bool,
        check: Callable[[Program, Smaller | None], None] = lambda *_: None,
    ) -> Program | None:
        """The cached program, if it is for this model and batch and `check` does not raise."""
        found = self._cache.get("reading", entry.place, entry.parts)
        if found.content is None:
            (self._warn if found.refused else self._note)(f"The loss was captured anew: {found.why}.")
            return None
        try:
            program, small = _unpacked(found.content)
            _check_fits(program, model, leaves, training)
            check(program, small)
        except (
            MeshloomError,
            ValueError,
            KeyError,
            TypeError,
            RuntimeError,
        ) as error:  # of a damaged file, or of another program
            self._cache.drop("reading", entry.place, entry.parts)
            self._warn(f"A cached program is not used: {str(error)[:300]}")
            return None
        self._note("The captured loss is taken from an earlier run.")
        return program

    def keep(self, entry: ProgramCacheKey, program: Program, small: Smaller | None) -> None:
        """Save a captured program, and the smaller one at which it was compared."""
        if why := self._cache.put("reading", entry.place, entry.parts, _packed(program, small)):
            self._warn(f"The captured loss is not cached: {why}.")

    def by_shapes(
        self, job: Job, model: nn.Module, leaves: Leaves, read: Callable[[], Program], *,
        training: bool = True, device: torch.device = CPU,
    ) -> Program:  # fmt: skip
        """The cached result of `read`, which captures the loss by shapes, for programs on `device`; else captured and saved."""
        kind = f"by shapes {training} {device}"
        entry = self.entry(job, model, leaves, kind=kind, values=False)
        program = self.take(entry, model, leaves, training=training) if entry else None
        if program is None:
            program = read()
            if entry:
                self.keep(entry, program, None)
        return program

    def choice(self, kind: str, program: Program, parts: Mapping[str, Any]) -> Any:
        """The cached choice for a program, as JSON, or None. parts: what it depends on besides."""
        found = self._cache.get(kind, "", self._dependencies(program, parts))
        if found.refused:
            self._warn(f"A cached result ({kind}) is not used: {found.why}.")
        return json.loads(found.content) if found.content is not None else None

    def keep_choice(self, kind: str, program: Program, parts: Mapping[str, Any], value: Any) -> None:
        """Save a choice. value: JSON."""
        self._cache.put(kind, "", self._dependencies(program, parts), json.dumps(value).encode())

    def value(
        self, kind: str, program: Program, parts: Mapping[str, Any], of: Any, make: Callable[[], T]
    ) -> T:
        """The cached result of `make` for a program. of: its type, one that `typed_json.py` can encode."""
        known = self.choice(kind, program, parts)
        if known is not None:
            try:
                return typed(of, known)
            except (ValueError, TypeError):  # not written by us
                pass
        value = make()
        self.keep_choice(kind, program, parts, plain(value))
        return value

    def _dependencies(self, program: Program, parts: Mapping[str, Any]) -> dict[str, str]:
        texts = {name: each if isinstance(each, str) else repr(each) for name, each in parts.items()}
        return {**self._versions, "program": program.digest(), **texts}

    @cached_property
    def _versions(self) -> dict[str, str]:
        return versions()

    def _warn(self, sentence: str) -> None:
        self._note(sentence)
        self.warnings.append(sentence)


def _packed(program: Program, small: Smaller | None) -> bytes:
    parts = [pack(program), pack(small.program) if small else b""]
    head = {
        "lengths": [len(each) for each in parts],
        "sizes": [[*dim, size] for dim, size in small.sizes.items()] if small else [],
    }
    return json.dumps(head).encode() + b"\n" + b"".join(parts)


def _unpacked(content: bytes) -> tuple[Program, Smaller | None]:
    head, _, rest = content.partition(b"\n")
    known = json.loads(head)
    first, second = known["lengths"]
    small = rest[first : first + second]
    sizes = {(name, dim): size for name, dim, size in known["sizes"]}
    return unpack(rest[:first]), Smaller(program=unpack(small), sizes=sizes) if second else None


def _check_fits(program: Program, model: nn.Module, leaves: Leaves, training: bool) -> None:
    """Raise unless the program's inputs are those of this model and batch."""
    buffers = dict(named_buffers(model))
    trained = {name: each for name, each in model.named_parameters() if name not in buffers}
    for kind, known, actual in (
        ("parameters", program.parameters, trained),
        ("buffers", program.buffers, buffers),
    ):
        mine: dict[str, Variable] = {each.name: each for each in known.values()}
        if kind == "parameters" and mine.keys() != actual.keys():
            raise CaptureError(f"it has {len(mine)} {kind}, and the model {len(actual)}.")
        for name, each in mine.items():
            found = actual.get(name)
            if found is None or (tuple(found.shape), found.dtype) != (each.meta.shape, each.meta.dtype):
                raise CaptureError(f"{name} has another shape or dtype in the model.")
    inputs = {each.name: (each.meta.shape, each.meta.dtype) for each in program.tensor_inputs}
    tensors = {name: (tuple(each.shape), each.dtype) for name, each in leaves.tensors.items()}
    if inputs != tensors or not fits(program.others, leaves.values):
        raise CaptureError("it is for other batches.")
    if program.training != training:
        raise CaptureError("it is for the other mode.")
