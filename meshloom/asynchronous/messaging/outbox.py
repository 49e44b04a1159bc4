"""Messages to peers that come and go: in order; what a peer does not take yet waits here, and goes with its
connection."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from meshloom.comm.messaging.connections import Connections
from meshloom.comm.messaging.endpoint import Endpoint
from meshloom.comm.messaging.wire_format import Header
from meshloom.core.errors import MessageError, PeerLostError

MOST_WAITING = 10_000  # of what the head says to a server


class Outbox:
    """Of one end of connections. most_waiting: messages to one peer; one that is further behind is dropped,
    or who never reads could fill the memory."""

    def __init__(self, end: Endpoint | Connections, most_waiting: int = MOST_WAITING) -> None:
        self._end = end
        self._most_waiting = most_waiting
        self._waiting: dict[int, deque[tuple[Header, Sequence[Tensor]]]] = {}

    @property
    def waits(self) -> bool:
        """Whether there is something that was not taken yet."""
        return bool(self._waiting)

    def send(self, peer: int, header: Header, tensors: Sequence[Tensor]) -> None:
        """Now, or when the peer takes it. To one that is gone: nothing."""
        queue = self._waiting.get(peer)
        if queue is None and self._goes(peer, header, tensors):
            return
        queue = self._waiting.setdefault(peer, deque())
        queue.append((header, tensors))
        if len(queue) > self._most_waiting:
            self.forget(peer)
            self._end.drop(peer)

    def flush(self) -> None:
        """Send what waits, as far as it is taken."""
        for peer, queue in list(self._waiting.items()):
            while queue and self._goes(peer, *queue[0]):
                queue.popleft()
            if not queue:
                del self._waiting[peer]

    def forget(self, peer: int) -> None:
        """The peer is gone."""
        self._waiting.pop(peer, None)

    def _goes(self, peer: int, header: Header, tensors: Sequence[Tensor]) -> bool:
        try:
            self._end.send(peer, header, tensors)
        except MessageError:
            return False
        except PeerLostError:
            pass
        return True
