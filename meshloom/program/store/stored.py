"""Readings and choices of earlier runs (`cache.py`), taken where all that they depend on is equal, and looked
at before they are believed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from torch import nn

from meshloom.core.cache import Cache, CacheEntry, digest_of
from meshloom.core.errors import CaptureError
from meshloom.core.job import LossFunction
from meshloom.program.ir.batch_values import fits
from meshloom.program.ir.leaves import Leaves
from meshloom.program.ir.nodes import Variable
from meshloom.program.ir.program import Program
from meshloom.program.ir.transfer import pack, unpack
from meshloom.program.sizes.smaller import Smaller
from meshloom.program.store.fingerprint import UnknownError, parts_of_reading, versions
from meshloom.program.store.typed_json import plain, typed
from meshloom.telemetry.timings import Timings

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StoredEntry:
    """Where a reading is kept: what it is of, and what it depends on."""

    place: str
    parts: Mapping[str, str]


class Stored:
    """What is kept in `cache`. timings: whose notes say what was taken, and if not why."""

    def __init__(self, cache: Cache, timings: Timings | None = None) -> None:
        self.warnings: list[str] = []  # what was there and is not believed, and what cannot be kept
        self._cache = cache
        self._notes = (timings or Timings()).notes

    def entry(
        self, model: nn.Module, loss: LossFunction, leaves: Leaves, *, kind: str, values: bool = True
    ) -> StoredEntry | None:
        """Of reading `loss` for batches like this one; None where nobody can tell when that would be the
        same. kind: mode and precision.

        values: whether the model has some.
        """
        try:
            parts = parts_of_reading(model, loss, leaves, values=values, known=self._versions)
        except UnknownError as error:
            self._notes.append(f"The reading is not kept: {error.what} has no digest.")
            return None
        except Exception as error:  # of the job's objects, when they are looked at
            self._notes.append(
                f"The reading is not kept: looking at the job ended in {type(error).__name__}: {str(error)[:160]}."
            )
            return None
        shapes = [(name, tuple(each.shape), str(each.dtype)) for name, each in leaves.tensors.items()]
        named = [getattr(loss, "__module__", ""), getattr(loss, "__qualname__", type(loss).__qualname__)]
        return StoredEntry(
            place=repr([named, type(model).__qualname__, shapes, kind]), parts={**parts, "kind": kind}
        )

    def take(
        self,
        entry: StoredEntry,
        model: nn.Module,
        leaves: Leaves,
        *,
        training: bool,
        check: Callable[[Program, Smaller | None], None] = lambda *_: None,
    ) -> Program | None:
        """What an earlier run read, if it is for this model and batch, and `check` raises nothing."""
        found = self._told(self._cache.get("reading", entry.place, entry.parts), "The loss was captured")
        if found is None:
            return None
        try:
            program, small = _unpacked(found)
            _check_fits(program, model, leaves, training)
            check(program, small)
        except Exception as error:
            self._cache.drop("reading", entry.place, entry.parts)
            self._warn(f"What an earlier run read is not used: {str(error)[:300]}")
            return None
        self._notes.append("The loss is what an earlier run has read.")
        return program

    def keep(self, entry: StoredEntry, program: Program, small: Smaller | None) -> None:
        """For later runs."""
        if why := self._cache.put("reading", entry.place, entry.parts, _packed(program, small)):
            self._warn(f"The reading is not kept: {why}.")

    def by_shapes(
        self, model: nn.Module, loss: LossFunction, leaves: Leaves, read: Callable[[], Program]
    ) -> Program:
        """What `read` gives for a model and a batch without values, in training; taken from an earlier run,
        or kept."""
        entry = self.entry(model, loss, leaves, kind="by shapes", values=False)
        program = self.take(entry, model, leaves, training=True) if entry else None
        if program is None:
            program = read()
            if entry:
                self.keep(entry, program, None)
        return program

    def choice(self, kind: str, program: Program, parts: Mapping[str, Any]) -> Any:
        """What was chosen for a program, as JSON; None if nothing was. parts: what it depends on besides."""
        found = self._cache.get(kind, "", self._parts(program, parts))
        if found.refused:
            self._warn(f"What an earlier run found ({kind}) is not used: {found.why}.")
        return json.loads(found.content) if found.content is not None else None

    def keep_choice(self, kind: str, program: Program, parts: Mapping[str, Any], value: Any) -> None:
        """For later runs. value: JSON."""
        self._cache.put(kind, "", self._parts(program, parts), json.dumps(value).encode())

    def value(
        self, kind: str, program: Program, parts: Mapping[str, Any], of: Any, make: Callable[[], T]
    ) -> T:
        """What `make` finds out about a program, as an earlier run found it. of: its type, of what
        `typed_json.py` knows."""
        known = self.choice(kind, program, parts)
        if known is not None:
            try:
                return typed(of, known)
            except (ValueError, TypeError):  # not ours, however it came to have this name
                pass
        made = make()
        self.keep_choice(kind, program, parts, plain(made))
        return made

    def _parts(self, program: Program, parts: Mapping[str, Any]) -> dict[str, str]:
        return {
            "versions": self._versions,
            "program": program.digest(),
            **{name: digest_of(repr(each)) for name, each in parts.items()},
        }

    @cached_property
    def _versions(self) -> str:
        return versions()

    def _told(self, found: CacheEntry, what: str) -> bytes | None:
        if found.content is None:
            (self._warn if found.refused else self._notes.append)(f"{what} anew: {found.why}.")
        return found.content

    def _warn(self, sentence: str) -> None:
        self._notes.append(sentence)
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
    """Whether it is for this model and batch by all that can be seen of them."""
    for kind, known, there in (
        ("parameters", program.parameters, dict(model.named_parameters())),
        ("buffers", program.buffers, dict(model.named_buffers())),
    ):
        mine: dict[str, Variable] = {name: each for each in known.values() for name in (each.name,)}
        if kind == "parameters" and mine.keys() != there.keys():
            raise CaptureError(f"it has {len(mine)} {kind}, and the model {len(there)}.")
        for name, each in mine.items():
            found = there.get(name)
            if found is None or (tuple(found.shape), found.dtype) != (each.meta.shape, each.meta.dtype):
                raise CaptureError(f"{name} is another one in the model.")
    inputs = {
        each.name: (each.meta.shape, each.meta.dtype)
        for each in program.inputs
        if each.name not in program.others
    }
    if inputs != {name: (tuple(each.shape), each.dtype) for name, each in leaves.tensors.items()} or not fits(
        program.others, leaves.values
    ):
        raise CaptureError("it is for other batches.")
    if program.training != training:
        raise CaptureError("it is for the other mode.")
