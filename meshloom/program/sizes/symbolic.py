"""Finds the sizes of a batch at which a loss makes the same calls, in one run by shapes with symbolic sizes.

Python's questions about a size (`if length > 512`, `range(length)`, whether two dims broadcast) are recorded
as guards, and sizes of operands and results as expressions. Where all guards hold, the loss makes the same
calls, with these expressions as their sizes:

    x [s0, s1], labels [s2, s3]      guards: s0 * s1 == s2 * s3, s1 <= 1024      expressions: s1, 64 * s1, s0 * s1

Sizes 0 and 1 are constants: broadcasting changes the program.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


@dataclass(frozen=True)
class NotTracedError(Exception):
    """The loss cannot run with symbolic sizes. why: the reason, for messages."""

    why: str


def sizes_of(shapes: Mapping[str, Sequence[int]]) -> dict[Dim, int]:
    """Sizes of all dims of a batch's tensors.

    >>> sizes_of({"x": (8, 32)})
    {('x', 0): 8, ('x', 1): 32}
    """
    return {(name, dim): int(size) for name, shape in shapes.items() for dim, size in enumerate(shape)}


def dims_by_sizes(points: Sequence[Sizes]) -> dict[tuple[int, ...], list[Dim]]:
    """Dims that have equal sizes at all points, by those sizes, in the order of the last point."""
    groups: dict[tuple[int, ...], list[Dim]] = {}
    for dim in points[-1]:
        groups.setdefault(tuple(each[dim] for each in points), []).append(dim)
    return groups


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
        translate = _Translation(symbols)
        guards = [(translate(guard.expr), str(guard.sloc)) for guard in env.guards]
        guards = list({repr(each): (each, line) for each, line in guards}.values())
        expressions = {repr(each): each for each in map(translate, calls.expressions)}
    except NotTracedError:
        raise
    except Exception as error:  # some operators of torch do not support symbols, nor may the job's code
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise NotTracedError(f"{type(error).__name__}: {first[:160]}") from error
    return Trace(
        guards=tuple(each for each, _ in guards),
        expressions=tuple(expressions.values()),
        lines=tuple(line for _, line in guards),
    )


def value_of(expression: Expression, sizes: Sizes) -> Any:
    """The value of an expression or a condition.

    >>> value_of(["add", ["mul", 2, ["size", "x", 1]], -1], {("x", 1): 7})
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


def parts_of(expression: Expression) -> Iterator[Expression]:
    """The expression and all its subexpressions."""
    yield expression
    if isinstance(expression, list) and expression[0] != "size":
        for each in expression[1:]:
            yield from parts_of(each)


_OPERATORS: Mapping[str, Callable[..., Any]] = {
    **{
        name: getattr(operator, name)
        for name in ("pow", "floordiv", "mod", "eq", "ne", "lt", "le", "gt", "ge")
    },
    "add": lambda *terms: sum(terms),
    "mul": lambda *factors: math.prod(factors),
    "min": min,
    "max": max,
    "and": lambda *all_of: all(all_of),
    "or": lambda *any_of: any(any_of),
    "not": operator.not_,
}
_NAMES = {  # of sympy's and torch's classes
    "Add": "add", "Mul": "mul", "FloorDiv": "floordiv", "CleanDiv": "floordiv", "Mod": "mod", "PythonMod": "mod", "Min": "min", "Max": "max",
    "Equality": "eq", "Unequality": "ne", "StrictLessThan": "lt", "LessThan": "le", "StrictGreaterThan": "gt", "GreaterThan": "ge",
    "And": "and", "Or": "or", "Not": "not",
}  # fmt: skip


class _Translation:
    """Translates sympy's expressions of symbols into expressions of dims."""

    def __init__(self, symbols: Mapping[Any, Dim]) -> None:
        self._symbols = symbols

    def __call__(self, value: Any) -> Expression:
        if value in self._symbols:
            return ["size", *self._symbols[value]]
        name = type(value).__name__
        if name in ("BooleanTrue", "BooleanFalse"):
            return name == "BooleanTrue"
        if getattr(value, "is_Integer", False):
            return int(value)
        if name == "PowByNatural" or (name == "Pow" and value.args[1].is_Integer and int(value.args[1]) > 0):
            return ["pow", *map(self, value.args)]
        if name not in _NAMES:
            raise NotTracedError(
                f"it computes {str(value)[:80]}, which is no integer expression of the sizes of the batch"
            )
        return [_NAMES[name], *map(self, value.args)]


class _Calls(TorchDispatchMode):
    """Records the symbolic numbers among operands and results."""

    def __init__(self) -> None:
        super().__init__()
        self.expressions: dict[Any, None] = {}

    def _record(self, values: Any) -> None:
        """Record sizes and strides of tensors, and numbers."""
        for each in values:
            is_strided = isinstance(each, Tensor) and each.layout is torch.strided
            for size in (*each.shape, *each.stride()) if is_strided else (each,):
                if isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
                    self.expressions.setdefault(size.node.expr)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        value = func(*args, **(kwargs or {}))
        self._record(tree_leaves((args, kwargs, value)))
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
