"""Finds the Job in a user's Python file: `FILE.py` or `FILE.py:NAME`.

Every rank loads the file itself, so nothing of a job is ever pickled.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from meshloom.errors import JobError
from meshloom.job import Job


def check_target(target: str) -> tuple[Path, str]:
    """The file and the name in it, without loading the file. The name is `job` when left out."""
    text, colon, name = target.rpartition(":")
    path, name = (Path(text), name) if colon and name.isidentifier() else (Path(target), "job")
    if not path.is_file():
        raise JobError(f"There is no file {path}. Give the Python file that holds the job, as FILE.py or FILE.py:NAME.")
    if path.suffix != ".py":
        raise JobError(f"{path} is not a Python file. Give the file that holds the job, as FILE.py or FILE.py:NAME.")
    return path, name


def load_job(target: str) -> Job | None:
    """Load the file and return its Job, calling NAME if it is a function.

    None: NAME is a function that returned nothing, because it ran a loop of its own.
    """
    path, name = check_target(target)
    module = _load(path)
    if not hasattr(module, name):
        raise JobError(f"{path} has no {name!r}. {_advice(path, module)}")
    found = getattr(module, name)
    if inspect.isfunction(found):
        parameters = inspect.signature(found).parameters.values()
        needed = [each.name for each in parameters if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        if needed:
            raise JobError(f"{path}:{name} needs arguments ({', '.join(needed)}). Name a function that can be called without any and returns a Job.")
        found = found()
        if found is None:
            return None
    if not isinstance(found, Job):
        raise JobError(f"{path}:{name} is a {type(found).__name__}, not a Job. {_advice(path, module)}")
    return found


def _load(path: Path) -> ModuleType:
    # A name of its own, so that a file called random.py does not hide the library's.
    name = f"meshloom_job_{path.stem}"
    specification = importlib.util.spec_from_file_location(name, path.resolve())
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # dataclasses and reader processes look their module up
    sys.path.insert(0, str(path.resolve().parent))
    specification.loader.exec_module(module)
    return module


def _advice(path: Path, module: Any) -> str:
    jobs = [name for name, value in vars(module).items() if isinstance(value, Job)]
    if jobs:
        return f"It has {', '.join(jobs)}: give {path}:{jobs[0]}."
    return "Define job = meshloom.Job(...) in it, or name a function that returns one, as FILE.py:NAME."
