"""Finds the sizes of a batch at which a loss makes the same calls, in one run by shapes with symbolic sizes.

Python's questions about a size (`if length > 512`, `range(length)`, whether two dims broadcast) are recorded as guards,
sizes of operands and results as expressions. Where all guards hold, the calls are the same, with these sizes:

    x [s0, s1], labels [s2, s3]      guards: s0 * s1 == s2 * s3, s1 <= 1024      expressions: s1, 64 * s1, s0 * s1

Sizes 0 and 1 are constants: broadcasting changes the program.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshloom.core.errors import CaptureError, first_line
from meshloom.core.job import Job
from meshloom.program.capture.shapes import model_by_shapes, on_cpu
from meshloom.program.ir.batch_values import stand_ins
from meshloom.program.ir.leaves import Leaves
from meshloom.program.ir.program import Program
from meshloom.program.ir.replaced import seen_as_exported
from meshloom.program.ir.step_input import answered_by_input
from meshloom.program.trace.repeated_export import capturing

Dim = tuple[str, int]  # name of a tensor of the batch, index of its dim
Expression = Any  # a number, ["size", tensor, dim], or [operator, operands...]: as in JSON
Sizes = Mapping[Dim, int]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """guards: where they hold, the calls are the same. expressions: sizes in them. lines: of the guards."""

    guards: tuple[Expression, ...]
    expressions: tuple[Expression, ...]
    lines: tuple[str, ...] = field(default=(), compare=False)

    def broken(self, sizes: Sizes) -> int | None:
        """Number of the first guard that does not hold at these sizes; None: the calls are the same."""
        return next((number for number, guard in enumerate(self.guards) if not holds(guard, sizes)), None)


class NotTracedError(CaptureError):
    """The loss cannot run with symbolic sizes."""


def trace(job: Job, program: Program, leaves: Leaves) -> Trace:
    """The trace of `job.loss` for batches like this one. program: for one of them, of the same mode and
    precision. Raises `NotTracedError`."""
    from torch._dispatch.python import enable_python_dispatcher

    calls = _Calls()
    try:
        with capturing(program.precision), on_cpu(program.device):
            model, mode = model_by_shapes(job, program.precision, training=program.training)
            env: Any = mode.shape_env
            tensors, symbols = _symbolic(leaves, mode)
            numbers = {
                name: mode.from_tensor(each, static_shapes=True)
                for name, each in stand_ins(program.others, leaves).items()
            }
            step = mode.from_tensor(torch.ones((), dtype=torch.float64), static_shapes=True)
            with seen_as_exported(), enable_python_dispatcher(), mode, calls, answered_by_input(step):
                job.loss(model, leaves.rebuild(tensors, numbers))
        if env.deferred_runtime_asserts:
            raise NotTracedError("what it computes depends on values of the batch")
        guards = {guard.expr: str(guard.sloc) for guard in env.guards}
        return Trace(
            guards=tuple(_translated(each, symbols) for each in guards),
            expressions=tuple(_translated(each, symbols) for each in calls.expressions),
            lines=tuple(guards.values()),
        )
    except NotTracedError:
        raise
    except Exception as error:  # some operators of torch do not support symbols, nor may the job's code
        first = first_line(error)
        raise NotTracedError(f"{type(error).__name__}: {first[:160]}") from error


def value_of(expression: Expression, sizes: Sizes) -> Any:
    """The value of an expression or a condition.

    >>> value_of(["Add", ["Mul", 2, ["size", "x", 1]], -1], {("x", 1): 7})
    13
    """
    if not isinstance(expression, list):
        return expression
    kind, *rest = expression
    if kind == "size":
        return sizes[rest[0], rest[1]]
    return _OPERATORS[kind](*(value_of(each, sizes) for each in rest))


def holds(condition: Expression, sizes: Sizes) -> bool:
    """Whether a condition holds. One that divides by zero does not."""
    try:
        return bool(value_of(condition, sizes))
    except ZeroDivisionError:
        return False


_OPERATORS: Mapping[str, Callable[..., Any]] = {  # by sympy's and torch's classes
    "Add": lambda *terms: sum(terms), "Mul": lambda *factors: math.prod(factors), "Min": min, "Max": max,
    "Pow": operator.pow, "PowByNatural": operator.pow, "FloorDiv": operator.floordiv, "CleanDiv": operator.floordiv,
    "Mod": operator.mod, "PythonMod": operator.mod, "Equality": operator.eq, "Unequality": operator.ne,
    "StrictLessThan": operator.lt, "LessThan": operator.le, "StrictGreaterThan": operator.gt, "GreaterThan": operator.ge,
    "And": lambda *all_of: all(all_of), "Or": lambda *any_of: any(any_of), "Not": operator.not_,
}  # fmt: skip


def _translated(value: Any, symbols: Mapping[Any, Dim]) -> Expression:
    """Sympy's expression of symbols as one of dims."""
    if value in symbols:
        return ["size", *symbols[value]]
    name = type(value).__name__
    if name in ("BooleanTrue", "BooleanFalse"):
        return name == "BooleanTrue"
    if getattr(value, "is_Integer", False):
        return int(value)
    is_root = name == "Pow" and not (value.args[1].is_Integer and int(value.args[1]) > 0)
    if is_root or name not in _OPERATORS:
        raise NotTracedError(
            f"it computes {str(value)[:80]}, which is no integer expression of the sizes of the batch"
        )
    return [name, *(_translated(each, symbols) for each in value.args)]


class _Calls(TorchDispatchMode):
    """Records the symbolic numbers among operands and results, and the sizes and strides of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.expressions: dict[Any, None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        value = func(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs, value)):
            is_strided = isinstance(each, Tensor) and each.layout is torch.strided
            for size in (*each.shape, *each.stride()) if is_strided else (each,):
                if isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
                    self.expressions.setdefault(size.node.expr)
        return value


def _symbolic(leaves: Leaves, mode: Any) -> tuple[list[Tensor], dict[Any, Dim]]:
    """The batch's tensors with symbolic sizes, and the symbols."""
    from torch._dynamo.source import LocalSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    tensors: list[Tensor] = []
    symbols: dict[Any, Dim] = {}
    for number, (name, leaf) in enumerate(leaves.tensors.items()):
        like = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)
        # each dim a symbol of its own
        kinds = [DimDynamic.DYNAMIC if size > 1 else DimDynamic.STATIC for size in leaf.shape]
        context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
        source = LocalSource(f"leaf_{number}")
        tensor = mode.from_tensor(like, static_shapes=False, source=source, symbolic_context=context)
        tensors.append(tensor)
        for dim, size in enumerate(tensor.shape):
            if isinstance(size, torch.SymInt):
                symbols[size.node.expr] = (name, dim)
    return tensors, symbols
