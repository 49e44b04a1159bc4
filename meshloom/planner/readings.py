"""A job's loss captured by shapes alone, or with values where modules are leaves, once for every requested number of samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from meshloom.core.cache import Cache
from meshloom.core.errors import CaptureError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.random import preserved_draws
from meshloom.data.samples import first_batches
from meshloom.machine.host_memory import free_bytes
from meshloom.optimizer.updater import check_stages
from meshloom.optimizer.user_optimizer import UserOptimizers, for_optimizers, make_without_values
from meshloom.parameters.model import trainable
from meshloom.parameters.unfilled_model import UnfilledModel, build_unfilled
from meshloom.planner.memory.comparison import compared_program, comparison_bytes
from meshloom.program.capture.attempted import attempted
from meshloom.program.capture.shapes import NEEDS_VALUES, Built, capture_shapes
from meshloom.program.cost.cost import Cost, costs
from meshloom.program.ir.leaves import Leaves
from meshloom.program.ir.program import Program
from meshloom.program.ir.sparse_constants import empty_like
from meshloom.program.store.capture_key import function_key
from meshloom.program.store.captured_loss import CapturedLoss, choices_of
from meshloom.program.store.object_text import NoTextError
from meshloom.program.store.program_cache import ProgramCache
from meshloom.program.store.stored_costs import cached_costs
from meshloom.replica.step_checks import check_readable
from meshloom.telemetry.timings import Timings


@dataclass(frozen=True, kw_only=True)
class Reading:
    """kinds: path of a module -> name of its class. stored: results of earlier runs."""

    program: Program
    kinds: Mapping[str, str]
    timings: Timings = field(default_factory=Timings, compare=False)
    stored: ProgramCache | None = field(default=None, compare=False)

    @cached_property
    def costs(self) -> Mapping[str, Cost]:
        """The costs of its nodes."""
        with self.timings.of("prices"):
            return cached_costs(self.stored, self.program, costs)


class Readings:
    """The captures of one job. timings: of all work on them. stored: in `cache`, the captures and choices of
    earlier runs."""

    def __init__(self, job: Job, cache: Cache | None = None, timings: Timings | None = None) -> None:
        self.job = job
        self.timings = timings or Timings()
        self.stored = ProgramCache(cache, self.timings) if cache is not None else None
        self._read: dict[int, Reading] = {}
        self._comparisons: dict[int, int] = {}
        self._built: Built | None = None  # a model that nothing has read
        self._kinds: Mapping[str, str] = {}
        self._num_bytes = 0  # of its parameters and buffers

    def of(self, samples: int) -> Reading:
        """The reading for the first batch of so many samples. Raises `CaptureError` if the loss cannot be
        captured, and errors of reading the data."""
        if samples not in self._read:
            with self.timings.of("reading"):
                self._read[samples] = self._reading(samples)
        return self._read[samples]

    def comparison_bytes(self, samples: int) -> int:
        """Most bytes that comparing the program with eager takes, on the rank that does. Raises `CaptureError` where hooks do what
        no program does."""
        if samples not in self._comparisons:
            check_readable(self._unfilled)
            program = self.of(samples).program

            def make() -> int:
                (batch,) = first_batches(self.job, 1, samples)
                compared = compared_program(
                    program, self.job, batch, lambda small: capture_shapes(self.job, small)
                )
                return comparison_bytes(compared)

            with self.timings.of("memory of a comparison"):
                found = self.stored.value("comparison", program, {}, int, make) if self.stored else make()
            self._comparisons[samples] = found + self._stand_in_bytes
        return self._comparisons[samples]

    def _reading(self, samples: int) -> Reading:
        (batch,) = first_batches(self.job, 1, samples)
        try:
            program = capture_shapes(self.job, batch, kept=self._kept, built=self._model)
        except CaptureError:
            if self._num_bytes > free_bytes():
                raise
            found, refused = attempted(lambda: self._with_values(samples))
            if found is None:
                assert refused is not None
                raise refused from None
            program = found
        return Reading(program=program, kinds=self._kinds, timings=self.timings, stored=self.stored)

    def _with_values(self, samples: int) -> Program:
        """The program captured with values, where modules that need them are leaves."""
        captured = CapturedLoss(self.job, timings=self.timings, stored=self.stored)
        program = captured.capture_any(choices_of(first_batches(self.job, 2, samples)))
        constants = {name: empty_like(each, "meta") for name, each in program.constants.items()}
        return replace(program, constants=constants, by_shapes=True)

    def runs(self, plan: Plan) -> tuple[Plan, list[str]]:
        """The plan that ranks run, which is without zero for optimizers that it divides nothing of; why that is, in sentences.

        Raises `JobError` where stages cannot do what optimizers do.
        """
        if plan.pp == plan.tp == 1 and not plan.zero:
            return plan, []
        if self._optimizers is None:
            return plan, []
        check_stages(self._optimizers, plan.pp)
        return for_optimizers(plan, self._optimizers)

    @property
    def gathered(self) -> int:
        """Bytes of the parameters that optimizers get on every rank, as they look at all of them."""
        return self._optimizers.gathered_bytes if self._optimizers else 0

    @cached_property
    def optimizer_key(self) -> Mapping[str, str] | None:
        """Texts of all that the optimizer's function depends on; None if there is no cache, or no such text."""
        try:
            return function_key(self.job.optimizer, "optimizer") if self.stored else None
        except NoTextError:
            return None

    @cached_property
    def _optimizers(self) -> UserOptimizers | None:
        """None where they cannot be made without values; the run meets it again."""
        with preserved_draws():
            return attempted(lambda: make_without_values(self.job, trainable(self._unfilled)))[0]

    @cached_property
    def _described(self) -> tuple[nn.Module, UnfilledModel | None]:
        """The model without values, with its hooks, where it can be built so; else with values, and None."""
        with preserved_draws():
            return build_unfilled(self.job, torch.device("cpu"), None)[:2]

    @property
    def _unfilled(self) -> nn.Module:
        return self._described[0]

    @property
    def _stand_in_bytes(self) -> int:
        """Of the parameters that a program is compared with."""
        model, unfilled = self._described
        return unfilled.stand_in_bytes if unfilled else sum(each.nbytes for each in model.parameters())

    def _model(self, build: Callable[[], Built]) -> Built:
        """Built once for all sizes, except after a capture, which may leave traces in it."""
        if self._built is None:
            self._built = build()
            self._kinds = {
                path: type(module).__name__
                for path, module in self._built[0].named_modules(remove_duplicate=False)
            }
            model = self._built[0]
            self._num_bytes = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
        return self._built

    def _kept(self, model: nn.Module, leaves: Leaves, read: Callable[[], Program]) -> Program:
        if self.job.leaves:
            raise CaptureError(NEEDS_VALUES)

        def read_it() -> Program:
            self._built = None
            return read()

        return self.stored.by_shapes(self.job, model, leaves, read_it) if self.stored else read_it()
