"""Opaque modules whose hidden units are divided: each rank runs the user's own code on its units, and results are summed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshloom.program.opaque.operator import call_of_node
from meshloom.tensor_parallel.rules.factors import Dims, Factors, Product, ShardSizes
from meshloom.tensor_parallel.rules.operator_call import Call, replicated, set_argument

UNITS = "units"


def factors_of_units(call: Call) -> Factors | None:
    """The factor map of an opaque call; None: it has no units."""
    found = call_of_node(call.node)
    units = found.units
    if units is None:
        return None
    num_inputs = len(call.arguments["inputs"])
    operands = list(replicated(call.operands))
    sizes = {UNITS: units.count}
    for each in units.dims:
        dims: list[Any] = list(operands[num_inputs + each.number])
        label = UNITS
        if each.outer * each.inner > 1:
            name, size = ("outer", each.outer) if each.outer > 1 else ("inner", each.inner)
            repeated = f"{name}{size}"
            sizes[repeated] = size
            parts = (repeated, label) if each.outer > 1 else (label, repeated)
            dims[each.dim] = Product(parts)
        else:
            dims[each.dim] = label
        operands[num_inputs + each.number] = tuple(dims)

    def local(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shard: ShardSizes) -> Any:
        mine = replace(units, held=shard.local[UNITS], is_first=shard.rank == 0)
        here = replace(found, units=mine, cost=found.cost.times(mine.work))
        return set_argument(target, args, kwargs, "call", here.text())

    outputs: tuple[Dims, ...] = tuple((None,) * len(each.shape) for each in call.outputs)
    return Factors(
        operands=tuple(operands),
        outputs=outputs,
        sizes=sizes,
        unsharded=frozenset(sizes.keys() - {UNITS}),
        sums=frozenset({UNITS}),
        contiguous=frozenset({UNITS}),
        drawn=(),
        local=local,
        undivided=replace(units, held=0, is_first=False).work,
    )
