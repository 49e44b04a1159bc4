"""Where a tape's draws come from: each from a seed of its own, or from the default generator's stream, in which
any draw is made from the state that it had in the construction.

    draw      0     1     2     3     4     5
    state   kept              kept              the generator now
    draw 4 again: restore the state kept before 3, throw 3 away, draw 4

Draws on the way that nobody wants are made and thrown away, `PIECE` elements at a time.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from meshloom.parameters.construction.tape import Tape, TapeOperator

PIECE = 1 << 18  # elements of a draw that is thrown away, at a time: they stay in a core's cache
KEEP_EVERY = 1 << 16  # elements drawn between two states that are kept, of 5 kB each
STATES_AT_ONCE = 64
aten: Any = torch.ops.aten
_NORMAL = {aten.normal_.default, aten.randn.default, aten.normal.float_float}
_UNIFORM = {aten.uniform_.default, aten.rand.default}


class DrawSource(ABC):
    """Where the numbers come from that a tape's operators draw from torch's default generator."""

    num_drawn: int  # elements, again and thrown away included

    @abstractmethod
    def running(self) -> AbstractContextManager[None]:
        """A context in which the default generator is this source's."""

    @abstractmethod
    def make(self, operator: TapeOperator, run: Callable[[], Any]) -> Any:
        """The result of `run`, which draws for `operator`."""


class SeededDraws(DrawSource):
    """Each draw has a seed of its own, so that any is made alone. seeds: of the draw of this number."""

    def __init__(self, seeds: Callable[[int], int]) -> None:
        self._seeds = seeds
        self.num_drawn = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        outside = torch.get_rng_state()
        try:
            yield
        finally:
            torch.set_rng_state(outside)

    def make(self, operator: TapeOperator, run: Callable[[], Any]) -> Any:
        assert operator.draw is not None
        self.num_drawn += operator.drawn.numel
        torch.default_generator.manual_seed(self._seeds(operator.draw))
        return run()


class DrawStream(DrawSource):
    """The draws of a tape, which may grow in between, with the bits of the construction.

    arguments: of an operator, with the values that its draw depends on.
    """

    def __init__(self, tape: Tape, arguments: Callable[[TapeOperator], tuple[Any, dict[str, Any]]]) -> None:
        self._tape = tape
        self._arguments = arguments
        self._made = 0  # the generator is in the state after that many draws, in the tape's order
        self._state = tape.first
        self._kept: dict[int, Tensor] = {0: tensor_of(tape.first)}
        self._room: list[Tensor] = []  # for states
        self._since = 0  # elements drawn since a state was kept
        self.num_drawn = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        outside = torch.get_rng_state()
        torch.set_rng_state(tensor_of(self._state))
        try:
            yield
        finally:
            self._state = bytes_of(torch.get_rng_state())
            torch.set_rng_state(outside)

    def make(self, operator: TapeOperator, run: Callable[[], Any]) -> Any:
        assert operator.draw is not None
        self._go_before(operator.draw)
        result = run()
        self._passed(operator)
        return result

    def finish(self) -> None:
        """Go where the construction left the generator."""
        self._enter(self._tape.final, len(self._tape.draws))

    def _go_before(self, draw: int) -> None:
        self._enter(self._tape.operators[self._tape.draws[draw]].start, draw)

    def _enter(self, start: bytes | int | None, made: int) -> None:
        """Enter a state: a given one, that after a draw, or None: that after the first `made` draws."""
        if isinstance(start, bytes):
            torch.set_rng_state(tensor_of(start))
        else:
            self._go_to(made if start is None else start + 1)

    def _go_to(self, made: int) -> None:
        """Enter the state after the first `made` draws."""
        nearest = max(each for each in self._kept if each <= made)
        if not nearest <= self._made <= made:
            torch.set_rng_state(self._kept[nearest].clone())  # torch fails for a state within a larger tensor
            self._made = nearest
        while self._made < made:
            self._throw_away(self._made)

    def _throw_away(self, draw: int) -> None:
        operator = self._tape.operators[self._tape.draws[draw]]
        target = operator.drawn
        kind = operator.function
        plain = target.dtype in (torch.float32, torch.float64) and not operator.reads
        if plain and (kind in _UNIFORM or (kind in _NORMAL and target.numel >= 16 and target.is_contiguous)):
            self._go_before(draw)
            # 16 or more normal numbers are as many uniform ones, and 16 more where they are no multiple of 16
            rest = target.numel + (16 if kind in _NORMAL and target.numel % 16 else 0)
            piece = torch.empty(min(rest, PIECE), dtype=target.dtype)
            while rest > 0:
                piece[:rest].uniform_()
                rest -= piece.numel()
        else:
            args, kwargs = self._arguments(operator)
            self._go_before(draw)
            operator.function(*args, **kwargs)
        self._passed(operator)

    def _passed(self, operator: TapeOperator) -> None:
        assert operator.draw is not None
        self._made = operator.draw + 1
        numel = operator.drawn.numel
        self.num_drawn += numel
        self._since += numel
        if self._since >= KEEP_EVERY and self._made not in self._kept:
            self._keep(torch.get_rng_state())

    def _keep(self, state: Tensor) -> None:
        """In memory of many states: small ones between the tensors that come and go would leave holes there."""
        if not self._room:
            self._room = list(torch.empty(STATES_AT_ONCE, len(state), dtype=torch.uint8))
        self._kept[self._made] = self._room.pop().copy_(state)
        self._since = 0


def seconds_to_draw(tape: Tape) -> float:
    """Of all draws of a tape, at the speed of a piece that is drawn here and thrown away."""
    generator, piece = torch.Generator(), torch.empty(PIECE)
    begin = time.perf_counter()
    piece.normal_(generator=generator)
    per_element = (time.perf_counter() - begin) / PIECE
    return per_element * sum(tape.operators[index].drawn.numel for index in tape.draws)


def bytes_of(state: Tensor) -> bytes:
    """A generator's state as bytes."""
    return state.numpy().tobytes()


def tensor_of(state: bytes) -> Tensor:
    """The same as what `set_state` takes."""
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
