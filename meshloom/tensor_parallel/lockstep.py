"""All ranks' programs in one thread, node by node: a reshard is an operation on the list of all ranks'
tensors.

No rank waits for another, and all ranks' values can be inspected after every node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from meshloom.core.random import seed_torch
from meshloom.data.to_device import lifted
from meshloom.program.ir.batch_values import tensor_of
from meshloom.program.ir.callables import keyed, keyed_out_of_place, out_of_place
from meshloom.program.ir.contexts import Entered
from meshloom.program.ir.leaves import leaves_of
from meshloom.program.ir.nodes import Node, Ref, last_uses
from meshloom.program.ir.program import Program
from meshloom.program.operators.collectives import Joint

State = Mapping[str, Tensor]


def run_in_lockstep(
    programs: Sequence[Program],
    parameters: Sequence[State],
    buffers: Sequence[State],
    batch: Any,
    *,
    dtype: torch.dtype | None = None,
    visit: Callable[[Node, list[Any]], None] | None = None,
) -> list[Any]:
    """The outputs of the loss on every rank.

    parameters, buffers: rank -> its shards by name. dtype: computes everything floating-point in it, as
        `Program.run` does.
    visit: called with every node and all ranks' values.
    """
    ranks = range(len(programs))
    values: list[dict[str, Any]] = [{} for _ in ranks]
    leaves = leaves_of(batch)
    for rank, program in enumerate(programs):
        known = values[rank]
        known.update({each.value: parameters[rank][name] for name, each in program.parameters.items()})
        known.update({each.value: buffers[rank][name] for name, each in program.buffers.items()})
        known.update({name: _lifted(each, dtype) for name, each in program.constants.items()})
        known.update({each.value: _lifted(tensor_of(leaves, each, dtype), dtype) for each in program.inputs})
    contexts = tuple(dict.fromkeys(node.context for program in programs for node in program.nodes))
    over = [
        last_uses(program.nodes, (program.outputs, tuple(program.updates.values()))) for program in programs
    ]
    with Entered(contexts, device=programs[0].device.type, lifted=dtype is not None) as entered:
        for nodes in zip(*(program.nodes for program in programs), strict=True):
            entered.move_to(contexts.index(nodes[0].context))
            results = _run(nodes, values, dtype)
            for rank, result in enumerate(results):
                values[rank][nodes[0].name] = result
            if visit is not None:
                visit(nodes[0], results)
            for known, names in zip(values, over, strict=True):
                for name in names.get(nodes[0].name, ()):
                    known.pop(name, None)
    for rank, program in enumerate(programs):
        with torch.no_grad():
            for name, ref in program.updates.items():
                buffers[rank][name].copy_(values[rank][ref.name])
    return [
        tree_unflatten([_look_up(each, values[rank], None) for each in program.outputs], program.out_spec)
        for rank, program in enumerate(programs)
    ]


def _run(nodes: Sequence[Node], values: Sequence[Mapping[str, Any]], dtype: torch.dtype | None) -> list[Any]:
    target = nodes[0].target
    given = [
        _look_up((node.args, dict(node.kwargs)), known, dtype)
        for node, known in zip(nodes, values, strict=True)
    ]
    if isinstance(target, Joint):
        return target.run_all(*(list(column) for column in zip(*(args for args, _ in given), strict=True)))
    seed = torch.default_generator.initial_seed()
    results: list[Any] = []
    for node, (args, kwargs) in zip(nodes, given, strict=True):
        run = node.target
        if node.num_draws:
            seed_torch(seed)  # every rank draws the same numbers
            run = keyed_out_of_place if node.target is out_of_place else partial(keyed, node.target)
        results.append(run(*args, **kwargs))
    return results


def _look_up(value: Any, known: Mapping[str, Any], dtype: torch.dtype | None) -> Any:
    if isinstance(value, Ref):
        return known[value.name]
    if isinstance(value, tuple):
        return tuple(_look_up(each, known, dtype) for each in value)
    if isinstance(value, list):
        return [_look_up(each, known, dtype) for each in value]
    if isinstance(value, dict):
        return {key: _look_up(each, known, dtype) for key, each in value.items()}
    return lifted(value, dtype) if isinstance(value, torch.dtype) else value


def _lifted(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(lifted(tensor.dtype, dtype))
