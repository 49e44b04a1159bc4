"""Replays a tape: the values of any storage, with the bits of the real construction.

Only operators on which the storage depends run. A temporary lives until the last of them that uses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from meshloom.parameters.construction.draw_stream import DrawSource, DrawStream
from meshloom.parameters.construction.tape import Place, Tape, TapeOperator


class Replay:
    """The values of a tape's storages. The tape may grow in between.

    draws: where random numbers come from; None: from the construction's stream.
    """

    def __init__(self, tape: Tape, draws: DrawSource | None = None) -> None:
        self._tape = tape
        self._stream = DrawStream(tape, self._inputs_of)
        self._draws = draws or self._stream

    @property
    def num_drawn(self) -> int:
        """Elements drawn so far, those thrown away included."""
        return self._draws.num_drawn

    def values(
        self, storage: int, *, into: torch.UntypedStorage | None = None, before: int | None = None
    ) -> torch.UntypedStorage:
        """The values of a storage at the end of the tape, or before an operator.

        into: memory of its size for them; None: of their own.
        """
        with self._draws.running():
            return self._evaluate([storage], {storage: into} if into is not None else {}, before)[storage]

    def finish(self) -> None:
        """Leave the default generator as the construction leaves it."""
        with self._stream.running():
            self._stream.finish()
            state = torch.get_rng_state()
        torch.set_rng_state(state)

    def advance(self, operator: TapeOperator, generator: torch.Generator) -> None:
        """Draw the newest operator's numbers from a generator, and throw them away."""
        with self._stream.running():
            args, kwargs = self._arguments_at(operator, len(self._tape.operators) - 1)
        operator.function(*args, **kwargs, generator=generator)

    def first_draw(self, storage: int) -> int:
        """The first draw on which it depends; -1: none."""
        found = (self._tape.operators[index].draw for index in self._tape.needed([storage]))
        return next((each for each in found if each is not None), -1)

    def _evaluate(
        self, wanted: list[int], into: dict[int, torch.UntypedStorage], before: int | None
    ) -> dict[int, torch.UntypedStorage]:
        tape = self._tape
        needed = tape.needed(wanted, before)
        last: dict[int, int] = {}  # storage -> last operator that uses it
        for index in needed:
            operator = tape.operators[index]
            last.update(dict.fromkeys((*operator.reads, *operator.writes), index))
        memory = _Memory(tape, into, {each for index in needed for each in tape.operators[index].writes})
        for index in needed:
            operator = tape.operators[index]
            for place, result in zip(operator.results, self._run(operator, memory), strict=True):
                if place is not None and place.storage in last:
                    memory.put(place, result)
            for number in {*operator.reads, *operator.writes} - set(wanted):
                if last[number] == index:
                    memory.live.pop(number, None)
        return {number: memory.storage(number) for number in wanted}

    def _run(self, operator: TapeOperator, memory: _Memory) -> list[Any]:
        """The operator's results, flat."""
        args, kwargs = operator.arguments(lambda place: memory.tensor(place, operator))
        if operator.generator is not None:
            kwargs["generator"] = torch.Generator()
            kwargs["generator"].set_state(torch.frombuffer(bytearray(operator.generator), dtype=torch.uint8))

        def run() -> list[Any]:
            with _default_dtype(operator.default_dtype), torch.no_grad():
                return tree_leaves(operator.function(*args, **kwargs))

        return run() if operator.draw is None else self._draws.make(operator, run)

    def _inputs_of(self, operator: TapeOperator) -> tuple[Any, dict[str, Any]]:
        """Arguments of an operator that draws and whose results nobody wants."""
        assert operator.draw is not None
        return self._arguments_at(operator, self._tape.draws[operator.draw])

    def _arguments_at(self, operator: TapeOperator, index: int) -> tuple[Any, dict[str, Any]]:
        values = self._evaluate(list(operator.reads), {}, index) if operator.reads else {}

        def tensor(place: Place) -> Tensor:
            if place.storage in values:
                return place.within(values[place.storage])
            return torch.empty_strided(place.size, place.stride, dtype=place.dtype)

        return operator.arguments(tensor)


class _Memory:
    """The storages that are alive during a replay."""

    def __init__(self, tape: Tape, into: dict[int, torch.UntypedStorage], written: set[int]) -> None:
        self._tape, self._into, self._written = tape, into, written
        self.live: dict[int, torch.UntypedStorage] = {}

    def storage(self, number: int, *, cleared: bool = True) -> torch.UntypedStorage:
        """Of this number. cleared: what was never written is zero, so that it is equal on all ranks."""
        if number not in self.live:
            constant = self._tape.constants.get(number)
            memory = self._into.get(number)
            if constant is not None and memory is None and number not in self._written:
                self.live[number] = constant
                return constant
            if memory is None:
                memory = torch.UntypedStorage(self._tape.num_bytes[number])
            if constant is not None:
                memory.copy_(constant)
            elif cleared:
                torch.empty(0, dtype=torch.uint8).set_(memory).zero_()
            self.live[number] = memory
        return self.live[number]

    def tensor(self, place: Place, operator: TapeOperator) -> Tensor:
        """An argument of an operator; of those that it uses for their shape alone, one without values."""
        if place.storage in operator.reads or place.storage in operator.writes:
            whole = place.storage in operator.overwrites and place.storage not in operator.reads
            return place.within(self.storage(place.storage, cleared=not whole))
        return torch.empty_strided(place.size, place.stride, dtype=place.dtype)

    def put(self, place: Place, result: Tensor) -> None:
        """Take an operator's result: its memory, where that is as recorded."""
        found = result.untyped_storage()
        alike = (tuple(result.shape), result.stride(), result.storage_offset()) == (
            place.size,
            place.stride,
            place.offset,
        )
        if (
            alike
            and found.nbytes() == self._tape.num_bytes[place.storage]
            and place.storage not in self._into
        ):
            self.live[place.storage] = found
        else:
            place.within(self.storage(place.storage)).copy_(result)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
