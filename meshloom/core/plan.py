"""What is done in parallel, as a value: frozen, with a text form and JSON both ways.

`dp=4,microbatches=2,zero=1` is a plan; so is `{"dp": 4, "microbatches": 2, "zero": 1}`. Fields at their
default are
left out of both. The same plan is checked, priced, executed and verified; there is no second description.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from meshloom.core.errors import PlanError
from meshloom.core.exchanges import EXCHANGES, check_exchange, complete_compress, exempt_setting, known_word
from meshloom.core.mesh import Mesh
from meshloom.core.plan_shares import apportion, check_shares, chunk_sizes, complete_shares, fixed_shares
from meshloom.core.units import parse_bytes

MOST_IDLE_CHUNKS = 4096  # of a batch; more is a mistake, and every one is an entry in lists
RECOMPUTE = ("none", "full", "selective")
PLACEMENTS = ("column", "row", "vocabulary", "heads", "channels", "experts", "replicated")


@dataclass(frozen=True, kw_only=True)
class ScheduleEntry:
    """A schedule that a plan can name.

    builder: module and name of a function: (ranks, microbatches, stages per rank, durations or None) ->
        `Schedule`.
    stages_per_rank: those that it works with; the default of one that works with `any_number`. split: whether
        backward comes in two halves.
    """

    builder: str
    stages_per_rank: int = 1
    any_number: bool = False
    split: bool = False


_BUILDERS = "meshloom.pipeline.schedules.builders"
SCHEDULES: Mapping[str, ScheduleEntry] = {
    "gpipe": ScheduleEntry(builder=f"{_BUILDERS}:gpipe"),
    "1f1b": ScheduleEntry(builder=f"{_BUILDERS}:one_forward_one_backward"),
    "interleaved": ScheduleEntry(builder=f"{_BUILDERS}:interleaved", stages_per_rank=2, any_number=True),
    "zb-h1": ScheduleEntry(builder=f"{_BUILDERS}:zero_bubble", split=True),
    "zb-v": ScheduleEntry(builder=f"{_BUILDERS}:zero_bubble_v", stages_per_rank=2, split=True),
}


class Pairs(Mapping[str, str]):
    """A mapping that does not change, in alphabetical order; equal ones have equal hashes.

    >>> Pairs({"b": "row", "a": "column"})
    Pairs({'a': 'column', 'b': 'row'})
    """

    def __init__(self, pairs: Mapping[str, str] | None = None) -> None:
        self._pairs = dict(sorted((pairs or {}).items(), key=str))

    def __getitem__(self, key: str) -> str:
        return self._pairs[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def __hash__(self) -> int:
        return hash(tuple(self._pairs.items()))

    def __repr__(self) -> str:
        return f"Pairs({self._pairs})"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one global batch becomes work for several ranks.

    dp: replicas; the batch is split over them.
    pp: ranks that each hold some stages of a replica: consecutive parts of what the loss computes.
    tp: ranks that divide each replica's parameters and what is computed with them.
    microbatches: pieces that each replica computes one after another, accumulating gradients.
    zero: 0, every replica owns all optimizer state; 1, each owns and updates one dp-th of it.
    sync_batch_norm: batch statistics over microbatch j of all replicas instead of each replica's own.
    overlap: gradients travel while backward is still computing earlier layers.
    bucket_bytes: gradients travel in pieces of about this many bytes.
    keyed_draws: key every random draw by (seed, step, chunk, n) instead of seeding once per chunk.
    tp_placements: pattern of module names -> how the parameters of those modules and of all inside are
        divided over tp: `column` (out features), `row` (in features), `vocabulary`, `heads`, `channels`,
        `experts`, `dim0`, `dim1`, ..., or `replicated`. Others are chosen by cost.
    memory_bytes: what a rank along pp and tp may hold of parameters, gradients, optimizer state and kept
        activations; cuts and division are chosen so. 0: no limit. As text also with a unit:
        memory_bytes=8GiB.
    schedule: in which order the ranks along pp compute: gpipe, 1f1b, interleaved, zb-h1 or zb-v.
    virtual_stages: stages of each rank along pp. 0: as many as the schedule has at least.
    cuts: modules that begin the stages after the first, in order: cuts=blocks.4+blocks.8. Empty: chosen so
    that the slowest stage is fastest. recompute: what backward needs of forward is kept (none), computed
    again block by block (full), or computed again where that is cheap (selective). exchange: how replicas
        agree. all_reduce: all get the sum of gradients and make the same update; ring, tree, halving,
        hierarchical: the same, by this algorithm instead of the library's own. server: some ranks update for
            all, once a step.
        async: servers update with every push. local_sgd, diloco: replicas take independent local steps, and
            every `local_steps` they average parameters.
    servers: ranks that are servers too: the first of the replicas, over which the elements are divided
        evenly.
    staleness: how many steps the fastest worker may be ahead of the slowest; None: any number. 0 makes
    exchange=async to exchange=server. rate_by_age: with exchange=async, learning rates are divided by the age
    of the gradient's parameters: the updates made since, if more than one. local_steps: steps that each
    replica takes between averages.
    outer_learning_rate, outer_momentum: of diloco's outer step, Nesterov momentum on the averaged change of
        parameters.
    compress: gradients travel as bf16, as matrices of low rank (powersgd:4) or as their largest elements
    (topk:0.01, a share of them). shares: how a batch is divided over replicas: even, in proportions given by
    hand (3+3+3+1), or in proportion to measured speed (measured).

    >>> Plan(dp=4, microbatches=2)
    Plan('dp=4,microbatches=2')
    >>> Plan.parse("dp=2,sync_batch_norm=true").sync_batch_norm
    True
    >>> Plan(tp=2, tp_placements={"blocks.*.up": "column", "head": "vocabulary"})
    Plan('dp=1,tp=2,tp_placements=blocks.*.up:column+head:vocabulary')
    >>> Plan.parse("dp=2,pp=2,microbatches=4,schedule=zb-v").num_stages
    4
    >>> Plan(dp=4, exchange="async", staleness=0), Plan(dp=4, compress="topk")
    (Plan('dp=4,exchange=server'), Plan('dp=4,compress=topk:0.01'))
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    microbatches: int = 1
    zero: int = 0
    sync_batch_norm: bool = False
    overlap: bool = True
    bucket_bytes: int = 25 * 2**20
    keyed_draws: bool = False
    tp_placements: Mapping[str, str] = Pairs()
    memory_bytes: int = 0
    schedule: str = "1f1b"
    virtual_stages: int = 0
    cuts: tuple[str, ...] = ()
    recompute: str = "none"
    exchange: str = "all_reduce"
    servers: int = 1
    staleness: int | None = None
    rate_by_age: bool = False
    local_steps: int = 1
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9
    compress: str = "none"
    shares: str = "even"

    def __post_init__(self) -> None:
        if isinstance(self.tp_placements, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  # it may come from JSON
            object.__setattr__(self, "tp_placements", Pairs(self.tp_placements))
        if isinstance(self.cuts, list):
            object.__setattr__(self, "cuts", tuple(self.cuts))
        for field in fields(self):
            value = getattr(self, field.name)
            expected = type(field.default)
            if expected is float and type(value) is int:
                object.__setattr__(self, field.name, float(value))
            elif type(value) is not expected and not (field.name == "staleness" and type(value) is int):
                raise PlanError(
                    f"{field.name}={value!r} must be {_describe(expected)}, like {field.name}={_text(field.default)}."
                )
        for name in ("dp", "pp", "tp", "microbatches", "bucket_bytes"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name}={getattr(self, name)} must be 1 or more.")
        if self.memory_bytes < 0:
            raise PlanError(f"memory_bytes={self.memory_bytes} must be 0 (no limit) or more.")
        if self.zero not in (0, 1):
            raise PlanError(
                f"zero={self.zero} is not available. Use zero=0 (replicated) or zero=1 (optimizer state divided over dp)."
            )
        for pattern, value in self.tp_placements.items():
            _check_placement(pattern, value)
        if self.tp_placements and self.tp == 1:
            raise PlanError(
                f"tp_placements={_text(self.tp_placements)} divides over tp, and tp=1. Use tp=2 or more, or leave tp_placements out."
            )
        if self.memory_bytes and self.tp == 1 and self.pp == 1:
            raise PlanError(
                f"memory_bytes={self.memory_bytes} is what a division over pp or tp has to keep to, and both are 1. "
                "Use pp=2 or tp=2 or more, or leave it out."
            )
        self._check_pipeline()
        self._check_exchange()
        if self.sync_batch_norm and self.reads:
            why = next(
                f"{name}={getattr(self, name)}"
                for name in ("tp", "pp", "recompute")
                if getattr(self, name) not in (1, "none")
            )
            raise PlanError(
                f"sync_batch_norm=true works on modules, and {why} computes operators. Leave {why} out, or use sync_batch_norm=false."
            )

    def _check_pipeline(self) -> None:
        for name, known in (("schedule", tuple(SCHEDULES)), ("recompute", RECOMPUTE)):
            known_word(name, getattr(self, name), known)
        if not all(
            isinstance(each, str) and each and not any(mark in each for mark in ",+= ") for each in self.cuts
        ):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlanError(f"cuts={self.cuts!r} must be names of modules, like cuts=blocks.4+blocks.8.")
        if self.pp == 1:
            for field in fields(self):
                if (
                    field.name in ("schedule", "virtual_stages", "cuts")
                    and getattr(self, field.name) != field.default
                ):
                    raise PlanError(
                        f"{field.name}={_text(getattr(self, field.name))} is for a pipeline, and pp=1. Use pp=2 or more, or leave {field.name} out."
                    )
        usual, any_more = SCHEDULES[self.schedule].stages_per_rank, SCHEDULES[self.schedule].any_number
        if self.virtual_stages not in (0, usual) and not (any_more and self.virtual_stages > usual):
            allowed = f"{usual} or more" if any_more else usual
            way_out = (
                "Leave virtual_stages out."
                if any_more
                else "Leave virtual_stages out, or use schedule=interleaved."
            )
            raise PlanError(
                f"virtual_stages={self.virtual_stages} does not go with schedule={self.schedule}, which has {allowed} on each rank. {way_out}"
            )
        if self.cuts and len(self.cuts) != self.num_stages - 1:
            raise PlanError(
                f"cuts={_text(self.cuts)} makes {len(self.cuts) + 1} stages, and pp={self.pp} with schedule={self.schedule} has {self.num_stages}. "
                f"Name {self.num_stages - 1} modules."
            )

    def _check_exchange(self) -> None:
        object.__setattr__(self, "compress", complete_compress(self.compress))
        if self.exchange == "async" and self.staleness == 0:  # nobody is ahead of anybody
            object.__setattr__(self, "exchange", "server")
            object.__setattr__(self, "staleness", None)
        check_exchange(self, {field.name: field.default for field in fields(self)})
        object.__setattr__(self, "shares", complete_shares(self.shares))
        check_shares(self)

    @property
    def mesh(self) -> Mesh:
        """The grid of ranks this plan needs."""
        return Mesh(dp=self.dp, pp=self.pp, tp=self.tp)

    @property
    def reads(self) -> bool:
        """Whether the program of the loss is read and run, instead of the user's modules."""
        return self.tp > 1 or self.pp > 1 or self.recompute != "none"

    @property
    def algorithm(self) -> str:
        """By which algorithm replicas add up; "": by that of what they talk through."""
        return self.exchange if EXCHANGES[self.exchange].algorithm else ""

    @property
    def exempt(self) -> str:
        """The setting because of which the plan need not equal one device; "" if it promises to."""
        return exempt_setting(self)

    @property
    def num_stages(self) -> int:
        """Stages of a replica: pp times those of each rank."""
        return self.pp * (self.virtual_stages or SCHEDULES[self.schedule].stages_per_rank)

    @property
    def num_chunks(self) -> int:
        """Pieces that one global batch is cut into: dp * microbatches."""
        return self.dp * self.microbatches

    def sizes(self, num_samples: int, shares: Sequence[int] = ()) -> list[int]:
        """Samples of each chunk of a batch, in order of chunks. shares: of the replicas, relative; default:
        this plan's, even when they are measured.

        >>> Plan(dp=2, microbatches=2).sizes(10), Plan(dp=2, microbatches=2, shares="4+1").sizes(10)
        ([3, 3, 2, 2], [4, 4, 1, 1])
        """
        shares = shares or fixed_shares(self.shares)
        if not shares:
            return chunk_sizes(num_samples, self.num_chunks)
        return [
            size for mine in apportion(num_samples, shares) for size in chunk_sizes(mine, self.microbatches)
        ]

    def largest_share(self, num_samples: int) -> list[int]:
        """Samples of each microbatch, those without any left out, of the replica that has most of a batch:
        the first of them."""
        sizes, m = self.sizes(num_samples), self.microbatches
        return [
            size
            for size in max((sizes[start : start + m] for start in range(0, len(sizes), m)), key=sum)
            if size
        ]

    def check_batch(self, batch_size: int) -> None:
        """Raise `PlanError` if a batch of `batch_size` samples cannot be run under this plan."""
        if self.num_chunks > max(batch_size, MOST_IDLE_CHUNKS):
            raise PlanError(
                f"dp={self.dp} x microbatches={self.microbatches} cuts a batch of {batch_size} samples into {self.num_chunks:,} chunks, of which at least "
                f"{self.num_chunks - batch_size:,} are empty. "
                + (
                    f"Use dp={batch_size} or less."
                    if self.dp > batch_size
                    else f"Use at most {batch_size // self.dp} microbatches."
                )
            )
        if self.sync_batch_norm and not all(self.sizes(batch_size)):
            cut, way_out = "", f"Use at most {batch_size} chunks"
            if self.shares != "even":
                cut, way_out = f", shares={self.shares}", "Use fewer chunks or shares that differ less"
            raise PlanError(
                f"A batch of {batch_size} samples cannot fill {self.num_chunks} chunks (dp={self.dp} x microbatches={self.microbatches}{cut}), "
                f"and sync_batch_norm needs a sample in each. {way_out}, or drop_last=True if this is the short last batch."
            )

    @staticmethod
    def parse(text: str) -> Plan:
        """Read the text form: `key=value` joined by `,`."""
        settings: dict[str, int | float | bool | str | Pairs | tuple[str, ...] | None] = {}
        for part in text.split(","):
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals or not key or not value:
                raise PlanError(
                    f"{part.strip()!r} in plan {text!r} is not key=value. A plan looks like dp=4,microbatches=2."
                )
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

    def to_dict(self) -> dict[str, Any]:
        """Settings that differ from their default, dp always."""
        return {
            field.name: dict(value)
            if isinstance(value, Pairs)
            else list(value)
            if isinstance(value, tuple)
            else value
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default or field.name == "dp"
        }

    def to_json(self) -> str:
        """The JSON form."""
        return json.dumps(self.to_dict())

    def digest(self) -> str:
        """A short hash, equal on ranks that hold the same plan."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return ",".join(f"{key}={_text(getattr(self, key))}" for key in self.to_dict())

    def __repr__(self) -> str:
        return f"Plan({str(self)!r})"


def _known(key: str) -> None:
    known = [field.name for field in fields(Plan)]
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(known)}."
        raise PlanError(f"A plan has no setting {key!r}. {hint}")


def _check_placement(pattern: object, value: object) -> None:
    if (
        not isinstance(pattern, str)
        or not isinstance(value, str)
        or not pattern
        or any(mark in pattern for mark in ",+:= ")
    ):
        raise PlanError(
            f"tp_placements={pattern!r}:{value!r} must be a pattern of module names and how to divide them, like blocks.*.up:column."
        )
    if value not in PLACEMENTS and not (value.startswith("dim") and value.removeprefix("dim").isdecimal()):
        near = difflib.get_close_matches(value, PLACEMENTS, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(PLACEMENTS)}, dim0, dim1, ..."
        raise PlanError(f"tp_placements={pattern}:{value} is no way to divide a module. {hint}")


def _pairs(key: str, text: str) -> Pairs:
    found: dict[str, str] = {}
    for part in text.split("+"):
        pattern, colon, value = (piece.strip() for piece in part.partition(":"))
        if not colon or not pattern or not value:
            raise PlanError(
                f"{part.strip()!r} in {key}={text} is not pattern:value. Pairs look like {key}=blocks.*.up:column+head:vocabulary."
            )
        if pattern in found:
            raise PlanError(f"{pattern} stands twice in {key}={text}.")
        found[pattern] = value
    return Pairs(found)


def _value(key: str, text: str) -> int | float | bool | str | Pairs | tuple[str, ...] | None:
    _known(key)
    default = next(field.default for field in fields(Plan) if field.name == key)
    if isinstance(default, str):
        return text
    if key == "staleness" and text == "inf":
        return None
    if key == "cuts":
        return tuple(each.strip() for each in text.split("+"))
    if key == "tp_placements":
        return _pairs(key, text)
    if key == "memory_bytes":
        return parse_bytes(text)
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text) if isinstance(default, float) else int(text)
    except ValueError:
        raise PlanError(
            f"{key}={text} must be {_describe(type(default))}, like {key}={_text(default)}."
        ) from None


def _text(value: object) -> str:
    if isinstance(value, Pairs):
        return "+".join(f"{pattern}:{way}" for pattern, way in value.items()) or "blocks.*.up:column"
    if isinstance(value, tuple):
        return "+".join(value) or "blocks.4+blocks.8"
    if value is None:
        return "inf"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _describe(kind: type) -> str:
    return {
        int: "a whole number", float: "a number", bool: "true or false", Pairs: "pairs of patterns and ways", str: "a word", tuple: "names of modules",
        type(None): "a whole number, or inf",
    }[kind]  # fmt: skip
