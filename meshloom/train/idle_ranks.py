"""A plan's idle ranks: replicas without samples, ranks along tp that shard nothing, stages without
parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from meshloom.core.plan import Plan
from meshloom.core.units import format_count
from meshloom.replica.replica import Replica


def idle_lines(
    plan: Plan,
    batch_size: int,
    parameters: Collection[str] = (),
    *,
    ownership: Mapping[str, Collection[int]] | None = None,
    divided: int | None = None,
) -> list[str]:
    """For who asked for more ranks than there is work.

    parameters: names of the model's. ownership: name -> ranks along pp that hold it, with pp. divided: how
        many of them are divided over tp, with tp.

    >>> idle_lines(Plan(dp=8), 6)
    ['A batch of 6 samples leaves 2 of dp=8 replicas without any: they compute nothing. dp=6 is enough.']
    >>> idle_lines(Plan(dp=2, microbatches=4), 6)
    ['A batch of 6 samples fills 6 of 8 chunks (dp=2 x microbatches=4): the others are empty.']
    >>> idle_lines(Plan(dp=4, microbatches=4), 8)
    ['A batch of 8 samples leaves 2 of dp=4 replicas without any: they compute nothing. Use at most 2 microbatches, or dp=2.']
    >>> idle_lines(Plan(tp=8), 6, ["a.weight"], divided=0)
    ['tp=8 divides no parameter of the model: every rank along tp holds all of them. Use tp=1; meshloom describe says why.']
    >>> idle_lines(Plan(pp=3), 6, ["a.weight"], ownership={"a.weight": (0,)})
    ['pp=3 leaves 2 ranks along pp (1, 2) without any parameters: the model has too little to divide. Use pp=1.']
    """
    found: list[str] = []
    m, sizes = plan.microbatches, plan.sizes(batch_size)
    idle = sum(not any(sizes[start : start + m]) for start in range(0, len(sizes), m))
    if idle:
        way_out = (
            f"dp={plan.dp - idle} is enough"
            if plan.dp > batch_size
            else f"Use at most {batch_size // plan.dp} microbatches, or dp={plan.dp - idle}"
        )
        found.append(
            f"A batch of {batch_size} samples leaves {idle} of dp={plan.dp} replicas without any: they compute nothing. {way_out}."
        )
    elif not all(sizes):
        found.append(
            f"A batch of {batch_size} samples fills {sum(map(bool, sizes))} of {len(sizes)} chunks (dp={plan.dp} x microbatches={m}): the others are empty."
        )
    if divided == 0 and parameters:
        found.append(
            f"tp={plan.tp} divides no parameter of the model: every rank along tp holds all of them. Use tp=1; meshloom describe says why."
        )
    if ownership is not None and parameters:
        used = {rank for name in parameters for rank in ownership.get(name, ())}
        empty = [rank for rank in range(plan.pp) if rank not in used]
        if empty:
            ranks = f"{format_count(len(empty), 'rank')} along pp ({', '.join(map(str, empty))})"
            found.append(
                f"pp={plan.pp} leaves {ranks} without any parameters: the model has too little to divide. Use pp={max(1, len(used))}."
            )
    return found


def idle_lines_of(replica: Replica, plan: Plan, batch_size: int) -> list[str]:
    """The same for a replica that has been built."""
    division = replica.engine.stages.division
    divided = sum(not each.is_whole for each in division.first.parameters.values()) if division else None
    ownership = replica.engine.holders
    return idle_lines(
        plan,
        batch_size,
        [name for name, _ in replica.model.named_parameters()],
        ownership=ownership,
        divided=divided,
    )
