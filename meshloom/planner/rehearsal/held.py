"""What a rank that has been opened holds, from what it is made of."""

from __future__ import annotations

from collections.abc import Sequence

from meshloom.exchange.buckets.gradient_bytes import held_gradients
from meshloom.exchange.units.unit_slices import UnitFlat
from meshloom.exchange.zero_three import slices_of
from meshloom.planner.memory.rank_memory import HeldBytes, state_by_place
from meshloom.replica.replica import Replica


def held_by(replica: Replica, kept: int, optimizer_factor: float) -> HeldBytes:
    """kept: bytes saved for backward. optimizer_factor: bytes of optimizer state per byte of parameters."""
    plan, exchange = replica.plan, replica.exchange
    there = {name: each for name, each in replica.model.named_parameters() if not each.is_meta}
    trained = {name: each.nbytes for name, each in there.items() if each.requires_grad}
    owned_names = {name for name, _ in replica.named}
    one_copy, updated = exchange.ownership.memory == "shared", replica.updater.updated
    itemsizes = {name: each.itemsize for name, each in replica.model.named_parameters()}
    owned = sum((each.stop - each.start) * itemsizes[each.name] for parts in updated.held for each in parts)
    whole = sum(each.nbytes for each in there.values())
    gradients, on_the_way = held_gradients(plan, trained, owned_names, replica.engine.late, one_copy=one_copy)
    full = 0
    sliced = slices_of(exchange) if exchange.ownership.memory == "sliced" else None
    if sliced is not None:
        whole = sum(part.kept.nbytes for unit in sliced.units for part in unit.parts)
        full = _at_one_time([(unit.module is None, unit.parts) for unit in sliced.units])
        gradients = sum(part.kept.nbytes for unit in sliced.units for part in unit.trainable_parts)
        on_the_way = _at_one_time([(unit.module is None, unit.trainable_parts) for unit in sliced.units])
    # what this rank updates as a whole, beside its slices and shards of it
    local = set(map(id, there.values())) if sliced is None else set[int]()
    whole += sum(each.nbytes for each in updated.full if id(each) not in local)
    if plan.tp > 1 or plan.zero >= 2:
        gradients += sum(each.nbytes for each in updated.full)
    return HeldBytes(
        parameters=-(-whole // plan.dp) if one_copy else whole,
        gradients=gradients,
        **state_by_place(plan, round(optimizer_factor * owned)),
        buffers=sum(each.nbytes for each in replica.model.buffers() if not each.is_meta),
        kept=kept,
        trained=sum(size for name, size in trained.items() if name in owned_names),
        on_the_way=on_the_way,
        full=full,
    )


def _at_one_time(units: Sequence[tuple[bool, Sequence[UnitFlat]]]) -> int:
    """Full bytes of the rest, which stays, and of the two largest units. units: whether each is the rest, and its
    flat tensors."""
    sizes = [(stays, sum(part.num_bytes for part in parts)) for stays, parts in units]
    return sum(size for stays, size in sizes if stays) + sum(
        sorted(size for stays, size in sizes if not stays)[-2:]
    )
