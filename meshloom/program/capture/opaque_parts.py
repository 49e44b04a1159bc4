"""Decides what is tried where a loss cannot be read: which modules become opaque, the smallest first.

    what cannot be read                         becomes one operator
    a line that export fails at                 the innermost module whose code it is in
    a program that computes other numbers       the first module whose output differs; where all agree, the one
                                                found by bisection, whose program is right
    a part that is no operator (its shapes      the module around it, up to the model
    depend on values, say)
    more than half of the model                 its own code alone; the modules that it calls are read

Modules of the same class and flags go together, as the others would fail next. What fails outside of all modules, in
the loss function, stays refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch
from torch import nn

from meshloom.core.errors import CaptureError, JobError
from meshloom.core.job import Job
from meshloom.core.modules.own_generators import drawing_modules
from meshloom.program.capture.check import DiffersError
from meshloom.program.capture.outside import ChangedWhileReadError
from meshloom.program.capture.restored import attributes_put_back
from meshloom.program.ir.lines import WAY_OUT, SourceLine, line_of_error
from meshloom.program.ir.nodes import is_within, submodule, with_parents
from meshloom.program.ir.written_parameters import writing_modules
from meshloom.program.opaque.call import ChangedCallError
from meshloom.program.opaque.gradient_hooks import changed_by_hooks
from meshloom.program.opaque.loss_code import LOSS, WHOLE, is_code, modules_entered, own_code_of
from meshloom.program.opaque.stand_ins import OpaqueError
from meshloom.program.trace.attributes import TORCHS_OWN
from meshloom.program.trace.folding import HOOKS
from meshloom.program.trace.frozen import FrozenDrawError
from meshloom.program.trace.repeated_export import GatherCapturedError

T = TypeVar("T")
Parts = Mapping[str, str]  # module -> why it is opaque
MOST_TRIED = 32


def asked_for(job: Job, model: nn.Module) -> dict[str, str]:
    """The modules that `Job(opaque=...)` names, those that write what is trained, and those that draw with generators of their own, outermost ones.

    Raises `JobError` for a name without a module."""
    found: dict[str, str] = {}
    for asked in job.opaque:
        paths = [path for path, each in model.named_modules() if _is_asked(asked, path, each)]
        if not paths:
            name = asked if isinstance(asked, str) else asked.__name__
            known = dict.fromkeys(type(each).__name__ for each in model.modules())
            raise JobError(
                f"Job(opaque=...) names {name}, and the model has no module of that name or class. Its classes are {', '.join(known)}."
            )
        found |= dict.fromkeys(paths, "the job asks for it")
    return _outermost(found | writing_modules(model) | drawing_modules(model))


def read_in_parts(read: Callable[[Parts], T], model: nn.Module, asked: Parts) -> T:
    """The result of `read` with the fewest and smallest opaque parts that let it succeed.

    Raises the error that remains if there are none.
    """
    if changed := changed_by_hooks(model):
        raise _hook_refusal(changed[0])
    parts: Parts | None = asked
    # the parts in the place of a module's own code, if that is no operator; modules that were tried
    instead, tried = None, set[str]()
    refused: Exception | None = None
    read = _undone(read, model)
    for _ in range(MOST_TRIED):
        try:
            return read(parts)
        except (ChangedWhileReadError, GatherCapturedError):
            raise
        except (CaptureError, ChangedCallError) as error:
            # what an attempt with the loss's own code fails at says less than what made it one
            says_less = isinstance(error, OpaqueError | ChangedCallError) or any(map(is_code, parts))
            if refused is None or not says_less:
                refused = error
            if _is_of_hook(error, model):
                raise _hook_refusal(_hooked(model)[0]) from error
            following = None
            if not _is_nowhere(error, model):
                following = _with_next(parts, error, model)
            elif instead is None:
                found = _bisected(read, parts, model, str(error).split(". ")[0])
                if found is not None:
                    return found
            if instead is not None and (following is None or _own_modules(parts) & following.keys()):
                following, instead = instead, None
            elif following is not None:
                opened = _with_own_code(parts, following, model, tried)
                following, instead = (following, instead) if opened is None else (opened, following)
            if following is None and not isinstance(refused, FrozenDrawError):
                following = _with_loss(parts, refused)
            if following is None:
                break
            parts = following
        except Exception:
            # the loss's own code ran on what is no graph of its modules, for which it may not be made
            if refused is None or not any(map(is_code, parts)):
                raise
            following = _with_loss(parts, refused) if instead is None else instead
            instead = None
            if following is None:
                break
            parts = following
    assert refused is not None
    if _hooked(model) and isinstance(refused, DiffersError):
        raise _hook_refusal(_hooked(model)[0]) from refused
    raise refused


def _hooked(model: nn.Module) -> list[str]:
    return [name for name, each in model.named_parameters() if each._backward_hooks]


def _is_of_hook(error: Exception, model: nn.Module) -> bool:
    """Whether what differs is the gradient of a parameter with a hook, which no part of the model makes right."""
    return isinstance(error, DiffersError) and error.parameter in _hooked(model)


def _hook_refusal(name: str) -> CaptureError:
    return CaptureError(
        f"A hook on a parameter's gradient changes it ({name}.register_hook), and a program computes gradients without such hooks. "
        f"Change the value in the forward, or the gradient in the optimizer. {WAY_OUT}"
    )


def _undone(read: Callable[[Parts], T], model: nn.Module) -> Callable[[Parts], T]:
    """`read` that leaves the model's attributes and modes as they were, also where it fails half-way through a loss."""

    def attempt(parts: Parts) -> T:
        with attributes_put_back(model):
            return read(parts)

    return attempt


