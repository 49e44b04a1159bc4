"""What is done in parallel, as a value: frozen, with a text form and JSON both ways.

`dp=4,microbatches=2,zero=1` is a plan; so is `{"dp": 4, "microbatches": 2, "zero": 1}`. Both leave out
settings at their default. The same plan is checked, priced, executed and verified; there is no second
description.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from meshloom.core.compiling import check_compile, complete_compile
from meshloom.core.errors import PlanError
from meshloom.core.exchanges import (
    EXCHANGES,
    check_exchange,
    check_offload,
    check_zero,
    complete_compress,
    exempt_setting,
)
from meshloom.core.mesh import Mesh
from meshloom.core.plan_shares import check_batch, check_shares, chunk_sizes_of, complete_shares
from meshloom.core.plan_text import (
    Pairs,
    check_placement,
    check_setting,
    check_type,
    parse_json,
    parse_settings,
    text_of,
)
from meshloom.core.precisions import check_parameters, check_precision
from meshloom.core.schedules import SCHEDULES, check_pipeline


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How dp * pp * tp ranks compute one global batch; `Plan()` is one device. Immutable and hashable.

    Raises `PlanError` for values out of range and for settings that contradict each other.

    dp: number of replicas (data parallelism); the batch is split over them.
    pp: number of ranks among which the layers of each replica are split into stages (pipeline parallelism).
    tp: number of ranks among which the parameters of each replica, and what is computed with them, are
        sharded (tensor parallelism).
    microbatches: pieces of each replica's part of the batch, computed one after another; their gradients are
        accumulated.

    Gradients and updates:
    zero: 0 replicates the optimizer's state; 1 shards it over dp: each replica updates one dp-th of the
        parameters. 2: each also holds only its slices of the gradients; 3: and of the parameters.
    zero_within: for zero=3, over how many consecutive replicas, in groups that keep a copy each. 0: over all.
    offload: `optimizer` keeps the optimizer's state elsewhere and makes updates there: on disk on CPUs, in host memory
        on GPUs; `none`.
    overlap: whether gradients are exchanged while backward is still computing earlier layers.
    bucket_bytes: size, in bytes, of the buckets in which gradients are exchanged (approximate).
    exchange: how replicas agree. `all_reduce` sums the gradients, and every replica makes the same update;
        `ring` does so by messages on a ring instead of the backend's own all-reduce.
        `server`: some ranks update for all, once a step. `async`: servers update with every push.
        `local_sgd`, `diloco`: replicas take independent local steps and average parameters now and then.
    servers: number of servers, over which elements are sharded evenly; with exchange=server the first replicas.
    staleness: for exchange=async, how many steps the fastest worker may be ahead of the slowest; None (in
        text `inf`) is unlimited. 0 turns exchange=async into exchange=server.
    rate_by_age: for exchange=async, divide the learning rate of a push by the number of updates made since
        its parameters were pulled, if more than one.
    local_steps: for local_sgd and diloco, steps between averages.
    outer_learning_rate, outer_momentum: for diloco, of its outer step (Nesterov momentum on mean changes).
    compress: gradients sent as `bf16`, as factors of rank R (`powersgd:R`), or as the share X of elements
        that are largest (`topk:X`); `none`.
    reduce: what gradients travel as between replicas: their own dtype (`own`), `float32` or `bf16`.
    shares: proportions in which a batch is split over replicas: `even`, given (`3+3+3+1`) or `measured` (by
        speed).

    Computation:
    precision: `float32` (as the job is), `bf16-mixed`, `fp16-mixed` (losses under autocast), `bf16` (docs/precision.md).
    sync_batch_norm: batch statistics over microbatch j of all replicas instead of over each replica's own.
    keyed_draws: key every random draw by (seed, step, chunk, n) instead of seeding once per chunk.
    recompute: activations that backward recomputes: `none`, `full` (by blocks) or `selective` (cheap ones).
    compile: `true`: torch.compile compiles the loss, or the programs captured from it; `none`.
    memory_bytes: limit, in bytes, of what a rank holds of parameters, gradients, optimizer state and saved
        activations; cuts and sharding are chosen to fit, and a run that cannot is refused. 0: the device's memory,
        or the host's for all of its ranks. Text may have a unit: `memory_bytes=8GiB`.
    tp_placements: pattern of module names -> how the parameters of matching modules, and of all modules inside them, are sharded
        over tp: `column` (output features), `row` (input features), `vocabulary`, `heads`, `channels`, `experts`, `dim0`,
        `dim1`, ..., or `replicated`. All others are chosen by cost.
    schedule: order in which the ranks along pp compute: `gpipe`, `1f1b`, `interleaved`, `zb-h1` or `zb-v`;
        `found` is searched for the stages of the plan.
    virtual_stages: stages on each rank along pp; 0: the schedule's minimum.
    cuts: names of the modules that begin the stages after the first, in order. Empty: those of the fastest slowest stage.

    >>> Plan(dp=4, microbatches=2)
    Plan('dp=4,microbatches=2')
    >>> Plan.parse("dp=2,pp=2,microbatches=4,schedule=zb-v").num_stages
    4
    >>> Plan(tp=2, tp_placements={"blocks.*.up": "column", "head": "vocabulary"})
    Plan('dp=1,tp=2,tp_placements=blocks.*.up:column+head:vocabulary')
    >>> Plan(dp=4, exchange="async", staleness=0), Plan(dp=4, compress="topk")
    (Plan('dp=4,exchange=server'), Plan('dp=4,compress=topk:0.01'))
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    microbatches: int = 1
    zero: int = 0
    zero_within: int = 0
    offload: str = "none"
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
    compile: str = "none"
    exchange: str = "all_reduce"
    servers: int = 1
    staleness: int | None = None
    rate_by_age: bool = False
    local_steps: int = 1
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9
    compress: str = "none"
    reduce: str = "own"
    shares: str = "even"
    precision: str = "float32"

    def __post_init__(self) -> None:
        _take_types(self)
        _check_computation(self)
        object.__setattr__(self, "compress", complete_compress(self.compress))
        if self.exchange == "async" and self.staleness == 0:  # no worker is ahead of another
            object.__setattr__(self, "exchange", "server")
            object.__setattr__(self, "staleness", None)
        check_exchange(self, DEFAULTS)
        check_offload(self.offload, self.exchange)
        object.__setattr__(self, "shares", complete_shares(self.shares))
        check_shares(self)
        _check_combinations(self)

    @property
    def mesh(self) -> Mesh:
        """The grid of ranks that this plan needs."""
        return Mesh(dp=self.dp, pp=self.pp, tp=self.tp, within=self.zero_within % self.dp)

    @property
    def divides_loss(self) -> bool:
        """Whether the loss is divided over ranks, into stages, or into what backward recomputes: it runs as a program."""
        return self.tp > 1 or self.pp > 1 or self.recompute != "none"

    @property
    def compiles(self) -> bool:
        """Whether torch.compile compiles the loss, or the programs captured from it."""
        return self.compile != "none"

    @property
    def synchronous(self) -> bool:
        """Whether replicas take steps together."""
        return EXCHANGES[self.exchange].synchronous

    @property
    def on_ring(self) -> bool:
        """Whether gradients are added up on a ring of messages, in place of the backend's own all-reduce."""
        return self.exchange == "ring"

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
        """Pieces that one global batch is split into: dp * microbatches."""
        return self.dp * self.microbatches

    def sizes(self, num_samples: int, shares: Sequence[int] = ()) -> list[int]:
        """Samples of each chunk of a batch, in order of chunks.

        shares: of the replicas, relative. Default: those of the plan, even if they are measured.

        >>> Plan(dp=2, microbatches=2).sizes(10), Plan(dp=2, microbatches=2, shares="4+1").sizes(10)
        ([3, 3, 2, 2], [4, 4, 1, 1])
        """
        return chunk_sizes_of(self, num_samples, shares)

    def largest_share(self, num_samples: int) -> list[int]:
        """Samples of each nonempty microbatch of the replica with the largest part of a batch; the first such
        replica."""
        sizes, m = self.sizes(num_samples), self.microbatches
        largest = max((sizes[start : start + m] for start in range(0, len(sizes), m)), key=sum)
        return [size for size in largest if size]

    def check_batch(self, batch_size: int) -> None:
        """Raise `PlanError` if a batch of `batch_size` samples cannot be run under this plan."""
        check_batch(self, batch_size)

    @staticmethod
    def parse(text: str) -> Plan:
        """Read the text form, `key=value` joined by `,`. Raises `PlanError`."""
        return Plan.from_dict(parse_settings(text, DEFAULTS))

    @staticmethod
    def from_dict(settings: Mapping[str, object]) -> Plan:
        """Build a plan from settings by name, as read from JSON. Raises `PlanError`."""
        for name in settings:
            check_setting(name, DEFAULTS)
        return Plan(**settings)  # type: ignore[arg-type]  # __post_init__ checks the type of every value

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read the JSON form. Raises `PlanError`."""
        return Plan.from_dict(parse_json(text))

    def to_dict(self) -> dict[str, Any]:
        """Settings that differ from their default, and dp."""
        settings = {name: getattr(self, name) for name in DEFAULTS}
        given = {key: value for key, value in settings.items() if value != DEFAULTS[key] or key == "dp"}
        plain = {Pairs: dict, tuple: list}
        return {key: plain.get(type(value), lambda same: same)(value) for key, value in given.items()}

    def to_json(self) -> str:
        """The JSON form."""
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        return ",".join(f"{name}={text_of(getattr(self, name))}" for name in self.to_dict())

    def __repr__(self) -> str:
        return f"Plan({str(self)!r})"


DEFAULTS: Mapping[str, Any] = {field.name: field.default for field in fields(Plan)}


def _take_types(plan: Plan) -> None:
    """Settings as they may come from JSON get their own types. Raises `PlanError` for those that cannot."""
    if isinstance(plan.tp_placements, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        object.__setattr__(plan, "tp_placements", Pairs(plan.tp_placements))
    if plan.compile != "none":
        object.__setattr__(plan, "compile", complete_compile(plan.compile))
    if isinstance(plan.cuts, list):
        object.__setattr__(plan, "cuts", tuple(plan.cuts))
    for name, default in DEFAULTS.items():
        if isinstance(default, float) and type(getattr(plan, name)) is int:
            object.__setattr__(plan, name, float(getattr(plan, name)))
        check_type(name, getattr(plan, name), default)


def _check_computation(plan: Plan) -> None:
    for name in ("dp", "pp", "tp", "microbatches", "bucket_bytes"):
        if getattr(plan, name) < 1:
            raise PlanError(f"{name}={getattr(plan, name)} must be 1 or more.")
    if plan.memory_bytes < 0:
        raise PlanError(f"memory_bytes={plan.memory_bytes} must be 0 (no limit) or more.")
    check_zero(plan.zero, plan.zero_within, plan.dp)
    if plan.compile != "none":
        check_compile(plan)
    for pattern, placement in plan.tp_placements.items():
        check_placement(pattern, placement)
    if plan.tp_placements and plan.tp == 1:
        raise PlanError(
            f"tp_placements={text_of(plan.tp_placements)} shards over tp, and tp=1. Use tp=2 or more, or leave tp_placements out."
        )
    check_pipeline(plan, DEFAULTS)


def _check_combinations(plan: Plan) -> None:
    """Raise `PlanError` for a precision without what it needs, for workers of several ranks, and for settings of plans that run
    the user's modules, where a captured program runs."""
    if not plan.synchronous and plan.tp * plan.pp > 1:
        raise PlanError(
            f"exchange={plan.exchange} has workers of one rank each. Leave tp and pp out, or use exchange=all_reduce."
        )
    check_precision(plan)
    check_parameters(plan.precision, plan.exchange, sums=EXCHANGES[plan.exchange].sums)
    if not plan.divides_loss:
        return
    if plan.zero == 3 and plan.compiles:
        raise PlanError(
            "zero=3 with tp, pp or recompute gathers parameters between the operators of a program, where compile=true leaves no place for it. "
            "Use zero=2, compile=none, or dp alone, where the units' modules are compiled."
        )
    name = next(name for name in ("tp", "pp", "recompute") if getattr(plan, name) not in (1, "none"))
    setting = f"{name}={getattr(plan, name)}"
    if plan.sync_batch_norm:
        raise PlanError(
            f"sync_batch_norm=true works on modules, and {setting} runs a captured program. Leave {setting} out, or use sync_batch_norm=false."
        )
