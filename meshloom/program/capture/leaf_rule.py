"""Decides which modules are leaves: each of their calls is one operator of the program, which runs the module as written.

    what the job names                        leaves, whatever their size
    a line that cannot be captured            the innermost module of the user's whose method runs it, and all of its class

A class is tried once, and no more than eight of them are. The model itself, and a module with more than half of the parameters or of the
FLOPs, is a leaf only where the job names it. So is what is around a leaf that is no operator; and a program that computes other
numbers than eager is refused, as is what fails outside of all modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType

from torch import nn

from meshloom.core.errors import CaptureError
from meshloom.core.job import Job
from meshloom.core.modules.named_leaves import NAMED, is_within, named_leaves, outermost
from meshloom.core.modules.own_generators import drawing_modules
from meshloom.program.capture.check import DiffersError
from meshloom.program.capture.guards import ChangedWhileReadError
from meshloom.program.cost.cost import costs
from meshloom.program.cost.opaque_shares import shares
from meshloom.program.ir.lines import WAY_OUT, SourceLine, line_of_error
from meshloom.program.ir.nodes import submodule, with_parents
from meshloom.program.ir.program import Program
from meshloom.program.opaque.call import ChangedCallError, OpaqueError
from meshloom.program.trace.frozen import FrozenDrawError
from meshloom.program.trace.repeated_export import GatherCapturedError

LeafModules = Mapping[str, str]  # module -> why it is a leaf
MOST_CLASSES = 8
_NO_LEAF_HELPS = (ChangedWhileReadError, DiffersError, FrozenDrawError, GatherCapturedError, OpaqueError)


def leaves_of_job(job: Job, model: nn.Module) -> dict[str, str]:
    """The modules that `Job(leaves=...)` names, outermost ones.

    Raises `JobError` for a name without a module, and `CaptureError` for another that draws with a generator of its own."""
    found = dict.fromkeys(named_leaves(job.leaves, model), NAMED)
    for path, generator in drawing_modules(model).items():
        if not any(is_within(path, each) for each in found):
            kind = type(submodule(model, path)).__name__
            raise CaptureError(
                f"{path or 'the model'} draws with a generator of its own, {generator}, and draws of programs are torch's. Draw without it, or write "
                f"leaves=[{kind}] to run the module as written, whole on every rank of tp. {WAY_OUT}"
            )
    return _outermost(found)


def capture_with_leaves(
    read: Callable[[LeafModules], Program], model: nn.Module, named: LeafModules
) -> Program:
    """The program that `read` makes with the leaves that are named, and further ones where a line of a module cannot be captured."""
    leaves, found = named, dict[type, str]()  # class -> the module at which it became one
    while True:
        try:
            program = read(leaves)
            break
        except ChangedCallError as error:
            raise CaptureError(str(error)) from error
        except _NO_LEAF_HELPS:
            raise
        except CaptureError as error:
            ahead, why = _modules_of(error, model), _reason(error)
            path = next((each for each in ahead if not _is_torchs(submodule(model, each))), None)
            layer = next((each for each in ahead[:1] if each and path != each), None)
            if path is None and layer is None:
                raise
            path = path or ""
            kind, share = type(submodule(model, path)), _share_of_parameters(path, model)
            if not path or 2 * share > 1:
                raise _refused(model, path, why, f"{share:.0%} of the parameters", layer) from error
            if kind in found or len(found) == MOST_CLASSES:
                raise
            found[kind] = path
            like = [other for other, each in model.named_modules() if type(each) is kind]
            leaves = _outermost({**leaves, **dict.fromkeys(like, why)})
    work_of = costs(program) if found else {}
    for path in found.values():
        work = shares(program, work_of, [path])[1] if path in program.opaque else 0.0
        if 2 * work > 1:
            raise _refused(model, path, program.opaque[path], f"{work:.0%} of the FLOPs")
    return program


def _refused(model: nn.Module, path: str, why: str, share: str, layer: str | None = None) -> CaptureError:
    """layer: the one of torch's whose own line it is."""
    kind = type(submodule(model, path)).__name__
    where = f"{path} ({kind}) is {share}" if path else f"that is outside of all modules but the model, {kind}"
    named, what = (repr(layer), layer) if layer else (kind, path)
    # with all of the model in a leaf nothing is divided
    other = f"; or write leaves=[{named}] to run {what} as written, whole on every rank of tp" if what else ""
    return CaptureError(
        f"{why}, and {where}. Move the line into a function marked with @ml.leaf, or into a module of its own, which then runs as written{other}. {WAY_OUT}"
    )


def _share_of_parameters(path: str, model: nn.Module) -> float:
    one, all_ = (sum(each.numel() for each in of.parameters()) for of in (submodule(model, path), model))
    return one / max(all_, 1)


def _modules_of(error: CaptureError, model: nn.Module) -> list[str]:
    """The modules whose methods were running, the innermost first; none: it failed outside of all modules."""
    if error.path is not None:
        ahead = list(with_parents(error.path))
    else:
        ahead = list(_on_the_way(error, model)) or list(_with_line(error, model))
    names = {id(each): path for path, each in model.named_modules()}  # of a shared module the first one
    found = (names.get(id(submodule(model, path))) for path in ahead)
    return [path for path in found if path is not None]


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def _on_the_way(error: BaseException, model: nn.Module) -> Iterator[str]:
    """The modules whose methods ran when an exception was raised, the innermost first."""
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


def _with_line(error: CaptureError, model: nn.Module) -> Iterator[str]:
    """The first module with the error's line in a method, and those around it."""
    line = error.line
    if isinstance(line, SourceLine):
        found = (path for path, each in model.named_modules() if _has_line(type(each), line))
        yield from with_parents(next(found, ""))


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


def _outermost(leaves: LeafModules) -> dict[str, str]:
    return {path: leaves[path] for path in outermost(leaves)}


def _reason(error: CaptureError) -> str:
    """One clause: why a module cannot be captured."""
    line = line_of_error((error.__cause__ or error).__traceback__)
    text = str(error).split(", so no one program")[0].split(". ")[0].strip()
    return text if line is None or str(line) in text else f"{text} ({line})"
