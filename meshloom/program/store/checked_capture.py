"""Captures a loss and compares the program with eager, or reuses the program that an earlier run cached."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from meshloom.core.buffer_rules import rule_of
from meshloom.core.errors import JobError
from meshloom.core.job import Job
from meshloom.machine.cores import cores
from meshloom.parameters.unfilled_model import comparable
from meshloom.program.capture.attempted import attempted
from meshloom.program.capture.capture import capture_module
from meshloom.program.capture.check import DiffersError, check_against_module
from meshloom.program.capture.guards import Guards
from meshloom.program.capture.leaf_rule import LeafModules, capture_with_leaves, leaves_of_job
from meshloom.program.ir.batch_values import takes_numbers, with_other_numbers
from meshloom.program.ir.leaves import leaves_of
from meshloom.program.ir.lines import WAY_OUT
from meshloom.program.ir.nodes import with_parents
from meshloom.program.ir.parameter_writes import ParameterWrites, untrained_write
from meshloom.program.ir.program import Program
from meshloom.program.opaque.operator import trained_writes
from meshloom.program.sizes.any_size import Smaller, captured_by_shapes, is_large, smaller
from meshloom.program.store.program_cache import ProgramCache, ProgramCacheKey
from meshloom.program.trace.precision import build_model, default_precision
from meshloom.program.trace.repeated_export import one_thread
from meshloom.telemetry.timings import Timings


class CheckedCapture:
    """Captures programs of `job`'s loss that compute what eager computes.

    dtype: to which model and batches are converted; None: the job's own. stored: the cache of earlier runs.
    """

    def __init__(
        self, job: Job, *, dtype: torch.dtype | None, timings: Timings, stored: ProgramCache | None
    ) -> None:
        self._job, self._dtype, self._timings, self._stored = job, dtype, timings, stored
        self._compared_as: dict[str, Smaller] = {}  # digest of a program -> the smaller one that was compared
        # Models are built as the first one was: some compute constants, such as drop rates of layers, in the
        # default precision.
        self._default = torch.get_default_dtype()

    def program(
        self, batches: Sequence[Any], known: Program | None, *, training: bool, model: nn.Module | None
    ) -> Program:
        """The program captured from the first of `batches` and compared with eager on the last two.

        known: a program of this mode that was compared. If the new one differs from it in sizes only, and no
            `model` is given, it is captured from shapes alone.
        """
        with default_precision(self._default):
            resized = self.at_other_sizes(known, batches[0]) if known and model is None else None
            if resized is not None:
                return resized
            with nullcontext(model) if model is not None else self._model_for(training, batches[0]) as used:
                return self._program(batches, training, used, known)

    def at_other_sizes(self, known: Program, batch: Any) -> Program | None:
        """The program for a batch of other sizes, captured from shapes alone; None where it differs from
        `known` in more than sizes, or has leaves, whose code needs values."""
        if known.opaque:
            return None
        with default_precision(self._default):
            # `known` freezes nothing, and this one differs from it in sizes only
            return captured_by_shapes(
                known, self._job, batch, lambda model, fake: self._capture([fake], model, {})
            )

    def _program(
        self, batches: Sequence[Any], training: bool, model: nn.Module, known: Program | None
    ) -> Program:
        writes = ParameterWrites(model.named_parameters())
        try:
            program = self._found(batches, training, model, known)
        except DiffersError:  # it may be why
            _check_writes(writes.names(), [], model, self._job)
            raise
        written = [*writes.names(), *program.buffers.keys() & dict(model.named_parameters()).keys()]
        _check_writes(written, trained_writes(program), model, self._job)
        return program

    def _found(
        self, batches: Sequence[Any], training: bool, model: nn.Module, known: Program | None
    ) -> Program:
        read, fresh = (batches[0], batches[1]), batches[-2:]
        entry: ProgramCacheKey | None = None
        asked = leaves_of_job(self._job, model)
        if known is not None:
            # What had to run as written does so at every size, also where the comparison would not show why: a teacher
            # that begins as a copy of its student has the same values whether it follows or not.
            asked |= known.opaque
        if known is None and self._stored is not None:
            with self._timings.of("looking at what was kept"), one_thread():
                kind = f"{training} {self._dtype} {self._default} {sorted(asked)}"
                entry = self._stored.entry(self._job, model, leaves_of(read[0]), kind=kind)
                program = self._cached(entry, model, fresh, read[0], training) if entry else None
            if program is not None:
                return program
        program = capture_with_leaves(lambda leaves: self._checked(read, fresh, model, leaves), model, asked)
        if entry is not None and self._stored is not None:
            self._stored.keep(entry, program, self._compared_as.get(program.digest()))
        return program

    def _checked(
        self, read: Sequence[Any], fresh: Sequence[Any], model: nn.Module, leaves: LeafModules
    ) -> Program:
        """The program with these leaves, if it equals eager."""
        guards = Guards(self._job.loss, model, leaves)
        guards.check_code()
        program = self._capture(read, model, leaves, guards=guards)
        if takes_numbers(program.others):
            compare = partial(self._compare, program, fresh, read[0], model, guards, vary_numbers=True)
            _, refused = attempted(compare)
            if refused is None:
                return program
            # Given a tensor in place of the number, the loss computes something else, or fails.
            program = self._capture(read, model, program.opaque, numbers=False, guards=guards)
        self._compare(program, fresh, read[0], model, guards, vary_numbers=False)
        return program

    def _cached(
        self, entry: ProgramCacheKey, model: nn.Module, fresh: Sequence[Any], first: Any, training: bool
    ) -> Program | None:
        """The cached program of an earlier run, if it still equals eager, at the smaller sizes at which it was
        compared then, if it was."""
        assert self._stored is not None

        def check(program: Program, small: Smaller | None) -> None:
            batches = _moved(program, fresh, first, vary_numbers=takes_numbers(program.others))
            at = [small.batch(each) for each in batches] if small else batches
            guards = Guards(self._job.loss, model, program.opaque)
            guards.check_code()
            with (
                _all_cores() if not small and is_large(program) else nullcontext(),
                guards.following() as loss,
            ):
                check_against_module(small.program if small else program, model, loss, at)

        return self._stored.take(entry, model, leaves_of(fresh[-1]), training=training, check=check)

    def _model_for(self, training: bool, batch: Any) -> AbstractContextManager[nn.Module]:
        """A context with a model to capture from and to compare with, beside `batch`."""
        return comparable(
            partial(build_model, self._job, self._dtype, training=training),
            leaves_of(batch).device or torch.device("cpu"),
        )

    def _capture(
        self,
        batches: Sequence[Any],
        model: nn.Module,
        leaves: LeafModules,
        *,
        numbers: bool = True,
        guards: Guards | None = None,
    ) -> Program:
        """guards: which look at what the capture's runs of the loss change."""
        with (
            self._timings.of("reading"),
            guards.following() if guards else nullcontext(self._job.loss) as loss,
        ):
            program = capture_module(model, loss, batches, dtype=self._dtype, numbers=numbers, opaque=leaves)
            gc.collect()  # torch.export leaves the model in cycles
            return program

    def _compare(
        self,
        program: Program,
        batches: Sequence[Any],
        first: Any,
        model: nn.Module,
        guards: Guards,
        *,
        vary_numbers: bool,
    ) -> None:
        """Compare with eager on batches with the values that the program is for; if it takes numbers as
        inputs, one batch gets other numbers."""
        batches = _moved(program, batches, first, vary_numbers=vary_numbers)
        with self._timings.of("comparing with eager"), one_thread():
            if not self._compare_smaller(program, batches, model, guards):
                with (
                    _all_cores() if is_large(program) else nullcontext(),
                    guards.following() as loss,
                ):
                    check_against_module(program, model, loss, batches)

    def _compare_smaller(
        self, program: Program, batches: Sequence[Any], model: nn.Module, guards: Guards
    ) -> bool:
        """Whether a comparison at smaller sizes shows that the program equals eager. A failure there may
        be due to the sizes, so it decides nothing."""

        def read(batch: Any) -> Program:
            numbers = takes_numbers(program.others)
            return capture_module(
                model, self._job.loss, [batch], dtype=self._dtype, numbers=numbers, opaque=program.opaque
            )

        found = smaller(program, self._job, batches[0], read)
        if found is None:
            return False
        small = [found.batch(each) for each in batches]
        with guards.following() as loss:
            difference, _ = attempted(lambda: check_against_module(found.program, model, loss, small))
        if difference is None or not difference.telling:
            return False
        self._compared_as[program.digest()] = found
        return True


