"""What a change of placement takes, forward and backward."""

from __future__ import annotations

from meshloom.comm.pieces import Pieces, whole
from meshloom.program.cost.rates import Rates
from meshloom.program.ir.nodes import Meta
from meshloom.program.operators.collectives import Kind
from meshloom.program.operators.payload import elements_of_change, elements_of_gather
from meshloom.tensor_parallel.layout.placement import PARTIAL, Part, Placement
from meshloom.tensor_parallel.rules.factors import Talk
from meshloom.tensor_parallel.search.saved_for_backward import HELD_COPIES


def change_seconds(
    meta: Meta, source: Placement, target: Placement, before: Pieces, after: Pieces, rates: Rates, *, regathered: bool = False,
    behind_seconds: float = 0.0,
) -> float | None:  # fmt: skip
    """Seconds of changing a value's placement. None: it cannot be changed so.

    regathered: parts of the value are gathered once more in the backward, instead of being kept.
    behind_seconds: of computing while each thing that the backward sends is on its way. What a collective
        takes to start is not hidden by it.
    """
    if is_same(source, target, before, after):
        return 0.0
    if PARTIAL in (source, target) and not meta.dtype.is_floating_point:
        return None
    try:
        calls = [
            elements_of_change(kind_of(source), kind_of(target), before, after, 0, backward=backward)
            for backward in ((False, True) if meta.requires_grad else (False,))
        ]
        if regathered and meta.requires_grad and isinstance(source, Part) and not before.is_whole:
            calls.append(elements_of_gather(before, whole(before.shape, before.num_ranks), 0))
    except ValueError:  # parts that overlap in more than one dim
        return None
    item, size = meta.dtype.itemsize, meta.num_bytes
    seconds = sum(
        rates.collective_seconds(call[0], call[1] * item, before.num_ranks)
        for call in calls
        if call is not None
    )
    # behind the weights' gradients the sum; behind the input's, which take as long, what is gathered again
    for call in calls[1:]:
        if call is not None:
            on_its_way, started = (
                rates.collective_seconds(call[0], num_bytes, before.num_ranks)
                for num_bytes in (call[1] * item, 0.0)
            )
            seconds -= min(behind_seconds, on_its_way - started)
    # What is sent is put together and taken apart; what is not is looked at, or copied in part.
    touched = sum(2.0 if call is not None else 0.1 for call in calls) + (
        1.0 if target == PARTIAL and isinstance(source, Part) else 0.0
    )
    return seconds + touched * size / rates.bytes_per_second


def is_same(source: Placement, target: Placement, before: Pieces, after: Pieces) -> bool:
    """Whether a value placed one way is placed the other way as well: two cuts may differ in axes alone that
    it has not."""
    return source == target or (isinstance(source, Part) and isinstance(target, Part) and before == after)


def talk_seconds(talk: Talk, item: int, num_ranks: int, rates: Rates) -> float:
    """Seconds of what an operator sends by itself. item: bytes of an element."""
    share = -(-talk.num_elements // num_ranks) if talk.collective == "all_gather" else talk.num_elements
    return talk.times * rates.collective_seconds(talk.collective, share * item, num_ranks)


def holding_seconds(size: float, num_ranks: int, rates: Rates, *, is_shared: bool) -> float:
    """Seconds that holding `size` bytes of a trained parameter is worth. is_shared: several ranks hold some
    of it, and their gradients are summed."""
    # an update reads four tensors of its size and writes three, partly from caches
    seconds = 5 * size / rates.bytes_per_second
    seconds += rates.memory_price * HELD_COPIES * size / rates.link_bytes_per_second
    if is_shared:
        nothing, everything = (
            rates.collective_seconds("all_reduce", num_bytes, num_ranks) for num_bytes in (0.0, size)
        )
        seconds += everything - nothing  # it travels with all others
    return seconds


def kind_of(placement: Placement) -> Kind:
    """The kind of placement that a transition knows."""
    return "part" if isinstance(placement, Part) else "partial" if placement == PARTIAL else "invariant"
