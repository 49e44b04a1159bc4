"""How tensors travel through shared memory: sizes of pieces, and how eagerly a waiting rank looks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SharedMemorySettings:
    """How tensors travel.

    small_bytes: up to here every rank computes all of a sum. chunk_bytes: of a larger one, what a rank
        computes at a time.
    piece_bytes: what travels at a time; eager_bytes: of pieces that are handed in before anybody waits.
    message_piece_bytes, message_bytes: likewise, of messages.
    spins: how often a waiting rank looks before it yields its core, yields: and before it sleeps.
    """

    small_bytes: int = 1 << 14
    chunk_bytes: int = 1 << 16
    piece_bytes: int = 1 << 19
    eager_bytes: int = 1 << 20
    message_piece_bytes: int = 1 << 24
    message_bytes: int = 1 << 30
    spins: int = 2000
    yields: int = 50
