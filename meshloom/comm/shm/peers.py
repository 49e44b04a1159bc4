"""Which processes of the other ranks have ended, by a handle on each (pidfd) that outlives its process id."""

from __future__ import annotations

import os
import select
from collections.abc import Mapping


class Peers:
    """processes: process id of each other rank. Ranks within this very process count as alive."""

    def __init__(self, processes: Mapping[int, int]) -> None:
        self._processes = {rank: process for rank, process in processes.items() if process != os.getpid()}
        self._handles: dict[int, int] = {}
        self._gone: set[int] = set()
        for rank, process in self._processes.items():
            try:
                self._handles[rank] = os.pidfd_open(process)
            except ProcessLookupError:
                self._gone.add(rank)
            except OSError:  # not allowed here: fall back to its id
                continue

    def gone(self) -> set[int]:
        """The ranks whose processes have ended."""
        if self._handles:
            poll = select.poll()
            for handle in self._handles.values():
                poll.register(handle, select.POLLIN)
            ready = {handle for handle, _ in poll.poll(0)}
            self._gone |= {rank for rank, handle in self._handles.items() if handle in ready}
        for rank, process in self._processes.items():
            if rank not in self._handles and not _is_alive(process):
                self._gone.add(rank)
        return set(self._gone)

    def close(self) -> None:
        """Close the handles."""
        while self._handles:
            os.close(self._handles.popitem()[1])


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
