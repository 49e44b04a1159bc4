"""Calls of opaque modules and of leaf functions intercepted: watched while they run in eager, and replaced by the operator in an export."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from meshloom.core.errors import CaptureError
from meshloom.core.modules.named_leaves import is_function
from meshloom.core.moments.leaf import LeafFunction, leaf_calls_to
from meshloom.program.ir.encoding import encoded
from meshloom.program.ir.nodes import Meta, submodule
from meshloom.program.opaque.call import (
    FUNCTION,
    METHODS,
    OpaqueCall,
    OpaqueError,
    UnrecordedLeafError,
    split_arguments,
    state_of,
)
from meshloom.program.opaque.functions import closed_over, modules_of_call, path_of_call
from meshloom.program.opaque.operator import OPAQUE

# path, module, method, run, args, kwargs
Handle = Callable[[str, nn.Module, str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
_SLOTS = {"__call__": "_compiled_call_impl", "forward": "forward"}


@dataclass(frozen=True, kw_only=True)
class RecordedCall:
    """A call as it ran in eager. inputs: layouts of its tensors. spec, leaves: what it returned: plain leaves, or
    ("made", index of a result) or ("given", index of an input)."""

    call: OpaqueCall
    inputs: tuple[Meta, ...]
    spec: TreeSpec
    leaves: tuple[Any, ...]


Recorded = Mapping[str, Sequence[RecordedCall]]


class LeafPlace(tuple[str, int]):
    """Where a returned tensor comes from."""


def taken_apart(
    value: Any, given: Sequence[Tensor] = ()
) -> tuple[list[Tensor], list[int], list[Any], TreeSpec]:
    """The tensors in `value` that are not among `given`, each once; where they are among its leaves; all leaves, plain
    ones and places; and the structure. Raises `CaptureError` for other objects."""
    leaves, spec = tree_flatten(value)
    made: list[Tensor] = []
    places: list[int] = []
    recalled: list[Any] = []
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            encoded(leaf)  # plain, or refused
            recalled.append(leaf)
            continue
        known = next((number for number, each in enumerate(given) if each is leaf), None)
        if known is not None:
            recalled.append(LeafPlace(("given", known)))
            continue
        known = next((number for number, each in enumerate(made) if each is leaf), None)
        if known is None:
            known = len(made)
            made.append(leaf)
            places.append(place)
        recalled.append(LeafPlace(("made", known)))
    return made, places, recalled, spec


def put_together(
    leaves: Sequence[Any], spec: TreeSpec, made: Sequence[Tensor], given: Sequence[Tensor]
) -> Any:
    """Inverse of `taken_apart`, with other tensors."""
    found = {"made": made, "given": given}
    values = [found[each[0]][each[1]] if isinstance(each, LeafPlace) else each for each in leaves]
    return tree_unflatten(values, spec)


def operated(call: OpaqueCall, inputs: Sequence[Tensor], state: Sequence[Tensor], path: str) -> list[Tensor]:
    """The results of a call as an operator, which require a gradient where the call's did."""
    made: list[Tensor] = OPAQUE(inputs, state, path, call.text()) if call.results else []
    return [
        each if meta.requires_grad or not each.requires_grad else each.detach()
        for each, meta in zip(made, call.results, strict=True)
    ]


@contextmanager
def intercepted(model: nn.Module, paths: Sequence[str], handle: Handle) -> Iterator[None]:
    """Calls of these modules, and of leaf functions, go to `handle`, except inside of one another.

    A function's is that of a module that holds its modules; what is no call of an operator raises `OpaqueError`.
    """
    inside = False
    before: list[tuple[dict[str, Any], str, Any]] = []

    def call(
        path: str, module: nn.Module, method: str, run: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        nonlocal inside
        if inside:
            return run(*args, **kwargs)
        inside = True
        try:
            return handle(path, module, method, run, args, kwargs)
        finally:
            inside = False

    def call_function(function: LeafFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if inside:
            return function.__wrapped__(*args, **kwargs)
        try:
            path = path_of_call(function, args, kwargs, model)
        except CaptureError as error:
            raise OpaqueError(f"@{function.name};", str(error)) from error
        return call(path, modules_of_call(path, model), FUNCTION, function, *args, **kwargs)

    for path in paths:
        module: Any = submodule(model, path)
        held = vars(module)
        for method in METHODS:
            slot = _SLOTS[method]
            before.append((held, slot, held.get(slot, _NOTHING)))
            # `_compiled_call_impl` takes the place of `_call_impl`, hooks included
            run = (held.get(slot) or module._call_impl) if method == "__call__" else module.forward
            held[slot] = partial(call, path, module, method, run)
    try:
        with leaf_calls_to(call_function):
            yield
    finally:
        for held, slot, was in reversed(before):
            if was is _NOTHING:
                del held[slot]
            else:
                held[slot] = was


_NOTHING = object()


@contextmanager
def standing_in(model: nn.Module, recorded: Recorded) -> Iterator[None]:
    """Calls of leaves are operators, one after another as they were recorded. Raises `UnrecordedLeafError` for functions that were not."""
    following = {path: iter(calls) for path, calls in recorded.items()}

    def handle(
        path: str, module: nn.Module, method: str, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if path not in following and not any(map(is_function, following)):
            raise UnrecordedLeafError
        known = next(following.get(path, iter(())), None)
        try:
            spec, plain, inputs = split_arguments(
                args, kwargs, module.children() if method == FUNCTION else ()
            )
        except CaptureError as error:
            raise OpaqueError(path, str(error)) from error
        values = closed_over(run) if method == FUNCTION else ()
        asked = (method, spec, plain, values)
        if (
            known is None
            or (known.call.method, known.call.spec, known.call.leaves, known.call.closed_over) != asked
        ):
            raise OpaqueError(path, "it is called otherwise when the loss is read")
        shapes = [(tuple(each.shape), each.dtype) for each in inputs]
        if shapes != [(each.shape, each.dtype) for each in known.inputs]:
            raise OpaqueError(path, "its inputs have shapes that depend on values")
        names, state = state_of(module)
        assert names == known.call.state
        made = operated(known.call, inputs, state, path)
        for (below, name), value in zip(known.call.attributes, made[len(known.call.places) :], strict=True):
            vars(submodule(module, below))[name] = value
        return put_together(known.leaves, known.spec, made, inputs)

    with intercepted(model, [path for path in recorded if not is_function(path)], handle):
        yield


def is_standing_in(module: nn.Module) -> bool:
    """Whether a module's calls are intercepted."""
    return isinstance(vars(module).get("_compiled_call_impl"), partial)
