"""The stages of a loss for batches of any size that it is indifferent to: made of a form, where it is known
to give what cutting gives.

Divided over tp, what a rank holds of a dim follows its remainder too: 33 tokens on two ranks are 17 and 16.
So sizes are of a *class*: the remainders by tp of all sizes in the loss, and those that are smaller than tp.
In each class the first size is divided and cut as ever, and compared with the form of the first three sizes;
if it is not that, the class gets a form of its own, from three sizes, which a fourth one has to agree with.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshloom.pipeline.stages.stages import Stage
from meshloom.program.run.runner import Shared
from meshloom.program.sizes.any_size import AnySize
from meshloom.program.sizes.forms import Form, UnlikeError, equal, fitted
from meshloom.program.sizes.symbolic import Sizes, value_of
from meshloom.program.store.newest import Newest

Stages = tuple[Stage, ...]
Class = tuple[tuple[int, int], ...]  # remainder by tp, and what is smaller than tp, of each size in the loss
POINTS = 3  # sizes that make a form
MOST_KEPT = 32  # sizes whose stages are kept after they were made; those of others are made again


class StageForms:
    """Of the loss of which `proved` tells, on one rank. tp: ranks that divide it."""

    def __init__(self, proved: AnySize, tp: int) -> None:
        self.proved = proved
        self._tp = tp
        # the first ones of a class; None: of all
        self._samples: dict[Class | None, list[tuple[Sizes, Stages]]] = {}
        self._guesses: dict[Class | None, _Maker | None] = {}
        self._agreeing: dict[Class, _Maker] = {}
        self._trusted: dict[Class, _Maker] = {}
        self._made: dict[Any, Stages] = Newest(MOST_KEPT)

    @property
    def is_new(self) -> bool:
        """Whether it has nothing to go by yet."""
        return not self._samples

    def trusts(self, sizes: Sizes) -> bool:
        """Whether stages for batches of such sizes are made, not cut: the same on all ranks."""
        return self._class(sizes) in self._trusted

    def stages(self, sizes: Sizes) -> Stages | None:
        """The stages for a batch of these sizes, which are trusted; None: the form does not say, on this
        rank."""
        key = tuple(sizes.items())
        made = self._made.get(key) or self._trusted[self._class(sizes)].at(sizes)
        if made is not None and key not in self._made:
            self._made[key] = made
        return made

    def learn(self, sizes: Sizes, stages: Stages) -> bool:
        """Learn from stages that were cut; whether a form gives just these. If one does on all ranks, they
        `trust` it."""
        which = self._class(sizes)
        guesses = (self._guesses.get(each) for each in (None, which))
        agreeing = next((each for each in guesses if each and equal(each.at(sizes), stages)), None)
        if agreeing:
            self._agreeing[which] = agreeing
            return True
        for key in {None, which}:
            samples = self._samples.setdefault(key, [])
            if len(samples) < POINTS and all(dict(each) != dict(sizes) for each, _ in samples):
                samples.append((sizes, stages))
                if len(samples) == POINTS:
                    self._guesses[key] = self._fitted(samples)
        return False

    def trust(self, sizes: Sizes) -> None:
        """From now on stages of this class are made."""
        self._trusted[self._class(sizes)] = self._agreeing[self._class(sizes)]

    def _class(self, sizes: Sizes) -> Class:
        if self._tp == 1:
            return ()
        values = [*sizes.values(), *(value_of(each, sizes) for each in self.proved.trace.expressions)]
        return tuple((each % self._tp, min(each, self._tp)) for each in values)

    def _fitted(self, samples: list[tuple[Sizes, Stages]]) -> _Maker | None:
        try:
            return _Maker(fitted(samples, self.proved.trace, num_parts=self._tp))
        except UnlikeError:
            return None


class _Maker:
    """Makes stages of a form. Those of all sizes are compiled together."""

    def __init__(self, form: Form[Stages]) -> None:
        self._form = form
        self._shared: dict[int, Shared] = {}

    def at(self, sizes: Sizes) -> Stages | None:
        """None: the form does not say."""
        if not self._form.covers(sizes):
            return None
        try:
            made = self._form.at(sizes)
        except UnlikeError:
            return None
        return tuple(
            replace(stage, program=replace(stage.program, shared=self._shared.setdefault(stage.number, {})))
            for stage in made
        )
