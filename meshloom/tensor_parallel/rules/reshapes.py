"""Reshapes: dims are flattened into products of axes, and unflattened again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from meshloom.tensor_parallel.rules.factors import FIRST_LINEAR, Dims, Factors, Product, ShardSizes
from meshloom.tensor_parallel.rules.operator_call import Call, Rule, replicated, set_argument, to_output_shape


def reshaped(before: Sequence[int], after: Sequence[int]) -> tuple[Dims, Dims, dict[str, int]]:
    """The dims of a tensor and of its reshape, in labels common to both, where their boundaries agree.

    >>> reshaped((2, 12), (2, 3, 4))[:2]
    (('r0', Product(parts=('r1', 'r2'))), ('r0', 'r1', 'r2'))
    >>> reshaped((4, 6), (6, 4))[:2]
    ((None, None), (None, None))
    """
    left: list[list[str]] = [[] for _ in before]
    right: list[list[str]] = [[] for _ in after]
    broken_left, broken_right = set[int](), set[int]()
    sizes: dict[str, int] = {}
    if 0 in (*before, *after):
        return (None,) * len(before), (None,) * len(after), {}
    i = j = 0
    a = b = 1  # what remains of dims i and j
    while True:
        while a == 1 and i < len(before):
            a, i = before[i], i + 1
        while b == 1 and j < len(after):
            b, j = after[j], j + 1
        if a == 1 and b == 1:
            break
        step = math.gcd(a, b) if (a % b == 0 or b % a == 0) else 0
        if not step:
            # Boundaries do not nest: these dims stay unsharded up to the next common boundary.
            broken_left.add(i - 1)
            broken_right.add(j - 1)
            while a != b and (i < len(before) or j < len(after)):
                if a < b and i < len(before):
                    a, i = a * before[i], i + 1
                    broken_left.add(i - 1)
                elif j < len(after):
                    b, j = b * after[j], j + 1
                    broken_right.add(j - 1)
                else:
                    break
            a = b = 1
            continue
        name = f"r{len(sizes)}"
        sizes[name] = step
        left[i - 1].append(name)
        right[j - 1].append(name)
        a, b = a // step, b // step
    return _terms(left, broken_left), _terms(right, broken_right), sizes


def _terms(labels: list[list[str]], broken: set[int]) -> Dims:
    return tuple(
        None if place in broken or not names else names[0] if len(names) == 1 else Product(tuple(names))
        for place, names in enumerate(labels)
    )


def _reshape(name: str | None) -> Rule:
    def rule(call: Call) -> Factors | None:
        left, right, sizes = reshaped(call.operands[0].shape, call.outputs[0].shape)
        operands = (left, *replicated(call.operands[1:]))
        local = to_output_shape(name) if name else None
        return Factors(operands=operands, outputs=(right,), sizes=sizes, linear=FIRST_LINEAR, local=local)

    return rule


def as_other(name: str, inner: Rule) -> Rule:
    """view_as, reshape_as, expand_as: only the shape of the other tensor matters."""

    def rule(call: Call) -> Factors | None:
        factors = inner(call)
        if factors is None:
            return None

        def local(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shard: ShardSizes) -> Any:
            return getattr(torch.ops.aten, name).default, (args[0], tuple(shard.outputs[0])), {}

        operands = (factors.operands[0], *replicated(call.operands[1:]))
        return dataclasses.replace(factors, local=local, operands=operands)

    return rule


def _unflatten(call: Call) -> Factors | None:
    left, right, sizes = reshaped(call.operands[0].shape, call.outputs[0].shape)
    dim = call.dim("dim", len(call.operands[0].shape))
    count = len(call.arguments["sizes"])

    def local(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shard: ShardSizes) -> Any:
        return set_argument(target, args, kwargs, "sizes", tuple(shard.outputs[0][dim : dim + count]))

    return Factors(operands=(left,), outputs=(right,), sizes=sizes, linear=FIRST_LINEAR, local=local)


def _squeeze(call: Call) -> Factors | None:
    """squeeze, with its dims made explicit: a shard may have size 1 where the full dim has not."""
    shape = call.operands[0].shape
    left, right, sizes = reshaped(shape, call.outputs[0].shape)
    gone = tuple(place for place in call.dims("dim", len(shape)) if shape[place] == 1)

    def local(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shard: ShardSizes) -> Any:
        return torch.ops.aten.squeeze.dims, (args[0], gone), {}

    return Factors(operands=(left,), outputs=(right,), sizes=sizes, linear=FIRST_LINEAR, local=local)


def _view(call: Call) -> Factors | None:
    """By shape; as another dtype of the same size it reads the bits of each element."""
    if "dtype" not in call.arguments:
        return _reshape("size")(call)
    shape = call.operands[0].shape
    if shape != call.outputs[0].shape:
        return None
    left, right, sizes = reshaped(shape, shape)
    return Factors(operands=(left,), outputs=(right,), sizes=sizes)


RESHAPES: dict[str, Rule] = {
    "view": _view,
    "_unsafe_view": _reshape("size"),
    "reshape": _reshape("shape"),
    "flatten": _reshape(None),
    "ravel": _reshape(None),
    "unsqueeze": _reshape(None),
    "squeeze": _squeeze,
    "unflatten": _unflatten,
    "view_as": as_other("reshape", _reshape(None)),
    "reshape_as": as_other("reshape", _reshape(None)),
}
