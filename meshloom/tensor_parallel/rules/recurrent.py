"""Recurrent networks: sharded by batch, or by hidden units, which are then all-gathered in every time
step."""

from __future__ import annotations

from typing import Any

from meshloom.program.operators.collectives import Collective
from meshloom.program.operators.recurrent_shards import (
    NUM_GATES,
    RecurrentKind,
    RecurrentOfPart,
    cell_of_part,
)
from meshloom.tensor_parallel.rules.factors import Dims, Factors, InnerCollective, Product, ShardSizes, Term
from meshloom.tensor_parallel.rules.operator_call import Call, Rule, TensorArgument, given_by_name


def _recurrent(kind: RecurrentKind) -> Rule:
    """lstm, gru, rnn: input [t, b, i] or [b, t, i], states [layers, b, h], weights [(gates h), ...]."""

    def rule(call: Call) -> Factors | None:
        x = call.arguments.get("input")
        first = bool(call.arguments.get("batch_first"))
        if not isinstance(x, TensorArgument) or len(x.shape) != 3:
            return None
        hidden: Any = call.arguments["hx"]
        states = {
            each.number
            for each in (hidden if isinstance(hidden, tuple) else (hidden,))
            if isinstance(each, TensorArgument)
        }
        weights: tuple[TensorArgument, ...] = tuple(call.arguments["params"])
        size = weights[1].shape[0] // NUM_GATES[kind]
        # Layers with projections, or under autocast, are not sharded by hidden units.
        units = "h" if weights[1].shape[1] == size and not call.node.context.autocast else None
        rows: Term = _rows(kind, units)
        sequence: Dims = tuple("b" if each == (0 if first else 1) else None for each in range(3))
        operands: list[Dims] = []
        for operand in call.operands:
            if operand.number == x.number:
                operands.append(sequence)
            elif operand.number in states:
                operands.append((None, "b", units))
            else:
                operands.append((rows, *(None,) * (len(operand.shape) - 1)))
        both = bool(call.arguments["bidirectional"])
        out: Term = units and (Product(("ways", units)) if both else units)
        length, batch = (x.shape[1], x.shape[0]) if first else x.shape[:2]
        layers: int = call.arguments["num_layers"]
        rate = float(call.arguments["dropout"]) if call.arguments["train"] and layers > 1 else 0.0

        def local(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shard: ShardSizes) -> Any:
            if units is None or not shard.is_sharded("h"):
                return target, args, kwargs
            part = RecurrentOfPart(
                kind=kind, held=shard.runs["h"], num_hidden=size, num_layers=layers, has_biases=bool(call.arguments["has_biases"]), dropout=rate,
                num_draws=call.node.num_draws, bidirectional=both, batch_first=first,
            )  # fmt: skip
            given = given_by_name(target, args, kwargs)
            return part, (given["input"], given["hx"], given["params"]), {}

        sizes = (
            {"b": batch}
            | ({"h": size} if units else {})
            | ({"ways": 2} if units and both else {})
            | _gates(kind, units)
        )
        return Factors(
            operands=tuple(operands),
            outputs=((*sequence[:2], out), *((None, "b", units),) * (len(call.outputs) - 1)),
            sizes=sizes,
            unsharded=frozenset({"ways", "gates"} & sizes.keys()),
            nonempty=frozenset({"b", "h"} & sizes.keys()),
            # its features may be the same axis, in layers whose output is added to their input
            replicated=frozenset({x.number}),
            collectives={"h": tuple(_talks(length, batch, size, layers, 2 if both else 1))} if units else {},
            # dropout between layers draws [t, b, h], whatever the order of the operands
            drawn=(None, "b", None),
            local=local,
        )

    return rule


def _cell(kind: RecurrentKind) -> Rule:
    """lstm_cell, gru_cell, ...: input [b, i], states [b, h], weights [(gates h), ...]. If units are sharded,
    every rank needs the full h."""

    def rule(call: Call) -> Factors | None:
        given: Any = call.arguments["hx"]
        states: tuple[TensorArgument, ...] = given if isinstance(given, tuple) else (given,)
        if any(len(each.shape) != 2 for each in (call.operands[0], *states)):
            return None
        batch, size = states[0].shape
        units = None if call.node.context.autocast else "h"
        known = {call.operands[0].number: ("b", None), **{each.number: ("b", units) for each in states}}
        rows = _rows(kind, units)
        operands: list[Dims] = [
            known.get(each.number, (rows, *(None,) * (len(each.shape) - 1))) for each in call.operands
        ]
        operands[states[0].number] = ("b", None)

        def local(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shard: ShardSizes) -> Any:
            mine = shard.runs["h"][shard.rank] if units else None
            if mine is None:
                return target, args, kwargs
            found = given_by_name(target, args, kwargs)
            hx = found["hx"] if isinstance(found["hx"], tuple) else (found["hx"],)
            weights = (found["w_ih"], found["w_hh"], found.get("b_ih"), found.get("b_hh"))
            return cell_of_part, (kind, found["input"], hx, *weights, mine), {}

        return Factors(
            operands=tuple(operands),
            outputs=(("b", units),) * len(call.outputs),
            sizes={"b": batch} | ({"h": size} if units else {}) | _gates(kind, units),
            unsharded=frozenset({"gates"} & _gates(kind, units).keys()),
            nonempty=frozenset({"h"} if units else ()),
            # features of x may be the same axis
            replicated=frozenset({call.operands[0].number, states[0].number}),
            local=local,
        )

    return rule


def _rows(kind: RecurrentKind, units: str | None) -> Term:
    """The rows of a weight: the hidden units of each gate."""
    return units and (units if NUM_GATES[kind] == 1 else Product(("gates", units)))


def _gates(kind: RecurrentKind, units: str | None) -> dict[str, int]:
    return {"gates": NUM_GATES[kind]} if units and NUM_GATES[kind] > 1 else {}


def _talks(length: int, batch: int, size: int, layers: int, ways: int) -> list[InnerCollective]:
    found = [(batch * size, layers * ways * length)]
    found += [(length * batch * ways * size, layers - 1)] if layers > 1 else []
    ways_of: tuple[tuple[Collective, bool], ...] = (("all_gather", False), ("reduce_scatter", True))
    return [
        InnerCollective(collective=collective, num_elements=elements, times=times, backward=backward)
        for collective, backward in ways_of
        for elements, times in found
    ]


RECURRENT: dict[str, Rule] = {
    **{kind: _recurrent(kind) for kind in NUM_GATES},
    **{f"{kind}_cell": _cell(kind) for kind in NUM_GATES},
}
