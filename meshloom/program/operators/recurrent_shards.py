"""Recurrent networks with sharded hidden units: rows of the weights of their gates, their states, their
outputs.

A step needs the full hidden state h, and computes a part of the next one:

    rank 0:   W_0 h + U_0 x  ->  h'_0 \\
                                       gather h'  ->  next step
    rank 1:   W_1 h + U_1 x  ->  h'_1 /

So each step gathers h, and in backward sums the gradient of h. Gates are elementwise: no communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from meshloom.comm.group import Group
from meshloom.comm.pieces import Pieces, Runs, take, whole
from meshloom.core.random import seed_torch
from meshloom.program.ir.callables import keyed
from meshloom.program.ir.draws import seed_of_draw
from meshloom.program.operators.collectives import (
    Collective,
    Joint,
    Transition,
    elements_of_change,
    refuse_second_derivative,
)

RecurrentKind = Literal["lstm", "gru", "rnn_tanh", "rnn_relu"]
NUM_GATES: dict[RecurrentKind, int] = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}

_Weights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # w_x, w_h, b_x, b_h


def cell_of_part(
    kind: RecurrentKind,
    x: Tensor,
    states: Sequence[Tensor],
    w_x: Tensor,
    w_h: Tensor,
    b_x: Tensor | None,
    b_h: Tensor | None,
    units: Runs,
) -> Any:
    """One step of a cell for the hidden `units` of this rank.

    x [b, i], states h [b, hidden] (in full), then c [b, part] of an LSTM; w_x [gates part, i], w_h [gates
    part, hidden], biases [gates part]. Returns h' [b, part], and c' of an LSTM.
    """
    h = states[0]
    mine = take(Pieces(tuple(h.shape), ((None, units),)), 0, h)
    return _step(kind, F.linear(x, w_x, b_x), F.linear(h, w_h, b_h), (mine, *states[1:]))


@dataclass(frozen=True, kw_only=True)
class RecurrentOfPart(Joint):
    """`aten.lstm`, `gru`, `rnn_tanh` or `rnn_relu` where every rank computes some hidden units of all layers.

    held: rank -> its units, of `num_hidden`. dropout: rate between layers, with equal draws on all ranks.
    num_draws: draws that the unsharded operator counts; its kernel may draw a different number.
    """

    kind: RecurrentKind
    held: tuple[Runs | None, ...]
    num_hidden: int
    num_layers: int
    has_biases: bool
    dropout: float
    num_draws: int
    bidirectional: bool
    batch_first: bool

    def run(self, group: Group, x: Tensor, states: Any, weights: Sequence[Tensor]) -> Any:
        """x [t, b, i], its states, weights -> outputs [t, b, directions part], states."""
        before = torch.default_generator.initial_seed()
        firsts = states if isinstance(states, tuple | list) else (states,)
        x = x.transpose(0, 1) if self.batch_first else x
        length, batch = x.shape[:2]
        lasts: list[tuple[Tensor, ...]] = []
        for layer in range(self.num_layers):
            if layer:
                x = self._dropped(self._layer_change(length, batch).run(group, x).flatten(2))
            ways: list[Tensor] = []
            for way in range(self._num_ways):
                number = layer * self._num_ways + way
                start = tuple(state[number] for state in firsts)
                output, last = self._layer(
                    group, x, start, self._weights(weights, number), backwards=bool(way)
                )
                ways.append(output)
                lasts.append(last)
            x = torch.stack(ways, 2)  # [t, b, directions, part]
        flat = x.flatten(2).transpose(0, 1) if self.batch_first else x.flatten(2)
        if self.num_draws:
            seed_torch(seed_of_draw(before, self.num_draws))
        return flat, *(torch.stack(column) for column in zip(*lasts, strict=True))

    def sent(
        self, shape: Sequence[int], rank: int, *, backward: bool, states_graded: bool
    ) -> Iterator[tuple[Collective, int]]:
        """The collectives that `rank` starts, with the elements of its input. shape: of x. states_graded:
        whether the initial states require grad."""
        length, batch = (shape[1], shape[0]) if self.batch_first else (shape[0], shape[1])
        step, between = self._step_change(batch), self._layer_change(length, batch)
        count = self.num_layers * self._num_ways
        steps = count * (length if not backward or states_graded else length - 1)
        for change, times in ((step, steps), (between, self.num_layers - 1)):
            found = elements_of_change("part", "part", change.before, change.after, rank, backward=backward)
            if found is not None:
                yield from repeat(found, times)

    def __str__(self) -> str:
        return f"{self.kind} by hidden units {self.held}"

    @property
    def _num_ways(self) -> int:
        return 2 if self.bidirectional else 1

    def _gathering(self, shape: tuple[int, ...]) -> Transition:
        """From sharded hidden units, in the last dim, to replicated."""
        lead = (None,) * (len(shape) - 1)
        return Transition(
            source="part",
            target="part",
            before=Pieces(shape, tuple((*lead, runs) for runs in self.held)),
            after=whole(shape, len(self.held)),
        )

    def _step_change(self, batch: int) -> Transition:
        return self._gathering((batch, self.num_hidden))

    def _layer_change(self, length: int, batch: int) -> Transition:
        return self._gathering((length, batch, self._num_ways, self.num_hidden))

    def _layer(
        self, group: Group, x: Tensor, states: tuple[Tensor, ...], weights: _Weights, *, backwards: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One layer in one direction: outputs [t, b, part] and last states."""
        w_x, w_h, b_x, b_h = weights
        projected = F.linear(x, w_x, b_x).unbind(0)
        change, length = self._step_change(x.shape[1]), len(x)
        bias = b_h.detach() if b_h is not None else None
        outputs, read = list[Tensor](), list[Tensor]()
        later = _deferred_products(w_h, b_h, length, projected[0], read)
        for number, time in enumerate(reversed(range(length)) if backwards else range(length)):
            h = change.run(group, states[0])
            read.append(h.detach())
            recurrent = F.linear(h, w_h.detach(), bias) + later[number]
            result = _step(self.kind, projected[time], recurrent, states)
            states = result if isinstance(result, tuple) else (result,)
            outputs.append(states[0])
        return torch.stack(outputs[::-1] if backwards else outputs), states

    def _weights(self, weights: Sequence[Tensor], number: int) -> _Weights:
        count = 4 if self.has_biases else 2
        w_x, w_h, *biases = weights[count * number : count * (number + 1)]
        b_x, b_h = biases or (None, None)
        return w_x, w_h, b_x, b_h

    def _dropped(self, x: Tensor) -> Tensor:
        return keyed(torch.ops.aten.dropout.default, x, self.dropout, True) if self.dropout else x


