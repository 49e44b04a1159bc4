"""Compiled modules under the names that they have without `torch.compile`.

`torch.compile(module)` wraps the module, which adds a part (`_orig_mod`) to all names inside it, in
checkpoints, errors and reports. Here the wrapped module replaces its wrapper and calls the compiled code, as
after `module.compile()`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch._C._dynamo import eval_frame  # pyright: ignore[reportMissingModuleSource, reportMissingImports]

from meshloom.core.errors import JobError

F = TypeVar("F", bound=Callable[..., Any])


def named_as_written(model: nn.Module) -> nn.Module:
    """The model with every wrapper replaced by its module; the same computations are compiled. Raises `JobError` for a
    parameter without a shape, and for what is no module.

    >>> import torch
    >>> model = named_as_written(nn.Sequential(torch.compile(nn.Linear(3, 2), backend="eager")))
    >>> [name for name, _ in model.named_parameters()]
    ['0.weight', '0.bias']
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]  # by the user's function
        raise JobError(f"Job(model=...) returned a {type(model).__name__}, not a torch.nn.Module.")
    unwrapped = _inside(model)
    for name, parameter in unwrapped.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise JobError(
                f"{name} has no shape yet (a lazy module). Let the model function run one batch through the model before returning it."
            )
    for module in list(unwrapped.modules()):
        children: dict[str, nn.Module | None] = vars(module).get("_modules", {})  # none of a traced one
        for name, child in children.items():
            children[name] = _inside(child) if child is not None else None
    return unwrapped


def without_compilation(model: nn.Module) -> list[str]:
    """Undo the compilation of modules that are `named_as_written`; the names of those that were compiled."""
    names = compiled_names(model)
    for name in names:
        each: Any = model.get_submodule(name)
        each._compiled_call_impl = None
    return names


def compiled_names(model: nn.Module) -> list[str]:
    """The names of the modules whose compiled code is called."""
    modules: list[tuple[str, Any]] = list(model.named_modules())
    return [name for name, module in modules if module._compiled_call_impl is not None]


def not_compiled(function: F) -> F:
    """Mark `function` as one that torch.compile around it runs, with what it calls, as it is; return it."""
    written: Any = function
    written._torchdynamo_disable = True  # where what calls it is compiled
    frames: Any = eval_frame
    skipped = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skipped, skipped))
    return function


def _inside(module: Any) -> nn.Module:
    while "_orig_mod" in module._modules and hasattr(module, "dynamo_ctx"):
        inner = module._orig_mod
        inner._compiled_call_impl = module.dynamo_ctx(inner._call_impl)
        module = inner
    return module


def compiled_notes(names: list[str]) -> list[str]:
    """What the user should know of modules that torch.compile would have compiled."""
    if not names:
        return []
    shown = ", ".join(name or "the model" for name in names[:4]) + (", ..." if len(names) > 4 else "")
    return [
        "torch.compile has no effect under tp, pp and recompute: the loss is captured as a program, whose operators are run one by one "
        f"({shown}). compile=true compiles the program."
    ]
