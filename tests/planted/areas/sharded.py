"""Bugs of sharded gradients, parameters and optimizer state: zero=1, 2 and 3."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshloom.exchange.buckets.scattered import ScatteredBuckets
from meshloom.exchange.copies import OneEach
from meshloom.exchange.slices import OwnedSlices
from meshloom.exchange.units.unit_slices import UnitEntry, UnitFlat
from meshloom.exchange.zero import ZeroOne
from meshloom.exchange.zero_two import ZeroTwo
from meshloom.optimizer.full_from_slices import FullFromSlices
from tests.planted.bugs import Gradients, Patch, after_finish, around_update, bug, groups_of, wrap

ONE, ALL_OF_TWO, THREE = (
    "dp=2,microbatches=2,zero=1",
    "dp=2,microbatches=2,zero=2",
    "dp=2,microbatches=2,zero=3",
)


@bug(plan=ONE, causes="border|unknown|exchanged", module=None)
def slices_begin_one_element_late(patch: Patch) -> None:
    wrap(
        patch, OwnedSlices, "gradients", lambda right, self, shares, used: _rolled(right(self, shares, used))
    )


def _rolled(found: list[Tensor | None]) -> list[Tensor | None]:
    return [
        None if each is None else torch.cat([each[1:], each[:1]]) if each.numel() > 1 else each
        for each in found
    ]


@bug(plan=ONE, says="Replicas 0 and 1 hold different parameters", module=None)
def what_others_updated_is_not_gathered(patch: Patch) -> None:
    def nothing(right: Any, self: OneEach) -> Any:
        return
        yield

    wrap(patch, OneEach, "publish", nothing)


@bug(plan=ONE, says="Replicas 0 and 1 hold different parameters", module=None)
def gathered_slices_are_in_the_wrong_order(patch: Patch) -> None:
    def exchanged(right: Any, self: OneEach) -> Any:
        yield from right(self)
        for flat in self._flats:
            if self._group.rank == 1:
                half = flat.numel() // 2
                flat[:half], flat[half:] = flat[half:].clone(), flat[:half].clone()

    wrap(patch, OneEach, "publish", exchanged)


@bug(plan=ONE, causes="optimizer", module=None)
def the_second_owner_has_twice_the_learning_rate(patch: Patch) -> None:
    ranks: list[Any] = []

    def faster(updater: Any, step: int) -> None:
        if updater not in ranks:
            ranks.append(updater)
        if step == 0 and ranks.index(updater) % 2:
            for group in groups_of(updater):
                group["lr"] *= 2

    around_update(patch, faster)


@bug(plan=ONE, causes="scale|missing_chunk|not_reduced|unknown", module=None)
def the_second_owners_sums_are_its_own(patch: Patch) -> None:
    def own(right: Any, self: ZeroOne) -> Any:
        found = right(self)
        if self._group.rank == 1:
            for each in found:
                each.div_(2)
        return found

    wrap(patch, ZeroOne, "_add_up", own)


@bug(plan=ALL_OF_TWO, causes="microbatches|missing_chunk", module=None)
def only_the_last_chunks_round_counts(patch: Patch) -> None:
    from meshloom.exchange.buckets.rounds import RoundsUnderWay

    def fresh(right: Any, self: RoundsUnderWay, bucket: Any) -> Any:
        if bucket.sent:
            self.end()
            bucket.sum.zero_()
        return right(self, bucket)

    wrap(patch, RoundsUnderWay, "start", fresh)


@bug(plan=ALL_OF_TWO, causes="scale|unknown", module=None)
def sums_are_not_divided_by_the_weight(patch: Patch) -> None:
    wrap(patch, ZeroTwo, "_add_up", lambda right, self: [each.mul_(2) for each in right(self)])


@bug(plan=ALL_OF_TWO, causes="stale", module=None)
def sums_begin_with_those_of_the_step_before(patch: Patch) -> None:
    kept: dict[int, list[Tensor]] = {}

    def gathering(right: Any, self: ScatteredBuckets) -> Any:
        found = right(self)
        for each, old in zip(found, kept.get(id(self), []), strict=False):
            each.add_(old)
        kept[id(self)] = [each.clone() for each in found]
        return found

    wrap(patch, ScatteredBuckets, "collect", gathering)


@bug(plan=THREE, causes="stale", module="head")
def a_unit_is_gathered_as_it_was_a_step_before(patch: Patch) -> None:
    seen: dict[int, list[Tensor]] = {}

    def old(right: Any, self: UnitEntry, flat: Tensor) -> None:
        if self.name == "head.weight":
            values = flat[self.start : self.stop].clone()
            known = seen.setdefault(id(self), [values])
            if not torch.equal(known[-1], values):
                known.append(values)
            flat[self.start : self.stop] = known[max(0, len(known) - 2)]
        right(self, flat)

    wrap(patch, UnitEntry, "fill", old)


@bug(plan=THREE, causes="border", module="first")
def a_unit_keeps_part_of_anothers_gradient(patch: Patch) -> None:
    def changed(exchange: Any, found: Gradients, step: int) -> None:
        each = found.get("first.weight")
        if each is not None and each.numel() > 8:
            each[-4:] = each[:4].clone()

    after_finish(patch, changed)


@bug(plan=THREE, causes="border|unknown", module=None)
def what_a_rank_keeps_begins_one_element_early(patch: Patch) -> None:
    wrap(
        patch, UnitFlat, "take_gradient",
        lambda right, self: torch.roll(right(self), 1) if any(entry.name == "head.weight" for entry in self.entries) else right(self),
    )  # fmt: skip


@bug("mlp-muon", ONE, causes="optimizer", module=None)
def a_matrix_is_put_together_from_slices_in_the_wrong_order(patch: Patch) -> None:
    def shifted(right: Any, self: FullFromSlices, gradients: Any) -> Any:
        yield from right(self, gradients)
        for parameter in self._parameters:
            if parameter.grad is not None and parameter.grad.ndim == 2:
                parameter.grad.copy_(torch.roll(parameter.grad, 1, 0))

    wrap(patch, FullFromSlices, "fetch", shifted)


@bug("mlp-muon", ONE, causes="optimizer|replicas", module=None)
def updated_matrices_are_not_sent_back(patch: Patch) -> None:
    def nothing(right: Any, self: FullFromSlices) -> Any:
        self._emptied.clear()
        return
        yield

    wrap(patch, FullFromSlices, "give_back", nothing)
