"""Advice: what a job costs under the plans that its devices allow, which plan to use, and why.

trace the job by shapes      does it fit on one device
rehearse each plan           what its ranks compute, send and hold
price it on the machine      seconds of a step
compare                      the fastest that fits; of those about as fast, the simplest
try some of them             the same by measured steps, if requested (measure/trials.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType

from meshloom.core.cache import Cache
from meshloom.core.errors import CaptureError, MeshloomError, PlanError
from meshloom.core.job import Job
from meshloom.core.losses.in_precision import in_precision
from meshloom.core.plan import Plan
from meshloom.optimizer.bfloat16.lowered import lowered
from meshloom.planner.amdahl import AmdahlWork
from meshloom.planner.candidates import candidates, offloading
from meshloom.planner.memory.memory import Memory
from meshloom.planner.pricing import Devices, Option, Pricer, Speedup
from meshloom.planner.reasons import disk_rate_sentence, exchange_reason, reason_of, why_of
from meshloom.telemetry.timings import Timings

AS_FAST = 0.03  # of the step: a smaller gain is not worth a more complicated plan


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Options that fit, fastest first, then those that do not; before both, those that were tried. refused:
    plan -> why it cannot run this job.

    one_device: memory of a step on one device. recommended: None if nothing fits. speedups: of data
    parallelism. exchange: the advised exchange, in a sentence. disk: by which rate offloaded state was priced.
    """

    options: tuple[Option, ...]
    refused: Mapping[str, str]
    one_device: Memory
    one_device_limit: int
    recommended: Option | None
    reason: str
    work: AmdahlWork | None
    speedups: tuple[Speedup, ...]
    exchange: str
    disk: str = ""

    @property
    def fits_on_one(self) -> bool:
        """Whether one device has the memory for the whole job."""
        return self.one_device.peak <= self.one_device_limit


def advise(
    job: Job,
    devices: Devices,
    *,
    plans: Iterable[Plan] | None = None,
    tell: Callable[[str], None] = lambda text: None,
    cache: Cache | None = None,
    timings: Timings | None = None,
    check: Callable[[Plan], None] | None = None,
) -> Advice:
    """Prices `plans`, or those worth pricing on these devices. tell: receives a line for each plan, and for what is done before
    any. timings: of what is done for each. cache: of captured losses and choices, from earlier plans and runs. check: raises `PlanError` for
    plans that are refused.

    Raises `PlanError` if none of the plans can run the job, with the last one's error, and the job's own
    errors.
    """
    given = None if plans is None else list(plans)
    tell("reading the loss")
    precisions = dict.fromkeys(each.precision for each in given or [Plan()])
    pricers = {
        name: Pricer(lowered(in_precision(job, each), each), devices, cache, timings)
        for name in precisions
        for each in [Plan(precision=name)]
    }
    pricer = next(iter(pricers.values()))
    short = pricer.one_device.peak > devices.limit(1)
    every = candidates(
        devices.num_ranks, job.batch_size, zero=not devices.common_memory, memory_bytes=devices.memory_bytes if short else 0, short=short,
        ranks_per_host=devices.ranks_per_host if devices.hosts > 1 else 0,
    )  # fmt: skip
    wanted = list(every if given is None else given)
    options: list[Option] = []
    refused: dict[str, str] = {}
    last: MeshloomError | None = None
    for number, plan in enumerate(wanted):
        tell(f"rehearsing plan {number + 1} of {len(wanted)}: {plan}")
        try:
            if check:
                check(plan)
            options.append(pricers[plan.precision].price(plan))
        except (PlanError, CaptureError) as error:
            refused[str(plan)] = str(error)
            last = error
        # where a plan fits, it is never slower than with its state on a disk
        other = offloading(plan) if given is None and devices.machine.device == "cpu" else None
        if other is not None and not (options and options[-1].plan == plan and options[-1].fits):
            with suppress(PlanError, CaptureError):  # then the plan itself was refused
                if check:
                    check(other)
                options.append(pricers[plan.precision].price(other))
    if not options and last is not None:
        raise last
    work, speedups = pricer.speedups(options) if given is None else (None, ())
    return _compared(
        Advice(
            options=tuple(options),
            refused=MappingProxyType(refused),
            one_device=pricer.one_device,
            one_device_limit=devices.limit(1),
            recommended=None,
            reason="",
            work=work,
            speedups=speedups,
            exchange=exchange_reason(options, devices) if given is None else "",
            disk=disk_rate_sentence(devices.machine) if any(each.price.disk for each in options) else "",
        )
    )


def finalists(advice: Advice, number: int) -> list[Option]:
    """The options worth trying: the recommended one, then the fastest that fit, `number` in all."""
    fitting = [each for each in advice.options if each.fits]
    return sorted(
        fitting,
        key=lambda each: (advice.recommended is None or each.plan != advice.recommended.plan, each.seconds),
    )[:number]


def tried(advice: Advice, measured: Mapping[str, float | None]) -> Advice:
    """The advice after some plans were tried. measured: plan -> seconds of a step; None: it failed."""
    failed = {plan: "it failed when it was tried" for plan, seconds in measured.items() if seconds is None}
    options = [
        replace(each, measured_seconds=measured.get(str(each.plan)))
        for each in advice.options
        if str(each.plan) not in failed
    ]
    return _compared(
        replace(advice, options=tuple(options), refused=MappingProxyType({**advice.refused, **failed}))
    )


def _compared(advice: Advice) -> Advice:
    """The advice in order, with recommendation and reasons."""
    ordered = sorted(
        advice.options, key=lambda each: (each.measured_seconds is None, not each.fits, each.seconds)
    )
    best = recommended(ordered)
    ordered = [replace(each, why=why_of(each, best)) for each in ordered]
    return replace(
        advice,
        options=tuple(ordered),
        recommended=next((each for each in ordered if best and each.plan == best.plan), None),
        reason=reason_of(advice.one_device.peak, advice.one_device_limit, best, ordered),
    )


def recommended(options: Sequence[Option]) -> Option | None:
    """The simplest option of those that fit and are about as fast as the fastest: fewer axes, then fewer
    ranks, then fewer microbatches.

    If some were tried, one of those.
    """
    fitting = [each for each in options if each.fits]
    fitting = [each for each in fitting if each.measured_seconds is not None] or fitting
    if not fitting:
        return None
    limit = min(each.seconds for each in fitting) * (1 + AS_FAST)

    def effort(option: Option) -> tuple[int, int, int, int, int, float]:
        plan = option.plan
        split = (plan.tp > 1) + (plan.pp > 1)
        return plan.offload != "none", split, plan.zero, plan.mesh.size, plan.microbatches, option.seconds

    return min((each for each in fitting if each.seconds <= limit), key=effort)
