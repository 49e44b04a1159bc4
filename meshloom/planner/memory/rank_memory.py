"""The peak of one rank's memory under a plan, by kind, and in each phase of a run.

start-up       the model is made, and what the rank does not hold is let go of
step           forwards, backwards, exchange, update
evaluation     a forward that saves nothing, beside all that stays and a copy of the buffers
checkpoint     what a rank has of the state is written from where it is
verification   the step, with one device's reference on rank 0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from meshloom.core.exchanges import EXCHANGES, REDUCED_AS, compression_of
from meshloom.core.plan import Plan
from meshloom.core.precisions import PRECISIONS
from meshloom.optimizer.offload.windows import WINDOW_BYTES
from meshloom.planner.memory.step_facts import StepFacts

PHASES = ("start-up", "step", "evaluation", "checkpoint", "verification")


@dataclass(frozen=True, kw_only=True)
class HeldBytes:
    """Bytes that a rank holds: always, and at most between forwards and backwards. The batch and temporaries
    are not included.

    computing: at most beyond what is there between steps, while forwards and backwards run, with gradients unless these are copied into buckets at once;
        temporaries: those of them that come and go within one. parameters: its own, or its share of one copy that several ranks have. trained: of those that it and its
        replicas update. gradients: of what it updates. on_the_way: buckets beside these and, under zero=3, full
        gradients of units. full: under zero=3 the full parameters that are there at one time. offloaded: of the optimizer's state, what
        lies in a file or, of a GPU's rank, in host memory; no part of `optimizer` or the total.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    kept: int
    trained: int
    computing: int = 0
    temporaries: int = 0
    on_the_way: int = 0
    full: int = 0
    offloaded: int = 0

    @property
    def total(self) -> int:
        """The sum of what it holds."""
        stays = self.parameters + self.gradients + self.optimizer + self.buffers
        return stays + self.kept + self.on_the_way + self.full


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on one rank. Each kind is the largest of its kind, so they may add up to more than the peak.

    exchange: buckets, full units, and what a compression or an outer step keeps. phases: phase -> most bytes at
    one time in it. offloaded: of the optimizer's state, elsewhere; not in the phases, but for what an update needs at
    one time.
    """

    parameters: int
    buffers: int
    optimizer: int
    gradients: int
    batch: int
    kept: int
    temporaries: int
    exchange: int
    phases: Mapping[str, int]
    offloaded: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", MappingProxyType(dict(self.phases)))

    @property
    def peak(self) -> int:
        """Most bytes at one time while training: in all phases but verification, which is another run."""
        return self.phases[self.phase]

    @property
    def phase(self) -> str:
        """In which that is."""
        return max(PHASES[:-1], key=lambda phase: self.phases[phase])

    def kinds(self) -> dict[str, int]:
        """Bytes by kind."""
        return {
            name: int(getattr(self, name))
            for name in ("parameters", "buffers", "optimizer", "gradients", "batch", "kept", "temporaries", "exchange", "offloaded")
        }  # fmt: skip


def memory_of_rank(
    plan: Plan, held: HeldBytes, facts: StepFacts, *, microbatches: int, first: bool, one_copy: bool = False,
    background: bool = False,
) -> RankMemory:  # fmt: skip
    """facts: of the whole model. microbatches: of a replica. first: whether it is rank 0, which captures and
    verifies. one_copy: as for `predict_memory`. background: checkpoints are written while training goes on."""
    share = held.trained / facts.trained if facts.trained else 0.0
    batch = facts.batch * microbatches
    stays, passing = _of_exchange(plan, held, one_copy=one_copy)
    in_units = held.full > 0  # what is on the way is there while units compute
    between = held.parameters + held.buffers + facts.constants + held.optimizer + held.gradients + stays
    between += 0 if in_units else held.on_the_way
    computing = between + batch + held.full + (held.on_the_way if in_units else 0) + held.computing
    computing -= 0 if has_buckets(plan) else held.gradients
    if held.full and microbatches == 1:  # slices of gradients are made as units complete theirs
        computing -= held.gradients + held.on_the_way // 2
    window = window_bytes(held.offloaded, facts.largest // plan.tp, facts.optimizer_factor)
    slices = plan.mesh.num_slices if plan.zero else plan.dp if one_copy else 1
    masters = round(facts.master_gradients * share) // slices
    updating = between + batch + max(facts.update // plan.tp + window + masters, passing)
    after = between - held.gradients if in_units else between  # slices of gradients go with the update
    phases = {
        "start-up": _start(plan, held, facts, first=first, one_copy=one_copy),
        "step": max(computing, updating),
        "evaluation": after + batch + held.full + held.buffers + facts.evaluation // plan.tp,
        # one full tensor, where ranks of several hosts send them
        "checkpoint": after + (facts.largest if plan.mesh.size > 1 else 0),
    }
    if background and plan.offload == "none":  # steps go on beside the copy
        phases["checkpoint"] = phases["step"] + copied_by(held, plan, one_copy=one_copy)
    phases["verification"] = max(phases["step"], between + facts.largest)
    if (
        first
    ):  # one device's parameters before and after an update, gradients and state; a chunk while others wait
        phases["verification"] = held_by_one_device(facts) + max(
            phases["step"], between + facts.chunks + facts.batch
        )
    return RankMemory(
        parameters=held.parameters,
        buffers=held.buffers,
        optimizer=held.optimizer,
        gradients=held.gradients,
        batch=batch,
        kept=held.kept,
        temporaries=held.temporaries + facts.constants,
        exchange=stays + held.on_the_way + held.full,
        phases=phases,
        offloaded=held.offloaded,
    )


def held_by_one_device(facts: StepFacts) -> int:
    """Bytes that one device, which a plan is compared with, holds as an update ends: parameters before and after it, gradients and state."""
    return 2 * facts.parameters + round((1 + facts.optimizer_factor) * facts.trained) + facts.buffers


def state_by_place(plan: Plan, num_bytes: int) -> dict[str, int]:
    """Bytes of optimizer state as fields of `HeldBytes`: with the rest, or offloaded."""
    return {"optimizer": num_bytes} if plan.offload == "none" else {"optimizer": 0, "offloaded": num_bytes}


def window_bytes(offloaded: int, largest: int, factor: float) -> int:
    """Of offloaded state, bytes that are in memory at one time in an update. largest: bytes of a parameter. factor:
    bytes of state per byte of parameters."""
    return min(offloaded, round(max(WINDOW_BYTES, largest) * factor))


def gathered_bytes(plan: Plan, gathered: int) -> tuple[int, int]:
    """What a rank holds besides its parts for an optimizer that looks at all of its parameters, `gathered` bytes: values and
    gradients."""
    values = gathered if plan.tp > 1 or plan.zero == 3 else 0
    return values, gathered if plan.tp > 1 or plan.zero >= 2 else 0


def with_gathered(held: HeldBytes, plan: Plan, gathered: int, factor: float) -> HeldBytes:
    """The same with `gathered_bytes`, and all of such an optimizer's state. factor: its bytes per byte of parameters."""
    values, gradients = gathered_bytes(plan, gathered)
    parts = plan.tp * (plan.mesh.num_slices if plan.zero else 1)
    return replace(
        held,
        parameters=held.parameters + values,
        gradients=held.gradients + gradients,
        optimizer=held.optimizer + round(factor * (gathered - gathered // parts)),
    )


def has_buckets(plan: Plan) -> bool:
    """Whether gradients are copied into memory that is there all the time as soon as they are computed."""
    return plan.dp > 1 and not EXCHANGES[plan.exchange].independent


def _start(plan: Plan, held: HeldBytes, facts: StepFacts, *, first: bool, one_copy: bool) -> int:
    """Start-up. A rank that holds a part of the model fills it tensor by tensor; one that holds all of it builds it.
    The rank that captures the loss compares the program with eager before."""
    comparison = facts.comparison if first else 0
    buckets = held.gradients + held.on_the_way if has_buckets(plan) and not held.full else 0
    flat = plan.dp > 1 and not one_copy and (plan.zero in (1, 2) or plan.exchange == "server")
    buckets += (
        held.parameters if flat else 0
    )  # parameters move into flat tensors, which buckets are slices of
    is_part = plan.tp > 1 or plan.pp > 1 or held.full > 0 or one_copy
    own = held.parameters if is_part else facts.parameters
    return max(comparison, own + held.buffers + max(facts.largest if is_part else 0, buckets))


def copied_by(held: HeldBytes, plan: Plan, *, one_copy: bool = False) -> int:
    """Bytes of host memory for what a rank copies for a checkpoint in the background: its part of the state."""
    parameters = held.parameters if one_copy or plan.zero == 3 else -(-held.parameters // plan.dp)
    state = held.optimizer
    state = state if one_copy or plan.zero else -(-state // plan.dp)
    return parameters + state + held.buffers


def _travelling(plan: Plan, gradients: int) -> int:
    """Bytes of copies of gradients that travel in another dtype."""
    own = PRECISIONS[plan.precision].parameters or "float32"
    sent = REDUCED_AS[plan.reduce] or own
    itemsizes = {"float32": 4, "bfloat16": 2}
    return gradients * itemsizes[sent] // itemsizes[own] if sent != own else 0


def _of_exchange(plan: Plan, held: HeldBytes, *, one_copy: bool) -> tuple[int, int]:
    """What the exchange along dp holds besides buckets and units: all the time, and after a step's chunks."""
    if plan.dp == 1:
        return 0, 0
    owned = held.trained
    stays, passing = compression_of(plan)[0].holds(owned, plan.bucket_bytes)
    copies = _travelling(plan, owned)
    if plan.zero >= 2:  # of what is on the way at one time
        stays += min(copies, held.on_the_way // 2)
    else:
        passing += copies
    if plan.exchange == "server":
        stays += plan.dp * -(-owned // plan.servers)  # where a server receives everybody's gradients
    if plan.exchange in ("local_sgd", "diloco"):
        passing += owned  # the mean
        stays += 2 * owned if plan.exchange == "diloco" else 0  # the round's beginning, and momentum
    if plan.zero in (1, 2) and not one_copy:
        passing += -(-owned // plan.dp)  # each rank's part is copied to be sent
    return stays, passing
