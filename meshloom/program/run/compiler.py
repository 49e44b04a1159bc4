"""The compiler of a rank under `compile=true`: torch.compile with the draws of eager, its work counted.

On CPUs inductor's own random numbers are others than eager's, so operators that draw are left to eager
(`fallback_random`). Every function has code of its own for each kind of inputs, up to a limit, and kinds that differ
in sizes alone share code in which these sizes are variables.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
)

from meshloom.core.compiling import MOST_VARIANTS, Compiled
from meshloom.core.errors import DeviceError, JobError

NOTHING = (
    "compile=true compiles nothing on rank 0: between collectives, leaves and draws there are too few operators in a row for a compiled function to cost less "
    "than it saves."
)
Function = Callable[..., Any]
_compile: Any = torch.compile
# from torch 2.13 on
_ISOLATES = "isolate_recompiles" in inspect.signature(_compile).parameters


class Compiler:
    """Compiles functions for `device`.

    known: what has been compiled, by whatever tells functions apart (`regions.py`).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.known: dict[Any, Any] = {}
        self._functions: list[_Function] = []
        self._graphs, self._seconds, self._told = 0, 0.0, False
        self._before = _counted()
        self._reasons: dict[str, int] = {}

    def check(self) -> None:
        """Compile a function of one line. Raises `DeviceError` if this machine cannot, as without a C++ compiler."""
        # Torch's compiler takes a second to import, and only these plans need it.
        from torch._dynamo.exc import TorchDynamoException
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        counted = _counted()
        x = torch.ones(8, device=self._device)
        try:
            if self._device.type == "cpu":
                get_cpp_compiler()  # what is kept from before would need none
            _isolated(_probe, self._backend)(x)
        except (TorchDynamoException, InvalidCxxCompiler, OSError) as error:
            needs = "a C++ compiler" if self._device.type == "cpu" else "Triton"
            raise DeviceError(
                f"compile=true needs {needs}, and torch.compile failed here on one addition: {_first_line(error)}. Install one "
                f"{'(g++, or set CXX to the one to use) ' if self._device.type == 'cpu' else ''}or use compile=none."
            ) from None
        self._graphs = 0
        self._before = [a + b - c for a, b, c in zip(self._before, _counted(), counted, strict=True)]

    def function(self, function: Function, *, dynamic: bool | None = None, recasts: bool = False) -> Function:
        """`function`, compiled when it is called. dynamic: its sizes are variables from the start. recasts: it casts parameters anew
        in backward. Calls raise `JobError` for what cannot be compiled."""
        made = _Function(self, function, partial(self._backend, recasts=recasts), dynamic)
        self._functions.append(made)
        return made

    @property
    def report(self) -> Compiled:
        """What was compiled so far."""
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        hits, misses = (now - then for now, then in zip(_counted(), self._before, strict=True))
        return Compiled(
            functions=len(self._functions), graphs=self._graphs, breaks=sum(self._reasons.values()), reasons=tuple(self._reasons), hits=hits,
            misses=misses, seconds=self._seconds, uncompiled=sum(each.is_full for each in self._functions), directory=cache_dir(),
        )  # fmt: skip

    def take_notes(self) -> list[str]:
        """The report, as soon as something was compiled, and once; after a step in which nothing can be, that."""
        notes = [str(self.report)] if self._graphs and not self._told else []
        if not self._functions and not self._told:
            notes = [NOTHING]
        self._told = self._told or bool(notes)
        return notes

    @property
    def num_graphs(self) -> int:
        """Graphs compiled so far."""
        return self._graphs

    def compiled(self, seconds: float, breaks: dict[str, int]) -> None:
        """A call in which something was compiled. breaks: where, and how often."""
        self._seconds += seconds
        for reason, count in breaks.items():
            self._reasons[reason] = self._reasons.get(reason, 0) + count

    def _backend(self, graph: Any, inputs: Any, *, recasts: bool = False) -> Any:
        from torch._inductor.compile_fx import compile_fx

        self._graphs += 1
        # One thread: a rank has few cores, and a pool of processes would outlive the run.
        options: dict[str, Any] = {"fallback_random": True}
        if self._device.type == "cpu":
            options["compile_threads"] = 1
        if recasts:
            from meshloom.program.run.recomputed_casts import RecomputedCasts

            options["joint_custom_post_pass"] = RecomputedCasts(inputs)
        with _disable_current_modes():  # keyed draws are of what runs, not of what is traced
            return compile_fx(graph, inputs, config_patches=options)


class _Function:
    """A function that is compiled for each kind of inputs, up to `MOST_VARIANTS`."""

    def __init__(self, compiler: Compiler, function: Function, backend: Any, dynamic: bool | None) -> None:
        self._compiler = compiler
        self._run = _isolated(function, backend, dynamic)
        self._variants = 0

    @property
    def is_full(self) -> bool:
        """Whether inputs of a further kind would run uncompiled."""
        return self._variants >= MOST_VARIANTS

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiler = self._compiler
        graphs, began = compiler.num_graphs, time.perf_counter()
        breaks = None if self._variants else _breaks()
        try:
            result = self._run(*args, **kwargs)
        except Exception as error:
            from torch._dynamo.exc import TorchDynamoException

            if not isinstance(error, TorchDynamoException):
                raise
            raise JobError(
                f"compile=true: torch.compile failed on what the loss computes: {_first_line(error)}. Use compile=none, or keep that part out of it with "
                "torch.compiler.disable."
            ) from error
        if compiler.num_graphs != graphs:
            self._variants += 1
            now, before = _breaks(), breaks or {}
            found = (
                {reason: count - before.get(reason, 0) for reason, count in now.items()}
                if breaks is not None
                else {}
            )
            compiler.compiled(time.perf_counter() - began, {each: n for each, n in found.items() if n})
        return result


def _isolated(function: Function, backend: Any, dynamic: bool | None = None) -> Function:
    """`function`, compiled with code that no other compiled function shares, for `MOST_VARIANTS` kinds of inputs."""
    if _ISOLATES:
        return _compile(
            function, backend=backend, dynamic=dynamic, recompile_limit=MOST_VARIANTS, isolate_recompiles=True
        )
    # Torch keeps what it compiles with the function's code object, and as many kinds of its own accord.
    if isinstance(function, FunctionType):
        code = function.__code__.replace()
        own = FunctionType(
            code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        own.__kwdefaults__ = function.__kwdefaults__
        function = own
    return _compile(function, backend=backend, dynamic=dynamic)


def _probe(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def _counted() -> list[int]:
    """Graphs of this process found and not found among kept code."""
    from torch._dynamo.utils import counters

    inductor: Any = counters["inductor"]
    return [inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"]]


def _breaks() -> dict[str, int]:
    """Graph breaks of this process: why, and how often."""
    from torch._dynamo.utils import counters

    breaks: Any = counters["graph_break"]
    found: dict[str, int] = {}
    for reason, count in breaks.items():
        line = str(reason).strip().splitlines()[0][:120]
        found[line] = found.get(line, 0) + count
    return found


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300].rstrip(".")
