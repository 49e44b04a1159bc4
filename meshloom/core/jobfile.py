"""Loads the Job of a user's Python file: `FILE.py` or `FILE.py:NAME`.

Every rank loads the file itself, so a job is never pickled.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from meshloom.core.errors import JobError
from meshloom.core.job import Job
from meshloom.core.random import preserved_draws, seed_everything

_SEED = 0  # of what a file draws while it is loaded
_DEFINE = (
    "Define job = meshloom.Job(...) in it, or name a function that returns one, as FILE.py:NAME. "
    "A script with a loop of its own is started by meshloom run {path}."
)


def check_target(target: str) -> tuple[Path, str]:
    """The file and the name in it (default `job`), without loading the file. Raises `JobError`."""
    text, colon, name = target.rpartition(":")
    text, name = (text, name) if colon and name.isidentifier() else (target, "job")
    path = Path(text)
    if not path.exists() and all(part.isidentifier() for part in text.split(".")):  # as after `python -m`
        as_module = Path(*text.split(".")).with_suffix(".py")
        path = as_module if as_module.is_file() else path
    if path.is_dir():
        raise JobError(
            f"{path} is a directory. Give the file that holds the job, as FILE.py or FILE.py:NAME."
        )
    if not path.is_file():
        raise JobError(
            f"There is no file {path}. Give the Python file that holds the job, as FILE.py or FILE.py:NAME."
        )
    if path.suffix != ".py":
        raise JobError(
            f"{path} is not a Python file. Give the file that holds the job, as FILE.py or FILE.py:NAME."
        )
    return path, name


def check_no_script(target: str) -> tuple[Path, str]:
    """As `check_target`. Raises `JobError` for a script with a loop of its own, which would run when it is loaded."""
    path, name = check_target(target)
    if is_script(target):
        raise JobError(f"{path} has no {name!r}. {_DEFINE.format(path=path)}")
    return path, name


def is_script(target: str) -> bool:
    """Whether FILE.py, without a name, is a script with a loop of its own: it imports meshloom, and neither makes a `Job` nor has a
    `job` at its top, by its source alone. Raises `JobError` for no Python file."""
    path, name = check_target(target)
    if target.endswith(f":{name}"):
        return False
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return False
    names = {each for node in tree.body for each in _bound(node)}
    uses = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute | ast.Name)
    }
    imported = {
        (each.name if isinstance(node, ast.Import) else node.module or "").partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for each in node.names
    }
    may_have_one = "job" in names or ("*" in names and "parallel" not in uses)
    return "meshloom" in imported and not may_have_one and "Job" not in uses


def _bound(node: ast.AST) -> Iterator[str]:
    """The names that a statement binds where it stands."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
        return
    if isinstance(node, ast.alias):
        yield node.asname or node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    for child in ast.iter_child_nodes(node):
        yield from _bound(child)


@contextmanager
def as_program(target: str, words: Sequence[str]) -> Generator[None]:
    """Set sys.argv to what the job file would see as the program: its name and `words`, not meshloom's."""
    before = sys.argv
    sys.argv = [str(check_target(target)[0]), *words]
    try:
        yield
    finally:
        sys.argv = before


def load_job(target: str) -> Job | None:
    """The Job in the file; NAME is called if it is a function. Raises `JobError`.

    The file begins with the same draws wherever and whenever it is loaded (`torch`, `random`, numpy's global generator): ranks
    would else have other weights and other splits of their data, and so would a run that goes on.
    None: NAME is a function that returned nothing, since it ran its own loop.
    """
    path, name = check_no_script(target)
    with preserved_draws():
        seed_everything(_SEED)
        return _found(path, name)


def _found(path: Path, name: str) -> Job | None:
    module = _load(path)
    if not hasattr(module, name):
        raise JobError(f"{path} has no {name!r}. {_advice(path, module)}")
    found = getattr(module, name)
    if inspect.isfunction(found):
        parameters = inspect.signature(found).parameters.values()
        named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        if needed := [each.name for each in named if each.default is each.empty]:
            raise JobError(
                f"{path}:{name} needs arguments ({', '.join(needed)}). Name a function that can be called without any and returns a Job."
            )
        found = found()
        if found is None:
            return None
    if not isinstance(found, Job):
        raise JobError(f"{path}:{name} is a {type(found).__name__}, not a Job. {_advice(path, module)}")
    return found


def _load(path: Path) -> ModuleType:
    """Run the file. It can import files beside it, as under `python FILE`, and files in the working
    directory, as under `python -m`."""
    file, here = path.resolve(), Path.cwd()
    top = file.parent  # the directory above the packages of the file
    while (top / "__init__.py").is_file():
        top = top.parent
    if str(here) not in sys.path:
        sys.path.insert(0, str(here))
    sys.path.insert(0, str(top))
    if top != file.parent:  # last, so that modules of a package hide no others
        sys.path.append(str(file.parent))
    name = _module_name(file, here) or _module_name(file, top)
    if name:
        sys.modules.pop(name, None)
        importlib.import_module(name.rpartition(".")[0])
        if name in sys.modules:  # its package has imported it
            return sys.modules[name]
    # A file in no package gets a name of its own, so that random.py does not hide the standard library's.
    name = name or f"meshloom_job_{file.stem}"
    specification = importlib.util.spec_from_file_location(name, file)
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # dataclasses and worker processes look up their module
    try:
        specification.loader.exec_module(module)
    except SyntaxError as error:
        if error.filename is None:  # of bytes that are no text
            raise JobError(f"{file} is no Python source: {error.msg}.") from None
        raise
    return module


def _module_name(file: Path, root: Path) -> str | None:
    """The name by which `python -m` would run the file from `root`; None if it is in no package there."""
    if root not in file.parents:
        return None
    *packages, last = file.relative_to(root).with_suffix("").parts
    if not packages or not all(each.isidentifier() for each in packages) or "." in last:
        return None
    try:
        found = importlib.util.find_spec(packages[0])
    except ValueError:
        return None
    places = [Path(each).resolve() for each in found.submodule_search_locations or ()] if found else []
    # otherwise another package of this name is found
    return ".".join([*packages, last]) if root.resolve() / packages[0] in places else None


def _advice(path: Path, module: Any) -> str:
    jobs = [name for name, value in vars(module).items() if isinstance(value, Job)]
    if jobs:
        return f"It has {', '.join(jobs)}: give {path}:{jobs[0]}."
    return _DEFINE.format(path=path)
