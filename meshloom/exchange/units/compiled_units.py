"""Under `compile=true` the forwards of units are compiled, each unit by itself: gathering and letting go stay hooks
before and after.

    gather | forward, compiled | let go | ... | gather | backward, compiled | let go

What a compiled backward wants back of a unit's values is gathered as ever, by what autograd saves. Units of one class
share compiled code. A unit with another unit in it runs as written, as that one is gathered between its operators; so
does the loss around the units. Where a model has no such units, all of its parameters stay during a step's computation,
and the loss is compiled as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

from torch import nn
from torch.overrides import handle_torch_function, has_torch_function

from meshloom.exchange.units.unit_slices import Unit


class CompilesFunctions(Protocol):
    """What is used of a rank's compiler (`program/run/compiler.py`)."""

    def function(self, function: Callable[..., Any], *, recasts: bool) -> Callable[..., Any]: ...


class CompiledUnits:
    """Of one rank. compiler: of the rank."""

    def __init__(self, units: Sequence[Unit], compiler: CompilesFunctions) -> None:
        modules = [unit.module for unit in units if unit.module is not None]
        here = set(map(id, modules))
        self._modules = [each for each in modules if not here.intersection(map(id, list(each.modules())[1:]))]
        self._compiler = compiler
        self._computing = False

    def __len__(self) -> int:
        return len(self._modules)

    def connect(self) -> ExitStack:
        """The modules' forwards are compiled while chunks are computed, until the returned stack is closed."""
        undo, of_class = ExitStack(), dict[type[nn.Module], Callable[..., Any]]()
        for module in self._modules:
            kind, own = type(module), vars(module).get("forward")
            if own is not None:
                compiled = self._compiler.function(own, recasts=True)
            else:
                shared = of_class.get(kind) or self._compiler.function(kind.forward, recasts=True)
                compiled = partial(of_class.setdefault(kind, shared), module)
            module.forward = partial(self._forward, module.forward, compiled)
            undo.callback(_restore, module, own)
        return undo

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Context of the forwards and backwards of chunks; elsewhere modules run as written."""
        self._computing = True
        try:
            yield
        finally:
            self._computing = False

    def _forward(
        self, written: Callable[..., Any], compiled: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        return unwatched(compiled, *args, **kwargs) if self._computing else written(*args, **kwargs)


def unwatched(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a function returns where torch function modes are told of this call, and not of those within: what watches for
    uses of parameters must not be traced."""
    if has_torch_function((None,)):  # a mode is active
        return handle_torch_function(function, (), *args, **kwargs)
    return function(*args, **kwargs)


def _restore(module: nn.Module, own: Any) -> None:
    del module.forward
    if own is not None:
        module.forward = own
