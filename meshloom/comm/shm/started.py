"""Started operations and messages of ranks that share memory."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from meshloom.comm.group import Work
from meshloom.comm.shm.engine_calls import KINDS, describe
from meshloom.comm.shm.native_engine import NativeEngine
from meshloom.comm.shm.operands import Operand


class StartedOperation(Work):
    """A started operation of all ranks of a group. finish: called once, when it has finished."""

    def __init__(
        self,
        engine: NativeEngine,
        number: int,
        kind: int,
        tensor: Tensor | None,
        finish: Callable[[], None] | None,
    ) -> None:
        self._engine, self._number, self._finish = engine, number, finish
        self._kind, self._tensor = kind, tensor
        self._done = False

    def wait(self) -> None:
        if self._done:
            return
        self._engine.wait_for(self._number, self._what, message=False)
        if self._finish:
            self._finish()
        self._done = True

    def is_finished(self) -> bool:
        return self._done or self._engine.is_over(self._number, message=False)

    def _what(self) -> str:
        return KINDS[self._kind] + ("" if self._tensor is None else f" of {describe(self._tensor)}")


class StartedMessage(Work):
    """A started send to `peer`, or receive from it (None: from any rank). what: describes it in errors.

    source: the peer; the rank that sent the tensor, once it has arrived.
    """

    def __init__(
        self, engine: NativeEngine, number: int, what: str, peer: int | None, operand: Operand
    ) -> None:
        self._engine, self._number, self._text = engine, number, what
        self._operand = operand  # its memory lives until the message is over
        self.source = peer
        self._done = False

    def wait(self) -> None:
        if self._done:
            return
        self._engine.wait_for(self._number, lambda: self._text, message=True, peer=self.source)
        source = self._engine.take_source(self._number)
        self.source = self.source if source is None else source
        if self._operand.copy_back:
            self._operand.copy_back()
        self._done = True

    def is_finished(self) -> bool:
        return self._done or self._engine.is_over(self._number, message=True)