def _moved(program: Program, batches: Sequence[Any], first: Any, *, vary_numbers: bool) -> Sequence[Any]:
    """The batches with the values of `first`, other numbers in all but one if they vary."""
    values = leaves_of(first).values
    if not values:
        return batches
    return [
        with_other_numbers(leaves_of(each), program.others, values, moved=vary_numbers and number > 0)
        for number, each in enumerate(batches)
    ]


def _check_writes(written: Collection[str], by_leaves: Collection[str], model: nn.Module, job: Job) -> None:
    """Raise `JobError` for parameters that forwards write: untrained ones for which the job has no rule, and trained ones outside of
    leaves."""
    named = [(name, each.requires_grad) for name, each in model.named_parameters() if name in written]
    untrained = [name for name, trains in named if not trains and rule_of(name, job.buffers) is None]
    if untrained:
        raise untrained_write(untrained)
    for name in (name for name, trains in named if trains and name not in by_leaves):
        around = (model.get_submodule(path) for path in with_parents(name.rpartition(".")[0]))
        kind = next(
            (type(each).__name__ for each in around if not type(each).__module__.startswith("torch.")), "..."
        )
        raise JobError(
            f"{name} is trained, and a forward writes it, which is no part of a program. Write leaves=[{kind}] to run the module that writes it as "
            f"written, or compute the changed value anew in the forward, as torch.nn.utils.parametrize does. {WAY_OUT}"
        )


@contextmanager
def _all_cores() -> Iterator[None]:
    """Use as many threads as there are cores: the other ranks of this host are waiting meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(before, cores()))
    try:
        yield
    finally:
        torch.set_num_threads(before)
