"""A job's loss read by shapes alone, once for every number of samples that is asked about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import nn

from meshloom.cache import Cache
from meshloom.graph.cost import Cost, costs
from meshloom.graph.program import Program
from meshloom.graph.shapes import capture_shapes
from meshloom.graph.stored import Stored
from meshloom.job import Job
from meshloom.state.samples import first_batches
from meshloom.timings import Timings


@dataclass(frozen=True, kw_only=True)
class Reading:
    """kinds: path of a module -> name of its class."""

    program: Program
    kinds: Mapping[str, str]
    timings: Timings = field(default_factory=Timings, compare=False)

    @cached_property
    def costs(self) -> Mapping[str, Cost]:
        """Of its nodes."""
        with self.timings.of("prices"):
            return costs(self.program)


class Readings:
    """Of one job. timings: of all that is done with them, by those who do it. stored: in `cache`, what earlier runs have read and chosen."""

    def __init__(self, job: Job, cache: Cache | None = None) -> None:
        self.job = job
        self.timings = Timings()
        self.stored = Stored(cache, self.timings) if cache is not None else None
        self._read: dict[int, Reading] = {}

    def of(self, samples: int) -> Reading:
        """For its first batch of so many samples. Raises `CaptureError` if the loss cannot be read, and what reading the data raises."""
        if samples not in self._read:
            with self.timings.of("reading"):
                self._read[samples] = self._reading(samples)
        return self._read[samples]

    def _reading(self, samples: int) -> Reading:
        (batch,) = first_batches(self.job, 1, samples)
        kinds: dict[str, str] = {}

        def model() -> nn.Module:
            built = self.job.model()
            if isinstance(built, nn.Module):
                kinds.update({path: type(module).__name__ for path, module in built.named_modules(remove_duplicate=False)})
            return built

        stored, loss = self.stored, self.job.loss
        kept = (lambda model, leaves, read: stored.by_shapes(model, loss, leaves, read)) if stored else None
        program = capture_shapes(replace(self.job, model=model), batch, kept=kept)
        return Reading(program=program, kinds=kinds, timings=self.timings)
