"""Bugs of slices: zero=1 to 3."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from meshloom.exchange.buckets.scattered import ScatteredBuckets
from meshloom.exchange.copies import OneEach
from meshloom.exchange.sharded import Sharded
from meshloom.exchange.units.unit_gathering import UnitGathering
from meshloom.exchange.units.unit_slices import UnitFlat, UnitSlice
from tests.planted.bugs import Patch, bug, wrap


@bug("two-adamw", "dp=2,zero=2,microbatches=2", causes="rounding|unknown", module=None)
def slices_of_sums_are_rounded(patch: Patch) -> None:
    def rounded(right: Any, self: Any) -> list[Tensor]:
        return [each.copy_(each.bfloat16()) for each in right(self)]

    wrap(patch, ScatteredBuckets, "collect", rounded)


@bug("convolutions-adamw", "dp=2,zero=3", causes="rounding|stale|forward", module="conv")
@bug("long-sgd", "dp=2,zero=3", causes="rounding|stale|forward", module="embed")
def what_is_gathered_for_a_forward_is_rounded(patch: Patch) -> None:
    def rounded(right: Any, self: UnitGathering, number: int) -> Any:
        found = right(self, number)
        wait = found.wait

        def waited() -> list[Tensor]:
            return [each.copy_(each.bfloat16()) for each in wait()]

        found.wait = waited
        return found

    wrap(patch, UnitGathering, "_gather", rounded)


@bug("two-adamw", "dp=2,zero=1", causes="border|optimizer|scale", module=None)
def the_last_element_of_a_slice_has_no_gradient(patch: Patch) -> None:
    def without(right: Any, self: Sharded, weight: Any) -> Any:
        found = yield from right(self, weight)
        for each in found:
            if each is not None:
                each[-1:] = 0
        return found

    wrap(patch, Sharded, "finish", without)


@bug("two-adamw", "dp=2,zero=1,bucket_bytes=200", says="hold different parameters", module=None)
def the_last_bucket_is_not_gathered(patch: Patch) -> None:
    def shorter(right: Any, self: OneEach) -> Any:
        flats = self._flats
        self._flats = flats[:-1]
        try:
            yield from right(self)
        finally:
            self._flats = flats

    wrap(patch, OneEach, "publish", shorter)


@bug("texts-adamw", "dp=2,zero=3,microbatches=2", causes="microbatches|missing_chunk", module=None)
def sums_of_slices_are_those_of_the_last_chunk(patch: Patch) -> None:
    def forgotten(right: Any, self: UnitGathering) -> None:
        for _, part, _, _ in self._summing:
            part.summed = None
        right(self)

    wrap(patch, UnitGathering, "_finish_sums", forgotten)


@bug("two-sgd", "dp=3,zero=3", causes="exchanged|border|unknown", module=None)
def a_slices_gradient_is_turned_around(patch: Patch) -> None:
    def turned(right: Any, self: UnitGathering) -> None:
        for _, part, output, _ in self._summing:
            if part.entries[0].parameter.numel() > 40:
                output_after[id(output)] = output
        right(self)
        for each in output_after.values():
            each.copy_(each.flip(0))
        output_after.clear()

    output_after: dict[int, Tensor] = {}
    wrap(patch, UnitGathering, "_finish_sums", turned)


@bug("convolutions-adamw", "dp=2,zero=3", causes="optimizer|replicas|stale", module=None)
def the_last_element_that_a_rank_keeps_is_never_updated(patch: Patch) -> None:
    def shorter(right: Any, self: UnitFlat) -> Any:
        for each in right(self):
            inner = each.stop - each.start > 1
            yield UnitSlice(each.entry, each.start, each.stop - (1 if inner and each.entry.name == "down.weight" else 0), each.at)  # fmt: skip

    wrap(patch, UnitFlat, "slices", shorter)
