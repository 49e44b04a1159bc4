"""Which workers a server has let in, and over which connection each communicates."""

from __future__ import annotations

from meshloom.asynchronous.messaging.handshake import Hello
from meshloom.asynchronous.state.snapshots import MappedNumbers
from meshloom.core.errors import MessageError


class AdmittedWorkers:
    """digest: of the job that a worker must have. numbers: of server 0, which numbers workers."""

    def __init__(self, digest: str, numbers: MappedNumbers | None) -> None:
        self._digest, self._numbers = digest, numbers
        self._peers: dict[int, int] = {}  # worker -> its peer
        self._workers: dict[int, int] = {}  # peer -> worker

    def __len__(self) -> int:
        return len(self._workers)

    def worker(self, peer: int) -> int | None:
        """The worker at the other end of a connection, if it was let in."""
        return self._workers.get(peer)

    def peer(self, worker: int) -> int | None:
        """The connection of a worker, if it is there."""
        return self._peers.get(worker)

    def admit(self, peer: int, hello: Hello) -> tuple[int, int | None]:
        """Let a worker in: its number, and its earlier connection, if one has ended without notice.

        Raises `MessageError` for a worker of another job, and for a number that nobody has given.
        """
        if hello.digest != self._digest:
            raise MessageError("A Hello of a worker with another job.")
        number = hello.worker
        if self._numbers is not None:
            if number is None:
                number = self._numbers.next_worker
                self._numbers.next_worker = number + 1
            elif number >= self._numbers.next_worker:
                raise MessageError(f"A Hello of worker {number}, which there has not been.")
        if number is None or peer in self._workers:
            raise MessageError("A Hello without a number, or a second one.")
        earlier = self._peers.get(number)
        if earlier is not None:
            del self._workers[earlier]
        self._peers[number], self._workers[peer] = peer, number
        return number, earlier

    def remove(self, peer: int) -> int | None:
        """The connection has ended: the worker that was let in over it, if any."""
        worker = self._workers.pop(peer, None)
        if worker is not None:
            del self._peers[worker]
        return worker
