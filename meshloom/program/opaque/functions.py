"""Calls of leaf functions, as those of one module that holds the modules among their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

from meshloom.core.errors import CaptureError
from meshloom.core.modules.named_leaves import function_name, modules_of
from meshloom.core.moments.leaf import LeafFunction, leaf_functions
from meshloom.program.ir.encoding import encoded
from meshloom.program.ir.nodes import submodule
from meshloom.program.opaque.call import ChangedCallError

MARKED = "it is marked with @ml.leaf"  # why it is a leaf
ClosedOver = tuple[tuple[str, Any], ...]


def path_of_call(
    function: LeafFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], model: nn.Module
) -> str:
    """The call as a leaf of a program: the function's name and the paths of its modules. Raises `CaptureError` for a module that the model has not."""
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, nn.Module)]
    # an export's proxies of a module share its dict
    paths = {id(vars(each)): path for path, each in model.named_modules()} if given else {}
    found: dict[str, None] = {}
    for each in given:
        path = paths.get(id(vars(each)))
        if path is None:
            raise CaptureError(
                f"it is given a {type(each).__name__}, which is no module of the model; make it one of the model's"
            )
        found[path or "."] = None
    return f"@{function.name};{','.join(found)}"


def modules_of_call(path: str, model: nn.Module) -> nn.ModuleList:
    """The modules among a call's arguments."""
    return nn.ModuleList(submodule(model, each) for each in modules_of([path]))


def closed_over(function: LeafFunction[..., Any]) -> ClosedOver:
    """The plain values that it closes over, encoded. Raises `CaptureError` for others."""
    found: list[tuple[str, Any]] = []
    for name, value in function.closure().items():
        try:
            found.append((name, encoded(value)))
        except CaptureError as error:
            raise CaptureError(
                f"it closes over {name}, a {type(value).__name__}, of which another rank has its own; give it as an argument"
            ) from error
    return tuple(found)


def function_of(path: str, values: ClosedOver) -> Callable[..., Any]:
    """This rank's own function of a call, which closes over these values."""
    name = function_name(path)
    for each in leaf_functions(name):
        if dict(closed_over(each)) == dict(values):
            return each.__wrapped__
    raise ChangedCallError(
        f"{name} is a function marked with @ml.leaf, and this rank has none of its name, as no code travels. Define it at the top of a file."
    )
