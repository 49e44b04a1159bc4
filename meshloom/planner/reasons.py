"""The reasons for a plan, in words for newcomers to the field: what each kind of parallelism does, what it
costs, and what decided."""

from __future__ import annotations

from collections.abc import Sequence

from meshloom.core.exchanges import EXCHANGES, ZERO_SLICES
from meshloom.core.plan import Plan
from meshloom.core.units import format_bytes, format_seconds
from meshloom.machine.all_reduce_costs import ring_seconds, server_seconds
from meshloom.machine.machine import Machine
from meshloom.planner.pricing import Devices, Option

WORTH_SAYING = 0.1  # of a step


def why_of(option: Option, best: Option | None) -> str:
    """What the plan does, and its advantages and disadvantages beside the recommended one."""
    parts = [what_it_does(option.plan)]
    sent = ", ".join(f"{format_bytes(count)} along {axis}" for axis, count in option.num_bytes.items())
    parts.append(f"a rank sends {sent} a step" if sent else "nothing is sent")
    price = option.price
    if not option.fits:
        parts.append(
            f"does not fit: a rank would hold {format_bytes(option.memory_bytes)} of {format_bytes(option.limit_bytes)}"
        )
    elif best and option.plan == best.plan:
        parts.append("recommended")
    elif best and option.times(best) > 1:
        causes = [
            (price.idle_share, "ranks wait or communicate"),
            (price.exchange / price.seconds, "the exchange of gradients takes"),
            ((price.update - price.disk) / price.seconds, "the update takes"),
            (price.disk / price.seconds, "reading and writing the optimizer's state takes"),
        ]
        share, what = max(causes)
        slower = f"{option.times(best):.2f} times the step of {best.plan}"
        parts.append(f"{slower}; {what} {share:.0%} of it" if share > WORTH_SAYING else slower)
    elif best:
        parts.append(f"as fast as {best.plan}, which is simpler")
    return "; ".join(parts)


def what_it_does(plan: Plan) -> str:
    """The plan in plain words.

    >>> what_it_does(Plan(dp=2))
    'each of 2 replicas trains on half of the batch and they add up their gradients'
    >>> what_it_does(Plan())
    'one rank does everything'
    """
    parts: list[str] = []
    if plan.dp > 1:
        share = {2: "half", 3: "a third", 4: "a quarter"}.get(plan.dp, f"1/{plan.dp}")
        parts.append(
            f"each of {plan.dp} replicas trains on {share} of the batch and {EXCHANGES[plan.exchange].agreement}"
        )
    if plan.pp > 1:
        chunks = (
            f"{plan.microbatches} microbatches"
            if plan.microbatches > 1
            else "the batch in one piece, so that one rank works at a time"
        )
        parts.append(f"the layers are split over {plan.pp} ranks, which pass on {chunks}")
    elif plan.microbatches > 1:
        parts.append(f"a replica's share is computed in {plan.microbatches} pieces, one after another")
    if plan.tp > 1:
        parts.append(
            f"every layer is sharded over {plan.tp} ranks, which add up their partial results in each"
        )
    if plan.zero_within:
        parts.append(
            f"parameters are sliced over {plan.zero_within} replicas, so that few bytes leave a host"
        )
    parts = parts or ["one rank does everything"]
    return ", and ".join([*parts, *["the optimizer's state is on a disk"] * (plan.offload != "none")])


