"""What is done in parallel, as a value: frozen, with a text form and JSON both ways.

`dp=4,microbatches=2,zero=1` is a plan; so is `{"dp": 4, "microbatches": 2, "zero": 1}`. Fields at their default are
left out of both. The same plan is checked, priced, executed and verified; there is no second description.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields

from meshloom.errors import PlanError
from meshloom.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one global batch becomes work for several ranks.

    dp: replicas; the batch is split over them.
    tp: ranks that divide each replica's parameters and what is computed with them.
    microbatches: pieces that each replica computes one after another, accumulating gradients.
    zero: 0, every replica owns all optimizer state; 1, each owns and updates one dp-th of it.
    sync_batch_norm: batch statistics over microbatch j of all replicas instead of each replica's own.
    overlap: gradients travel while backward is still computing earlier layers.
    bucket_bytes: gradients travel in pieces of about this many bytes.
    keyed_draws: key every random draw by (seed, step, chunk, n) instead of seeding once per chunk.

    >>> Plan(dp=4, microbatches=2)
    Plan('dp=4,microbatches=2')
    >>> Plan.parse("dp=2,sync_batch_norm=true").sync_batch_norm
    True
    """

    dp: int = 1
    tp: int = 1
    microbatches: int = 1
    zero: int = 0
    sync_batch_norm: bool = False
    overlap: bool = True
    bucket_bytes: int = 25 * 2**20
    keyed_draws: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            expected = type(field.default)
            if type(value) is not expected:
                raise PlanError(f"{field.name}={value!r} must be {_describe(expected)}, like {field.name}={_text(field.default)}.")
        for name in ("dp", "tp", "microbatches", "bucket_bytes"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name}={getattr(self, name)} must be 1 or more.")
        if self.zero not in (0, 1):
            raise PlanError(f"zero={self.zero} is not available. Use zero=0 (replicated) or zero=1 (optimizer state divided over dp).")
        if self.sync_batch_norm and self.tp > 1:
            raise PlanError(f"sync_batch_norm=true works on modules, and tp={self.tp} computes operators. Use tp=1, or sync_batch_norm=false.")

    @property
    def mesh(self) -> Mesh:
        """The grid of ranks this plan needs."""
        return Mesh(dp=self.dp, tp=self.tp)

    @property
    def num_chunks(self) -> int:
        """Pieces that one global batch is cut into: dp * microbatches."""
        return self.dp * self.microbatches

    def check_batch(self, batch_size: int) -> None:
        """Raise `PlanError` if a batch of `batch_size` samples cannot be run under this plan."""
        if self.sync_batch_norm and batch_size < self.num_chunks:
            raise PlanError(
                f"A batch of {batch_size} samples cannot fill {self.num_chunks} chunks (dp={self.dp} x microbatches={self.microbatches}), "
                f"and sync_batch_norm needs a sample in each. Use at most {batch_size} chunks, or drop_last=True if this is the short last batch."
            )

    @staticmethod
    def parse(text: str) -> Plan:
        """Read the text form: `key=value` joined by `,`."""
        settings: dict[str, int | bool] = {}
        for part in text.split(","):
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals or not key or not value:
                raise PlanError(f"{part.strip()!r} in plan {text!r} is not key=value. A plan looks like dp=4,microbatches=2.")
            if key in settings:
                raise PlanError(f"{key} stands twice in plan {text!r}.")
            settings[key] = _value(key, value)
        return Plan.from_dict(settings)

    @staticmethod
    def from_dict(settings: Mapping[str, object]) -> Plan:
        """Build a plan from settings by name, as read from JSON."""
        for key in settings:
            _known(key)
        return Plan(**settings)  # type: ignore[arg-type]  # __post_init__ checks the type of every value

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read the JSON form."""
        try:
            settings = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"This plan is not JSON: {error}.") from None
        if not isinstance(settings, dict):
            raise PlanError(f"A plan in JSON is an object of settings, not {type(settings).__name__}.")
        return Plan.from_dict(settings)

    def to_dict(self) -> dict[str, int | bool]:
        """Settings that differ from their default, dp always."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default or field.name == "dp"}

    def to_json(self) -> str:
        """The JSON form."""
        return json.dumps(self.to_dict())

    def digest(self) -> str:
        """A short hash, equal on ranks that hold the same plan."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return ",".join(f"{key}={_text(value)}" for key, value in self.to_dict().items())

    def __repr__(self) -> str:
        return f"Plan({str(self)!r})"


def _known(key: str) -> None:
    known = [field.name for field in fields(Plan)]
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(known)}."
        raise PlanError(f"A plan has no setting {key!r}. {hint}")


def _value(key: str, text: str) -> int | bool:
    _known(key)
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text)
    except ValueError:
        default = next(field.default for field in fields(Plan) if field.name == key)
        raise PlanError(f"{key}={text} must be {_describe(type(default))}, like {key}={_text(default)}.") from None


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _describe(kind: type) -> str:
    return {int: "a whole number", bool: "true or false"}[kind]


def chunk_sizes(num_samples: int, num_chunks: int) -> list[int]:
    """Samples per chunk when a batch is cut contiguously, larger ones first.

    >>> chunk_sizes(66, 4), chunk_sizes(2, 4)
    ([17, 17, 16, 16], [1, 1, 0, 0])
    """
    size, larger = divmod(num_samples, num_chunks)
    return [size + (chunk < larger) for chunk in range(num_chunks)]
