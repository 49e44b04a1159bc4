"""What happened in one step, as plain data: both sides of a verification write the same records.

Comparisons use nothing but a `StepRecord` of the plan and one of the reference; neither knows
how the numbers were computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Setting = bool | float | str  # of an optimizer's group, or a scheduler


@dataclass(frozen=True, kw_only=True)
class ModuleOutput:
    """One call of one module: the sum, the sum of squares and the number of elements of its floating-point
    output.

    All three are additive over the rows of a batch, so ranks that share a chunk can be compared with a device
    that has all of it. ramp: the sum with weights that rise from -1 to 1 from the first element to the last, which tells orders apart; None:
    the output was added up from parts.
    """

    name: str
    call: int
    total: float
    square: float
    count: int
    ramp: float | None = None


@dataclass(frozen=True, kw_only=True)
class Cast:
    """A reduction of precision below that of the parameters: its dtype, and the module (or optimizer) it
    is in. in_gradients: it is of gradients that the loss takes itself. in_products: of float32 values wherever they are
    multiplied, by a setting of torch; float16 stands for TF32."""

    place: str
    dtype: str
    in_optimizer: bool
    in_gradients: bool = False
    in_products: bool = False


@dataclass(frozen=True, kw_only=True)
class ChunkRecord:
    """One microbatch of one replica. Empty chunks have no samples, no draws and no modules.

    index: replica * microbatches + number of the microbatch.
    data: digest of the batch passed to the loss.
    modules: outputs of all modules, in order of execution.
    loss_sum, weight, draws, logged: of one device, whose mean loss is the quotient of the first two; whether it draws random numbers, and what the
    loss logs.
    """

    index: int
    samples: int
    weight: float = 0.0
    loss_sum: float = 0.0
    data: str = ""
    draws: bool = False
    modules: tuple[ModuleOutput, ...] = ()
    logged: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step of all replicas together.

    loss, weight: global mean, and its divisor.
    gradient_norm: 2-norm of the whole gradient before clipping.
    gradients: of one device, by parameter name, averaged, not clipped, subsampled; None for unused
        parameters. Full tensors are compared as they arrive and are not kept.
    chunks: of all replicas, in order of their index; empty ones may be missing.
    replicas: a digest of each replica's parameters after the update. apart: names of what replicas have others of, if they do.
    logged: by the loss, means over the batch; of the plan, as it reports them.
    casts: the reductions of precision in the step.
    skipped: whether there was no update, as scaled gradients overflowed. inconsistent: what differs between ranks of a replica
        that hold the same, a sentence each. settings: numbers, switches and words in the groups of optimizers after the step, by what they are, of
    one device or of each rank.
    """

    step: int
    loss: float
    weight: float
    gradient_norm: float | None
    gradients: Mapping[str, Tensor | None]
    chunks: Sequence[ChunkRecord]
    replicas: Sequence[str] = ()
    apart: Sequence[str] = ()
    logged: Mapping[str, float] = field(default_factory=dict[str, float])
    casts: Sequence[Cast] = ()
    skipped: bool = False
    inconsistent: Sequence[str] = ()
    settings: Sequence[Mapping[str, Setting]] = ()


def logged_means(chunks: Sequence[ChunkRecord]) -> dict[str, float]:
    """What losses have logged, in the mean over the chunks that did, with the weights of their losses."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for each in chunks for name in each.logged):
        weighted = [(each.logged[name] * each.weight, each.weight) for each in chunks if name in each.logged]
        total, weight = map(sum, zip(*weighted, strict=True))
        found[name] = total / weight if weight else math.nan
    return found


def settings_of(
    optimizers: Sequence[Optimizer], schedulers: Sequence[Any], rates: Sequence[float] | None = None
) -> dict[str, Setting]:
    """The numbers, switches and words in groups of optimizers, those that torch's schedulers keep, and the learning rates of all groups, as a run reports
    them. rates: what it reports; None: what it should."""
    states = [each.state_dict() if isinstance(each, LRScheduler) else {} for each in schedulers]
    groups = [each.param_groups for each in optimizers]
    right = [float(each["lr"]) for of_one in groups for each in of_one if "lr" in each]
    reported = enumerate(right if rates is None else rates)
    return named_settings(groups, states) | {
        f"learning rate {number}, as it is reported,": rate for number, rate in reported
    }


def named_settings(
    optimizers: Sequence[Sequence[Mapping[str, Any]]], schedulers: Sequence[Any]
) -> dict[str, Setting]:
    """Of the groups of each optimizer and the state of each scheduler, by what they are: "lr of group 0 of optimizer 0", "last_epoch of scheduler 0"."""
    found: dict[str, Mapping[str, Any]] = {
        f"group {place} of optimizer {number}": group
        for number, groups in enumerate(optimizers)
        for place, group in enumerate(groups)
    }
    found |= {
        f"scheduler {number}": each for number, each in enumerate(schedulers) if isinstance(each, Mapping)
    }
    return {
        f"{key} of {what}": value if isinstance(value, bool | str) else float(value)
        for what, values in found.items()
        for key, value in _single_values(values)
        if isinstance(value, bool | int | float | str | Tensor)
    }


def same_setting(what: str, a: Setting, b: Setting, of_losses: float) -> bool:
    """Whether two settings of this name are equal, numbers to 1e-6 of their size, and to `of_losses` what a scheduler keeps of losses."""
    allowed = of_losses if what.startswith("best of scheduler ") else 1e-6
    if isinstance(a, bool | str) or isinstance(b, bool | str):
        return a == b
    return math.isclose(a, b, rel_tol=allowed) or (math.isnan(a) and math.isnan(b))


def shown_setting(value: Setting) -> str:
    """As text."""
    return str(value) if isinstance(value, bool | str) else f"{value:g}"


def _single_values(group: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, given in group.items():
        if key in ("params", "param_names") or (isinstance(given, Tensor) and given.numel() != 1):
            continue
        if isinstance(given, list | tuple):
            yield from ((f"{key}[{number}]", each) for number, each in enumerate(given))
        else:
            yield key, given
