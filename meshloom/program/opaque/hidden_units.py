"""Hidden units of an opaque module: how each rank of tp runs the user's own code on some of them, and what it adds to the sum.

    h = linear(x, up[e])              units of h: dim 1 of `up`, dim 2 of `down`
    y.index_add_(0, row, linear(act(h), down[e]) * weights)

What the module computes with units S, f(S), is a sum over them: f(S and T) = f(S) + f(T) - f(none). So the ranks' results are
partial ones, where each rank but the first leaves out f(none), which does not depend on its units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import Tensor

Kind = Literal["sum", "same", "rest"]


@dataclass(frozen=True, kw_only=True)
class UnitsDim:
    """The dim of a tensor that has the units: `outer` x units x `inner` indices. number: of the tensor in the call's state."""

    number: int
    dim: int
    outer: int = 1
    inner: int = 1

    def some(self, tensor: Tensor, units: Sequence[int]) -> Tensor:
        """The tensor with some of its units."""
        shape = tensor.shape
        apart = tensor.unflatten(
            self.dim, (self.outer, shape[self.dim] // (self.outer * self.inner), self.inner)
        )
        picked = apart[(slice(None),) * (self.dim + 1) + (list(units),)]
        return picked.flatten(self.dim, self.dim + 2)


@dataclass(frozen=True, kw_only=True)
class HiddenUnits:
    """The units of a call.

    count: of them. dims: where they are. results: of each, "sum" (nothing without units), "same" (the units do not
    matter), or "rest" (something without units, which a second run computes). rest: the share of the work that does not
    depend on units.
    held: how many this rank has; None: all. is_first: whether it is the rank that adds what does not depend on units.
    """

    count: int
    dims: tuple[UnitsDim, ...]
    results: tuple[Kind, ...]
    rest: float
    held: int | None = None
    is_first: bool = True

    @property
    def runs_without(self) -> bool:
        """Whether this rank runs the module without units, besides."""
        return self.held is not None and not self.is_first and "rest" in self.results

    @property
    def work(self) -> float:
        """This rank's share of the work."""
        if self.held is None:
            return 1.0
        alone = self.rest * (2 if self.runs_without else 1)
        return alone + (1 - self.rest) * self.held / max(self.count, 1)

    def without(self, state: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of a call with no units."""
        found = list(state)
        for each in self.dims:
            found[each.number] = found[each.number].detach().narrow(each.dim, 0, 0)
        return found

    def added(self, results: Sequence[Tensor], rest: Sequence[Tensor] | None) -> list[Tensor]:
        """What this rank adds to the sums. rest: results without units, if it runs without them."""
        if self.held is None or self.is_first:
            return list(results)
        others = rest if rest is not None else results
        return [
            value
            if kind == "sum"
            else value.detach().new_zeros(value.shape)
            if kind == "same"
            else value - other
            for kind, value, other in zip(self.results, results, others, strict=True)
        ]

    def encoded(self) -> dict[str, Any]:
        """Plain values, from which `of` makes it again."""
        return asdict(self)

    @staticmethod
    def of(found: Mapping[str, Any]) -> HiddenUnits:
        """Inverse of `encoded`."""
        given: dict[str, Any] = {
            **found,
            "dims": tuple(UnitsDim(**each) for each in found["dims"]),
            "results": tuple(found["results"]),
        }
        return HiddenUnits(**given)