def _is_nowhere(error: CaptureError | ChangedCallError, model: nn.Module) -> bool:
    """Whether it does not say which module cannot be read: numbers differ, or a failure has no line of the user's."""
    if isinstance(error, DiffersError):
        return error.path is None
    if isinstance(error, OpaqueError | ChangedCallError) or error.path is not None:
        return False
    trace = (error.__cause__ or error).__traceback__
    return error.line is None and line_of_error(trace) is None and not any(_on_the_way(error, model))


def _bisected(read: Callable[[Parts], T], parts: Parts, model: nn.Module, why: str) -> T | None:
    """The result of `read` with the smallest further part that it succeeds with; None: not even with the model."""

    def attempt(paths: Sequence[str]) -> T | None:
        with suppress(CaptureError, ChangedCallError):
            return read(_outermost({**parts, **dict.fromkeys(paths, why)}))
        return None

    best, at = attempt([""]), ""
    first = best is None  # a loss may call the parts of a model alone
    while best is not None or first:
        group = list(_children(model, at))
        found = attempt(group) if group else None
        first = False
        while found is not None and len(group) > 1:
            halves = group[: len(group) // 2], group[len(group) // 2 :]
            tried = next(((half, each) for half in halves if (each := attempt(half)) is not None), None)
            if tried is None:  # several modules
                return found
            group, found = tried
        if found is None:
            return best
        best, (at,) = found, group
    return None


def _children(model: nn.Module, path: str) -> Iterator[str]:
    """The modules in a module, and those in lists of them."""
    for name, child in submodule(model, path).named_children():
        below = f"{path}.{name}" if path else name
        if _is_container(child):
            yield from _children(model, below)
        else:
            yield below


def _is_container(module: nn.Module) -> bool:
    """Whether it has no forward: a list or dict of modules."""
    return getattr(type(module), "forward", None) is nn.Module.forward


def _is_asked(asked: Any, path: str, module: nn.Module) -> bool:
    if not isinstance(asked, str):
        return isinstance(module, asked)
    return path == asked or path.rpartition(".")[2] == asked or type(module).__name__ == asked


def _with_next(parts: Parts, error: CaptureError | ChangedCallError, model: nn.Module) -> Parts | None:
    """The parts with the smallest module that this error asks for."""
    modules = dict(model.named_modules())
    for path in _candidates(error, model):
        if path in parts or path not in modules or _is_container(modules[path]):
            continue
        if any(path != other and is_within(path, other) for other in parts) and not isinstance(
            error, OpaqueError
        ):
            continue
        why = _reason(error, path)
        alike = [other for other, each in modules.items() if path and _are_alike(modules[path], each)]
        return _outermost({**parts, **dict.fromkeys(alike, why), path: why})
    return None


def _own_modules(parts: Parts) -> set[str]:
    """The modules whose own code alone is a part."""
    return {path for part in parts for path in modules_entered(part)}


def _with_own_code(parts: Parts, following: Parts, model: nn.Module, tried: set[str]) -> Parts | None:
    """The parts with the own code of the one module that `following` makes opaque, if that is large and was not `tried` before."""
    new = [path for path in following if path not in parts]
    if len(new) != 1 or new[0] in tried or not _is_large(new[0], model):
        return None
    tried.add(new[0])
    return {path: why for path, why in parts.items() if not is_code(path)} | {
        own_code_of(new[0]): following[new[0]]
    }


def _is_large(path: str, model: nn.Module) -> bool:
    """Whether a module has more than half of the parameters."""
    one, all_ = (sum(each.numel() for each in of.parameters()) for of in (submodule(model, path), model))
    return 2 * one > all_


def _with_loss(parts: Parts, refused: Exception) -> Parts | None:
    """The parts with the loss function's own code, or, if that is no operator, with all that it calls."""
    why = _reason(refused, LOSS)
    if WHOLE in parts:
        return None
    return {WHOLE: why} if LOSS in parts else {**parts, LOSS: why}


def _candidates(error: CaptureError | ChangedCallError, model: nn.Module) -> Iterator[str]:
    """Modules, the innermost first."""
    if isinstance(error, OpaqueError | ChangedCallError):
        if is_code(error.module):
            return
        yield from list(with_parents(error.module))[1:]
        return
    if error.path is not None:
        yield from with_parents(error.path)
        return
    found = list(_on_the_way(error, model))
    if not found and isinstance(error.line, SourceLine):
        line = error.line
        found = [path for path, each in model.named_modules() if _has_line(type(each), line)][:1]
        found = list(with_parents(found[0])) if found else []
    for path in found[:1]:
        for below, each in submodule(model, path).named_modules(prefix=path):
            if isinstance(each, torch.jit.ScriptModule):  # of which an export sees nothing
                yield below
    yield from found


def _on_the_way(error: BaseException, model: nn.Module) -> Iterator[str]:
    """The modules whose methods ran when an exception was raised."""
    # an export's proxies of a module share its dict
    owners = {id(vars(each)): path for path, each in model.named_modules()}
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    for each in reversed(causes):
        found: dict[str, None] = {}
        trace = each.__traceback__
        while trace:
            own = trace.tb_frame.f_locals.get("self")
            path = owners.get(id(getattr(own, "__dict__", None)))
            if path is not None:
                found.pop(path, None)
                found[path] = None
            trace = trace.tb_next
        if found:
            yield from reversed(found)
            return


def _has_line(kind: type, line: SourceLine) -> bool:
    """Whether a line is in a method of a class."""
    for each in kind.__mro__:
        if each.__module__.startswith("torch.nn"):
            continue
        for function in vars(each).values():
            if isinstance(function, FunctionType) and line.number in _lines(function.__code__, line.file):
                return True
    return False


def _lines(code: CodeType, file: str) -> set[int]:
    if code.co_filename != file:
        return set()
    found = {number for _, _, number in code.co_lines() if number is not None}
    inner = (_lines(each, file) for each in code.co_consts if isinstance(each, CodeType))
    return found.union(*inner)


def _are_alike(one: nn.Module, other: nn.Module) -> bool:
    """Whether modules are of one class of the user's, with the same flags and texts as attributes, and hooks if the
    other has some."""
    if type(one) is not type(other) or type(one).__module__.startswith("torch."):
        return one is other
    return _flags(one) == _flags(other)


def _flags(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if name not in TORCHS_OWN and (value is None or isinstance(value, bool | str))
    } | {name: bool(vars(module).get(name)) for name in HOOKS}


def _outermost(parts: Mapping[str, str]) -> dict[str, str]:
    return {
        path: why
        for path, why in parts.items()
        if is_code(path) or not any(path != other and is_within(path, other) for other in parts)
    }


def _reason(error: Exception, path: str) -> str:
    """One clause: why a module cannot be read."""
    if isinstance(error, OpaqueError):
        return str(error).removesuffix(WAY_OUT).rstrip().removesuffix(".")
    line = line_of_error((error.__cause__ or error).__traceback__)
    text = str(error).split(", so no one program")[0].split(". ")[0].strip()
    return text if line is None or str(line) in text else f"{text} ({line})"
