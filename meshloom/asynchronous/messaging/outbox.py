"""A queue of messages per peer: those that it cannot take yet wait here, until its connection ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from meshloom.comm.messaging.connections import Connections
from meshloom.comm.messaging.endpoint import Endpoint
from meshloom.comm.messaging.wire_format import Header
from meshloom.core.errors import MessageError, PeerLostError

MOST_WAITING = 10_000  # messages of the head to a server


class Outbox:
    """end: over which messages are sent.

    most_waiting: messages to one peer. One that is further behind is dropped: it could fill the memory.
    """

    def __init__(self, end: Endpoint | Connections, most_waiting: int = MOST_WAITING) -> None:
        self._end = end
        self._most_waiting = most_waiting
        self._waiting: dict[int, deque[tuple[Header, Sequence[Tensor]]]] = {}

    @property
    def waits(self) -> bool:
        """Whether messages wait."""
        return bool(self._waiting)

    def send(self, peer: int, header: Header, tensors: Sequence[Tensor]) -> None:
        """Send now, or when the peer can take it; nothing if it is gone."""
        queue = self._waiting.get(peer)
        if queue is None and self._goes(peer, header, tensors):
            return
        queue = self._waiting.setdefault(peer, deque())
        queue.append((header, tensors))
        if len(queue) > self._most_waiting:
            self.forget(peer)
            self._end.drop(peer)

    def flush(self) -> None:
        """Send waiting messages, as far as peers take them."""
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
