"""One process of each host goes first, and the others of its host follow."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import count

import torch.distributed as dist

from meshloom.core.errors import PeerLostError
from meshloom.launch.environment import LaunchedRank, launched_rank, launched_timeout
from meshloom.launch.joining import meeting_place
from meshloom.launch.names import rank_name

_CALLS = count()  # all ranks make the same ones


@contextmanager
def main_first() -> Iterator[None]:
    """A context for what each process of a host does and only one may do at a time, as downloads and directories: the first process
    of a host runs its body, then the others do. With one process it does nothing. The ranks need not have met.

    Raises `PeerLostError` on the others if it raises on the first, or takes longer than a rank waits for another.
    """
    launched = launched_rank()
    if launched is None or launched.local_size == 1:
        yield
        return
    store = _store(launched)
    key = f"meshloom/first/{next(_CALLS)}/{socket.gethostname()}"
    if launched.local_rank:
        timeout = launched_timeout()
        try:
            store.wait([key], timedelta(seconds=timeout))
        except RuntimeError as error:
            raise PeerLostError(
                f"The first process of this host has not come through `with main_first():` within {timeout:g} s, as long as a rank waits "
                "for another. meshloom run --timeout SECONDS gives it longer."
            ) from error
        if failed := store.get(key).decode():
            raise PeerLostError(f"{failed} in `with main_first():`, which this rank was to follow.")
        yield
        return
    try:
        yield
    except BaseException as error:
        store.set(key, f"{rank_name(launched.rank, None)} raised {type(error).__name__}")
        raise
    store.set(key, "")


@cache
def _store(launched: LaunchedRank) -> dist.Store:
    """Where the ranks meet, or will."""
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    return meeting_place(launched, timedelta(seconds=launched_timeout()))
