"""The note that a rank leaves in its group's store when it aborts, for the ranks that wait for it.

A store whose host cannot be reached blocks its caller for ever, whatever the timeout. So a thread makes the
call, and is abandoned if it does not return.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

import torch.distributed as dist

_NOTE = "meshloom/left"  # key in a group's store: the member that aborted
_ANSWER_SECONDS = 1.0


class Notes:
    """In the store that `find_store` returns, or raises `RuntimeError`. Threads may share it."""

    def __init__(self, find_store: Callable[[], dist.Store]) -> None:
        self._find_store = find_store
        self._asking: Thread | None = None

    def leave(self, member: str) -> None:
        """Note that `member` has aborted, if the store can be reached."""
        self._ask(lambda store: store.set(_NOTE, member))

    def who_left(self) -> str | None:
        """The member that has aborted, if one has and its note can be read."""
        return self._ask(lambda store: store.get(_NOTE).decode() if store.check([_NOTE]) else None)

    def _ask(self, question: Callable[[dist.Store], str | None]) -> str | None:
        """None: there is no answer, or none in time. A call that is still open prevents another."""
        answers: list[str | None] = []

        def ask() -> None:
            try:
                answers.append(question(self._find_store()))
            except RuntimeError:  # the store has ended with its host
                answers.append(None)

        if self._asking is not None and self._asking.is_alive():
            return None
        asking = self._asking = Thread(target=ask, name="meshloom notes", daemon=True)
        asking.start()
        asking.join(_ANSWER_SECONDS)
        return answers[0] if answers else None
