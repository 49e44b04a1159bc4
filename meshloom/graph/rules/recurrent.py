"""Recurrent networks."""

from __future__ import annotations

from meshloom.graph.rules.call import Call, Operand, Rule
from meshloom.graph.rules.factors import Dims, Factors


def _recurrent(call: Call) -> Factors | None:
    """lstm, gru, rnn: only the batch may be cut. input [t, b, i] or [b, t, i], states [layers, b, h]."""
    x = call.arguments.get("input")
    first = bool(call.arguments.get("batch_first"))
    if not isinstance(x, Operand) or len(x.shape) != 3:
        return None
    place = 0 if first else 1
    dims: Dims = tuple("b" if each == place else None for each in range(3))
    operands: list[Dims] = []
    hidden = call.arguments.get("hx")
    states = {each.number for each in (hidden if isinstance(hidden, tuple) else (hidden,)) if isinstance(each, Operand)}
    for operand in call.operands:
        if operand.number == x.number:
            operands.append(dims)
        elif operand.number in states:
            operands.append((None, "b", None))
        else:
            operands.append((None,) * len(operand.shape))
    outputs: tuple[Dims, ...] = (dims, *((None, "b", None),) * (len(call.outputs) - 1))
    inside = (None, "b", None)  # what is dropped between layers is [t, b, h], whatever the order of the operands
    return Factors(operands=tuple(operands), outputs=outputs, sizes={"b": x.shape[place]}, drawn=inside, filled=frozenset({"b"}))


def _cell(call: Call) -> Factors | None:
    """lstm_cell, gru_cell, ...: input [b, i], states [b, h]; only the batch may be cut."""
    size = call.operands[0].shape[0]
    states = call.arguments["hx"]
    rows = {call.operands[0].number, *(each.number for each in (states if isinstance(states, tuple) else (states,)))}
    operands: tuple[Dims, ...] = tuple(("b", None) if each.number in rows else (None,) * len(each.shape) for each in call.operands)
    return Factors(operands=operands, outputs=(("b", None),) * len(call.outputs), sizes={"b": size})


RECURRENT: dict[str, Rule] = {
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), _cell),
}
