"""`meshloom run`: a script with a loop of its own, on each rank of a plan."""

from __future__ import annotations

import argparse
import ast
import builtins
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

from meshloom.core.errors import JobError
from meshloom.core.plan import Plan
from meshloom.core.random import seed_script
from meshloom.launch.devices import choose_devices
from meshloom.launch.environment import is_rank, launched_plan, script_seed, set_for_script
from meshloom.launch.failure import leave, report_failure, report_interrupt
from meshloom.launch.processes.launcher import run_ranks
from meshloom.loops.ranks import check_met, check_of_loops, has_ranks, leave_ranks, ranks


def start_script(arguments: argparse.Namespace) -> int:
    """Start the ranks of the plan; without one, or with one rank, run the script here. The exit code."""
    check_script(arguments.target)
    text = arguments.plan or launched_plan() or ""
    plan = Plan.parse(text) if text else Plan()
    check_of_loops(plan)
    kind, _ = choose_devices(plan.mesh, arguments.devices)
    if plan.mesh.size == 1:
        return run_script(arguments)
    if kind == "simulated":  # more ranks than cores
        kind, _ = choose_devices(plan.mesh, "cpu")
    return run_ranks(
        arguments.command, plan.mesh, kind, str(plan), transport=arguments.transport, scripts=True
    )


def check_script(target: str) -> None:
    """Raises `JobError` for what is no script."""
    path = Path(target)
    if path.is_dir():
        raise JobError(f"{path} is a directory. Give a script, as in meshloom run train.py --plan dp=2.")
    if path.is_file() or file_of(target).is_file():
        return
    file, _, name = target.rpartition(":")
    if name.isidentifier() and Path(file).is_file():
        raise JobError(
            f"{target} names a job, and run starts scripts that have a loop of their own. Use meshloom train {target}."
        )
    raise JobError(f"There is no file {path}. Give a script, as in meshloom run train.py --plan dp=2.")


def run_script(arguments: argparse.Namespace) -> int:
    """Run the script in this process, which is one of the plan's ranks or the only one. The exit code."""
    set_for_script(arguments.plan or "", arguments.devices, arguments.transport, arguments.timeout)
    seed_script(script_seed())
    try:
        _run_to_its_end(arguments)
    except BaseException as error:
        if isinstance(error, SystemExit) or not is_rank():
            raise
        if isinstance(error, KeyboardInterrupt):
            leave(report_interrupt(error))
        leave(ranks().world.report(error) if has_ranks() else report_failure(error))
    return 0


def _run_to_its_end(arguments: argparse.Namespace) -> None:
    try:
        execute(arguments.target, arguments.words)
    except SystemExit as leaving:
        if leaving.code:
            leave_ranks(well=False)
        else:
            _leave()
        raise
    _leave()


def _leave() -> None:
    check_met()
    if has_ranks():
        ranks().world.local[0].check_end()
    leave_ranks(well=True)


def execute(target: str, words: Sequence[str]) -> None:
    """What `python target words` does: the file's code in a module `__main__`, which finds files beside it. What `python -m` does of a module's name, and
    of a file with relative imports, which are of the packages that it is in."""
    path = file_of(target)
    file = str(path.absolute())
    loader = SourceFileLoader("__main__", file)
    module = ModuleType("__main__")
    vars(module).update(__file__=file, __loader__=loader, __cached__=None, __builtins__=builtins)
    sys.modules["__main__"] = module
    top = top_of(target)
    packages = path.resolve().parent.relative_to(top).parts
    sys.argv = [file if packages else target, *words]
    if not sys.flags.safe_path:  # else Python has put nothing there
        sys.path[0] = str(top)
    if packages:
        vars(module)["__package__"] = ".".join(packages)
        vars(module)["__spec__"] = spec_from_file_location(".".join([*packages, path.stem]), file)
    exec(loader.source_to_code(loader.get_data(file), file), vars(module))  # noqa: S102


def file_of(target: str) -> Path:
    """The file of a script, or of a module's name as `python -m` has it."""
    path, as_module = Path(target), Path(*target.split(".")).with_suffix(".py")
    return as_module if as_module.is_file() and not path.is_file() else path


def top_of(target: str) -> Path:
    """The directory in which a script's imports begin: its own, or that of the packages that it is a module of."""
    path = file_of(target).resolve()
    if path.name == Path(target).name and not _is_relative(path):
        return path.parent
    top, here = path.parent, Path.cwd()
    while (top / "__init__.py").is_file():
        top = top.parent
    return here if top == path.parent and here in path.parents else top


def _is_relative(path: Path) -> bool:
    try:
        nodes = ast.walk(ast.parse(path.read_bytes()))
    except (SyntaxError, ValueError):  # which running it tells
        return False
    return any(isinstance(each, ast.ImportFrom) and each.level for each in nodes)