def _deferred_products(
    w_h: Tensor, b_h: Tensor | None, length: int, like: Tensor, read: list[Tensor]
) -> Sequence[Tensor]:
    """Zeros [t][b, gates part] to add to each step's W h, which carry gradients to W and b in one product for
    all steps; autograd alone would compute and add one per step. read: h of each step, filled in during the
    forward."""
    function: Any = _DeferredProducts.apply
    return function(read, length, like.detach(), w_h, b_h).unbind(0)


class _DeferredProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, read: list[Tensor], length: int, like: Tensor, w_h: Tensor, b_h: Tensor | None
    ) -> Tensor:
        ctx.read, ctx.has_bias = read, b_h is not None
        return like.new_zeros(length, *like.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        refuse_second_derivative()
        rows = gradients[0].flatten(0, 1)
        of_weight = rows.T @ torch.stack(ctx.read).flatten(0, 1)
        return None, None, None, of_weight, rows.sum(0) if ctx.has_bias else None


def _step(kind: RecurrentKind, projected: Tensor, recurrent: Tensor, states: Sequence[Tensor]) -> Any:
    """The next states. projected, recurrent [b, gates part]: of x and of h; states: this rank's parts."""
    if kind == "gru":
        (reset, update, new), (reset_h, update_h, new_h) = projected.chunk(3, -1), recurrent.chunk(3, -1)
        update_gate = torch.sigmoid(update + update_h)
        candidate = torch.tanh(new + torch.sigmoid(reset + reset_h) * new_h)
        return candidate + update_gate * (states[0] - candidate)
    gates = projected + recurrent
    if kind == "lstm":
        into, forget, candidate, out = gates.chunk(4, -1)
        cell = torch.sigmoid(forget) * states[1] + torch.sigmoid(into) * torch.tanh(candidate)
        return torch.sigmoid(out) * torch.tanh(cell), cell
    return torch.tanh(gates) if kind == "rnn_tanh" else torch.relu(gates)
