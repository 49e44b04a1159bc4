"""Where torch's default generator stands during a recording, which draws nothing: after each draw it is put
into a state that bears the draw's number.

Real draws never lead to such a state, so a constructor that saves, restores or seeds the generator
(`fork_rng`, `manual_seed`) is told from one that draws on.
"""

from __future__ import annotations

import numpy
import torch

from meshloom.parameters.construction.tape import NotRecordableError

_MARK = 0x6D657368, 0x6C6F6F6D  # words of 32 bits


def draws_made(num_draws: int) -> bytes | int | None:
    """Where the generator stands after `num_draws` recorded ones: after the last of them (None), after another
    one (its number), or in a state that the constructor has set. Raises `NotRecordableError`."""
    now = torch.get_rng_state().numpy().tobytes()
    words = numpy.frombuffer(now, dtype=numpy.int64)
    if tuple(words[3:5]) != _MARK:
        return now
    draw = int(words[5])
    if now != _marked(now, draw):
        raise NotRecordableError("it draws random numbers in ways that torch does not see")
    return None if draw == num_draws - 1 else draw


def set_mark(draw: int) -> None:
    """Put the generator into the state that stands for the one after a draw."""
    marked = _marked(torch.get_rng_state().numpy().tobytes(), draw)
    torch.set_rng_state(torch.frombuffer(bytearray(marked), dtype=torch.uint8))


def _marked(state: bytes, draw: int) -> bytes:
    """A state of the same seed, with a number.

    torch's layout, in words of 8 bytes: seed, (left, seeded), next, 624 words of the generator, normal numbers
    to come.
    """
    words = numpy.frombuffer(state, dtype=numpy.int64).copy()
    words[1:] = 0
    words[1] = 1 | 1 << 32
    words[3:6] = *_MARK, draw
    return words.tobytes()
