"""Started operations and messages of a group that talks through memory: to be waited for, or asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from meshloom.comm.group import Work
from meshloom.comm.shm.engine_calls import KINDS, describe


class _Waits(Protocol):
    """The group, as what it has started sees it."""

    def wait_for(
        self, number: int, what: Callable[[], str], message: bool, peer: int | None = None
    ) -> None: ...
    def is_over(self, number: int, message: bool) -> bool: ...
    def source_of(self, number: int) -> int: ...


class RecvWork(Work):
    """A started receive.

    source: the rank that the tensor came from, once it has come.
    """

    source: int | None


class StartedOperation(Work):
    """One that all ranks of the group start. finish: what is left to do when it is over."""

    def __init__(
        self, group: _Waits, number: int, kind: int, tensor: Tensor | None, finish: Callable[[], None] | None
    ) -> None:
        self._group, self._number, self._kind, self._tensor, self._finish = (
            group,
            number,
            kind,
            tensor,
            finish,
        )
        self._done = False

    def wait(self) -> None:
        if self._done:
            return
        self._group.wait_for(self._number, self._what, message=False)
        if self._finish:
            self._finish()
        self._done = True

    def is_finished(self) -> bool:
        return self._done or self._group.is_over(self._number, message=False)

    def _what(self) -> str:
        return KINDS[self._kind] + ("" if self._tensor is None else f" of {describe(self._tensor)}")


class StartedMessage(RecvWork):
    """A send, or a receive from `peer`; None: from whoever sends. what: it is, for errors."""

    def __init__(
        self,
        group: _Waits,
        number: int,
        what: str,
        peer: int | None,
        tensor: Tensor,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._group, self._number, self._text, self._peer, self._finish = group, number, what, peer, finish
        self._tensor = tensor  # lives until the message is over
        self.source = peer
        self._done = False

    def wait(self) -> None:
        if self._done:
            return
        self._group.wait_for(self._number, lambda: self._text, message=True, peer=self._peer)
        source = self._group.source_of(self._number)
        self.source = self._peer if source < 0 else source
        if self._finish:
            self._finish()
        self._done = True

    def is_finished(self) -> bool:
        return self._done or self._group.is_over(self._number, message=True)
