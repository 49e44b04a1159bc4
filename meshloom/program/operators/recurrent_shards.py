"""Recurrent networks with sharded hidden units: rows of the weights of their gates, their states, their
outputs.

A step needs the full hidden state h, and computes a part of the next one:

    rank 0:   W_0 h + U_0 x  ->  h'_0 \\
                                       gather h'  ->  next step
    rank 1:   W_1 h + U_1 x  ->  h'_1 /

So each step gathers h, and in backward sums the gradient of h. Gates are elementwise: no communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    Transition,
    elements_of_change,
    refuse_second_derivative,
)

RecurrentKind = Literal["lstm", "gru", "rnn_tanh", "rnn_relu"]
NUM_GATES: dict[RecurrentKind, int] = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}

_Weights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # w_x, w_h, b_x, b_h
_Gather = Callable[[Transition, list[Tensor]], list[Tensor]]


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
class RecurrentOfPart:
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
        """On this rank: x [t, b, i], its states, weights -> outputs [t, b, directions part], states."""
        results = self._counted(
            [x], [states], [weights], lambda change, values: [change.run(group, values[0])]
        )
        return results[0]

    def run_all(
        self, xs: Sequence[Tensor], states: Sequence[Any], weights: Sequence[Sequence[Tensor]]
    ) -> list[Any]:
        """Run on all ranks."""
        return self._counted(list(xs), states, weights, lambda change, values: change.run_all(values))

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

    def _counted(
        self, xs: list[Tensor], states: Sequence[Any], weights: Sequence[Sequence[Tensor]], gather: _Gather
    ) -> list[Any]:
        before = torch.default_generator.initial_seed()
        results = self._run(xs, states, weights, gather)
        if self.num_draws:
            seed_torch(seed_of_draw(before, self.num_draws))
        return results

    def _run(
        self, xs: list[Tensor], states: Sequence[Any], weights: Sequence[Sequence[Tensor]], gather: _Gather
    ) -> list[Any]:
        """xs, states, weights: one per rank that is computed here."""
        firsts = [each if isinstance(each, tuple | list) else (each,) for each in states]
        xs = [each.transpose(0, 1) if self.batch_first else each for each in xs]
        length, batch = xs[0].shape[:2]
        lasts: list[list[tuple[Tensor, ...]]] = [[] for _ in xs]
        outputs: list[Tensor] = []
        for layer in range(self.num_layers):
            if layer:
                xs = [each.flatten(2) for each in gather(self._layer_change(length, batch), outputs)]
                xs = self._dropped(xs)
            ways: list[list[Tensor]] = [[] for _ in xs]
            for way in range(self._num_ways):
                number = layer * self._num_ways + way
                start = [tuple(state[number] for state in row) for row in firsts]
                own = [self._weights(row, number) for row in weights]
                steps, last = self._layer(xs, start, own, gather, backwards=bool(way))
                for place in range(len(xs)):
                    ways[place].append(steps[place])
                    lasts[place].append(last[place])
            outputs = [torch.stack(each, 2) for each in ways]  # [t, b, directions, part]
        results: list[Any] = []
        for each, rows in zip(outputs, lasts, strict=True):
            flat = each.flatten(2).transpose(0, 1) if self.batch_first else each.flatten(2)
            results.append((flat, *(torch.stack(column) for column in zip(*rows, strict=True))))
        return results

    def _layer(
        self,
        xs: list[Tensor],
        states: list[tuple[Tensor, ...]],
        weights: list[_Weights],
        gather: _Gather,
        *,
        backwards: bool,
    ) -> tuple[list[Tensor], list[tuple[Tensor, ...]]]:
        """One layer in one direction: outputs [t, b, part] and last states of each rank."""
        projected = [F.linear(x, w_x, b_x).unbind(0) for x, (w_x, _, b_x, _) in zip(xs, weights, strict=True)]
        change = self._step_change(xs[0].shape[1])
        length = len(xs[0])
        outputs: list[list[Tensor]] = [[] for _ in xs]
        read: list[list[Tensor]] = [[] for _ in xs]
        later = [
            _deferred_products(w_h, b_h, length, each[0], seen)
            for each, (_, w_h, _, b_h), seen in zip(projected, weights, read, strict=True)
        ]
        for number, time in enumerate(reversed(range(length)) if backwards else range(length)):
            everything = gather(change, [state[0] for state in states])
            for place, (h, (_, w_h, _, b_h)) in enumerate(zip(everything, weights, strict=True)):
                read[place].append(h.detach())
                bias = b_h.detach() if b_h is not None else None
                recurrent = F.linear(h, w_h.detach(), bias) + later[place][number]
                result = _step(self.kind, projected[place][time], recurrent, states[place])
                states[place] = result if isinstance(result, tuple) else (result,)
                outputs[place].append(states[place][0])
        return [torch.stack(each[::-1] if backwards else each) for each in outputs], states

    def _weights(self, weights: Sequence[Tensor], number: int) -> _Weights:
        count = 4 if self.has_biases else 2
        w_x, w_h, *biases = weights[count * number : count * (number + 1)]
        b_x, b_h = biases or (None, None)
        return w_x, w_h, b_x, b_h

    def _dropped(self, xs: list[Tensor]) -> list[Tensor]:
        if not self.dropout:
            return xs
        seed = torch.default_generator.initial_seed()
        results: list[Tensor] = []
        for each in xs:
            seed_torch(seed)  # every rank draws the same
            results.append(keyed(torch.ops.aten.dropout.default, each, self.dropout, True))
        return results


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
