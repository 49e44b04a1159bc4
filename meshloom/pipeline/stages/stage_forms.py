"""The stages of a loss for batches of any size, from a form that is fitted to sizes already cut.

If a dim is sharded over tp, a rank's part also depends on its remainder: 33 tokens on two ranks are 17 and
16. So sizes are grouped into *classes*: by the remainders by tp of all sizes in the loss, and by sizes
smaller than tp. In each class the first size is divided and cut as usual, and compared with the form of the
first three sizes. If they differ, the class gets its own form, from three sizes, which a fourth one has to
confirm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshloom.pipeline.stages.stages import Stage
from meshloom.program.run.runner import Shared
from meshloom.program.sizes.any_size import AnySize
from meshloom.program.sizes.forms import Form, UnlikeError, equal, fitted
from meshloom.program.sizes.symbolic import Sizes, value_of
from meshloom.program.store.fifo_cache import FifoCache

Stages = tuple[Stage, ...]
# remainder by tp, and the size itself up to tp, of each size in the loss
Class = tuple[tuple[int, int], ...]
POINTS = 3  # sizes that a form is fitted to
MOST_KEPT = 32  # sizes whose stages are cached; others are built again


class StageForms:
    """The forms of one loss on one rank. proved: its indifference to sizes. tp: ranks that divide it."""

    def __init__(self, proved: AnySize, tp: int) -> None:
        self.proved = proved
        self._tp = tp
        # the first sizes of a class; None: of all classes
        self._samples: dict[Class | None, list[tuple[Sizes, Stages]]] = {}
        self._guesses: dict[Class | None, _Maker | None] = {}
        self._agreeing: dict[Class, _Maker] = {}
        self._trusted: dict[Class, _Maker] = {}
        self._built: dict[Any, Stages] = FifoCache(MOST_KEPT)

    @property
    def is_new(self) -> bool:
        """Whether it has learned nothing yet."""
        return not self._samples

    def trusts(self, sizes: Sizes) -> bool:
        """Whether stages for these sizes are built from a form instead of cut: equal on all ranks."""
        return self._class(sizes) in self._trusted

    def stages(self, sizes: Sizes) -> Stages | None:
        """The stages for these trusted sizes; None: the form does not determine them on this rank."""
        key = tuple(sizes.items())
        stages = self._built.get(key) or self._trusted[self._class(sizes)].at(sizes)
        if stages is not None and key not in self._built:
            self._built[key] = stages
        return stages

    def learn(self, sizes: Sizes, stages: Stages) -> bool:
        """Learns stages that were cut; returns whether a form reproduces them, for all to `trust` it."""
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
        """From now on stages of this class are built from its form."""
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
    """Builds stages from a form. Stages of all sizes share compiled functions."""

    def __init__(self, form: Form[Stages]) -> None:
        self._form = form
        self._shared: dict[int, Shared] = {}

    def at(self, sizes: Sizes) -> Stages | None:
        """None: the form does not determine them."""
        if not self._form.covers(sizes):
            return None
        try:
            stages = self._form.at(sizes)
        except UnlikeError:
            return None
        return tuple(
            replace(stage, program=replace(stage.program, shared=self._shared.setdefault(stage.number, {})))
            for stage in stages
        )
