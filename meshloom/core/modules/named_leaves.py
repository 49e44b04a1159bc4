"""Which leaves are modules, named by `Job(leaves=...)`, and which are calls of functions.

layers.0                      a module
@train:read;layers.0,head     a call of the function `read` of train.py with these modules among its arguments, "." for the model
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch import nn

from meshloom.core.errors import JobError

NAMED = "the job asks for it"  # why such a module is a leaf


def is_function(path: str) -> bool:
    """Whether a leaf is a call of a function."""
    return path.startswith("@")


def function_name(path: str) -> str:
    """The name of the function of such a leaf.

    >>> function_name("@train:Net.read;head")
    'train:Net.read'
    """
    return path[1:].rpartition(";")[0]


def shown(path: str) -> str:
    """A leaf for a sentence.

    >>> shown(""), shown("head"), shown("@train:Net.read;head")
    ('the model', 'head', 'Net.read()')
    """
    return f"{function_name(path).partition(':')[2]}()" if is_function(path) else path or "the model"


def modules_of(paths: Iterable[str]) -> list[str]:
    """The modules of leaves: themselves, and those that functions are given.

    >>> modules_of(["layers.0", "@train:read;head,.", "@train:count;"])
    ['layers.0', 'head', '']
    """
    found: dict[str, None] = {}
    for path in paths:
        given = path.rpartition(";")[2].split(",") if is_function(path) else []
        found |= dict.fromkeys(each.removeprefix(".") for each in given if each)
        found |= {} if is_function(path) else {path: None}
    return list(found)


def named_leaves(asked: Sequence[str | type[nn.Module]], model: nn.Module) -> list[str]:
    """Their paths, outermost ones. Raises `JobError` for a name without a module.

    >>> named_leaves([nn.ReLU, "1"], nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU())))
    ['0', '1']
    """
    found: dict[str, None] = {}
    for each in asked:
        paths = [path for path, module in model.named_modules() if _is_asked(each, path, module)]
        if not paths:
            name = each if isinstance(each, str) else each.__name__
            known = dict.fromkeys(type(module).__name__ for module in model.modules())
            raise JobError(
                f"Job(leaves=...) names {name}, and the model has no module of that name or class. Its classes are {', '.join(known)}."
            )
        found |= dict.fromkeys(paths)
    return outermost(found)


def is_within(path: str, module: str) -> bool:
    """Whether a path is that of a module, or of something in it.

    >>> is_within("a.b.weight", "a.b"), is_within("a.b", "a.b"), is_within("a.bc", "a.b"), is_within("a", "")
    (True, True, False, True)
    """
    return not module or path == module or path.startswith(f"{module}.")


def outermost(paths: Collection[str]) -> list[str]:
    """Those that are within no other."""
    return [path for path in paths if not any(path != each and is_within(path, each) for each in paths)]


def _is_asked(asked: str | type[nn.Module], path: str, module: nn.Module) -> bool:
    if not isinstance(asked, str):
        return isinstance(module, asked)
    return path == asked or path.rpartition(".")[2] == asked or type(module).__name__ == asked