def reason_of(one_device_bytes: int, limit: int, best: Option | None, options: Sequence[Option]) -> str:
    """Which plan to use, and why (R8.4)."""
    fits = one_device_bytes <= limit
    room = f"A step on one device holds {format_bytes(one_device_bytes)}, and there are {format_bytes(limit)}"
    if best is None:
        closest = min(options, key=lambda each: each.memory_bytes, default=None)
        least = (
            f"; the plan that needs least, {closest.plan}, needs {format_bytes(closest.memory_bytes)} of {format_bytes(closest.limit_bytes)}"
            if closest
            else ""
        )
        return f"{room}. No plan on these devices fits{least}. Use more devices, a smaller batch or recompute=full."
    plan = best.plan
    alone = next((each for each in options if each.plan == Plan()), None)
    faster = (
        f", {alone.times(best):.2f} times as fast as one rank" if alone and best.plan != alone.plan else ""
    )
    if fits and plan.mesh.size == 1:
        return f"{room}, so the model fits. Take one rank: on these devices every split costs more than it saves."
    if fits and plan.mesh.size == plan.dp:
        return f"{room}, so every rank can hold the whole model: split the batch, not the model. Take {plan}{faster}."
    if fits:
        replicas = min(
            (each for each in options if each.plan.mesh.size == each.plan.dp > 1 and each.fits),
            key=lambda each: each.seconds,
            default=None,
        )
        beside = (
            f"; the best that splits only the batch, {replicas.plan}, takes {replicas.times(best):.2f} times as long"
            if replicas
            else ""
        )
        return f"{room}, so splitting the batch would do, but splitting the model is faster here{beside}. Take {plan}{faster}."
    how = [f"pp={plan.pp} gives each rank some of the layers"] * (plan.pp > 1) + [
        f"tp={plan.tp} gives each rank a shard of every layer"
    ] * (plan.tp > 1)
    how += [f"zero={plan.zero} divides {' and '.join(ZERO_SLICES[: plan.zero])}"] * (plan.zero > 0)
    how += ["offload=optimizer keeps the optimizer's state on a disk"] * (plan.offload != "none")
    how += [f"microbatches={plan.microbatches} keeps the activations of fewer samples at a time"] * (
        plan.pp == 1 < plan.microbatches
    )
    how += [f"dp={plan.dp} lets each rank hold the activations of fewer samples"] * (not how)
    need = "has to be split" if plan.mesh.size > 1 else "cannot be in memory as it is"
    return (
        f"{room}, so the whole model does not fit and {need}. Take {plan}: {' and '.join(how)}, a rank holds {format_bytes(best.memory_bytes)}, "
        f"and of the plans that fit it is the fastest."
    )


def disk_rate_sentence(machine: Machine) -> str:
    """By which rate offloaded state is priced."""
    source = (
        "as measured" if machine.disk_bytes_per_second else "which is assumed: meshloom calibrate measures it"
    )
    return (
        f"offload=optimizer: all of a host's state is read and written in each step at {format_bytes(round(machine.disk_rate))} a second, {source}; "
        "what stays in the page cache is not waited for."
    )


def exchange_reason(options: Sequence[Option], devices: Devices) -> str:
    """All-reduce or a server, by formulas (R3.3) with the measured cost of a message; "" if no plan has
    replicas or no link was measured."""
    replicas = [each for each in options if each.plan.dp > 1 and each.plan.mesh.size == each.plan.dp]
    link = next(
        (
            each
            for each in devices.machine.links
            if each.collective == "send" and each.place == devices.places.dp
        ),
        None,
    )
    if not replicas or link is None:
        return ""
    option = max(replicas, key=lambda each: each.plan.dp)
    n, size = option.plan.dp, option.num_bytes.get("dp", 0)
    per_message = link.latency_seconds, link.bytes_per_second
    ring, server = ring_seconds(size, n, *per_message), server_seconds(size, n, *per_message)
    if devices.common_memory:
        how = "ranks of one host that share memory read each other's gradients in place, and nothing is sent twice"
    elif server < ring:
        how = "so little is sent that the number of messages decides, and exchange=server may be faster; --plan prices it"
    else:
        how = "every link carries the same, while all of a server's traffic goes over one"
    return (
        f"Exchange: all_reduce (the default). For {format_bytes(size)} on {n} ranks a ring's formula says {format_seconds(ring)}, one server's "
        f"{format_seconds(server)}: {how}."
    )
