"""In the place of an attribute that a forward sets, and its program does not: an error for who reads it."""

from __future__ import annotations

from typing import Any

from meshloom.core.errors import TrainingError
from meshloom.program.capture.guarded_values import MISSING

_OPERATIONS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod neg abs pow rpow matmul rmatmul eq ne lt le gt ge bool float int index "
    "round len iter contains getitem setitem delitem call format str"
)  # fmt: skip


class LeftBehind:
    """where: name of the attribute. before: what forwards find there; `MISSING`: nothing. Copies and pickles have it in their place."""

    def __init__(self, where: str, before: Any = MISSING) -> None:
        self._where, self.before = where, before
        self.was_read = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copies and files ask for
            raise AttributeError(name)
        raise self.error()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (LeftBehind, (self._where,)) if self.before is MISSING else (_same, (self.before,))

    def error(self) -> TrainingError:
        """For who reads it."""
        self.was_read = True
        return TrainingError(
            f"{self._where} is set by the forward, and one that tp or pp divides leaves nothing on its modules but plain values that follow from shapes and that it "
            "does not read before it sets them. Return it with the results, or use a plan with dp and zero alone."
        )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise next(each for each in (*args, *(kwargs or {}).values()) if isinstance(each, LeftBehind)).error()


def _same(value: Any) -> Any:
    return value


def _refusing(self: LeftBehind, *_: Any) -> Any:
    raise self.error()


for _name in _OPERATIONS.split():
    setattr(LeftBehind, f"__{_name}__", _refusing)
LeftBehind.__hash__ = object.__hash__
