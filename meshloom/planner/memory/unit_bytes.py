"""The bytes of a model's units under zero=3, from the names and shapes of its parameters alone.

The units are those that `exchange/units/find_units.py` finds in the modules, where blocks that repeat are numbered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Described(Protocol):
    """What is read of a parameter."""

    @property
    def shape(self) -> Any: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def requires_grad(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class UnitBytes:
    """Of all parameters, of those that are trainable, and of those that are full at one time: the rest, which
    stays, and two units, the one that computes and the next one."""

    parameters: int
    trainable: int
    rest: int
    full: int
    full_trainable: int

    def sent(self, dp: int, microbatches: int) -> int:
        """Bytes that a rank hands over in a step: every unit is gathered for the forward and the backward of
        each chunk, the rest once, and gradients are added up in each chunk."""
        gathered = -(-(self.rest + 2 * microbatches * (self.parameters - self.rest)) // dp)
        return gathered + microbatches * self.trainable


def unit_bytes(parameters: Mapping[str, Described], large_bytes: int) -> UnitBytes:
    """large_bytes: from which a module's own parameters are a unit.

    >>> from types import SimpleNamespace as P
    >>> shapes = {f"blocks.{number}.weight": P(shape=(4, 5), num_bytes=80, requires_grad=True) for number in range(6)}
    >>> found = unit_bytes({**shapes, "head.weight": P(shape=(2, 5), num_bytes=40, requires_grad=True)}, 1000)
    >>> found.parameters, found.rest, found.full
    (520, 40, 200)
    """
    blocks = _repeated(parameters)
    large = Counter[str]()
    for name, each in parameters.items():
        if name not in blocks:
            large[name.rpartition(".")[0]] += each.num_bytes
    sizes, trained = Counter[str](), Counter[str]()
    for name, each in parameters.items():
        module = name.rpartition(".")[0]
        unit = blocks.get(name) or (module if module and large[module] >= large_bytes else "")
        sizes[unit] += each.num_bytes
        trained[unit] += each.num_bytes if each.requires_grad else 0
    rest, rest_trained = sizes.pop("", 0), trained.pop("", 0)
    return UnitBytes(
        parameters=rest + sizes.total(),
        trainable=rest_trained + trained.total(),
        rest=rest,
        full=rest + sum(sorted(sizes.values())[-2:]),
        full_trainable=rest_trained + sum(sorted(trained.values())[-2:]),
    )


def _repeated(parameters: Mapping[str, Described]) -> dict[str, str]:
    """Parameter -> the outermost numbered block it is in, of which there are several alike."""
    found: dict[str, str] = {}
    depth = max((name.count(".") for name in parameters), default=0)
    for level in range(depth):
        kinds: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
        for name, each in parameters.items():
            path = name.split(".")
            if name not in found and level < len(path) - 1 and path[level].isdecimal():
                block, inside = ".".join(path[: level + 1]), ".".join(path[level + 1 :])
                kinds.setdefault(block, []).append((inside, tuple(each.shape)))
        alike = Counter((block.rpartition(".")[0], tuple(kind)) for block, kind in kinds.items())
        for block, kind in kinds.items():
            if alike[block.rpartition(".")[0], tuple(kind)] > 1:
                found |= {f"{block}.{inside}": block for inside, _ in kind}
    return found
