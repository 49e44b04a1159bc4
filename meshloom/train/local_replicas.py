"""The replicas of this process: one in a launched rank, all in a simulated plan."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from meshloom.checkpoint.resuming import check_together
from meshloom.comm.liveness.activity import Phase
from meshloom.core.errors import MeshloomError, PeerLostError
from meshloom.core.job import Job
from meshloom.core.moments.held_warnings import held_warnings, show_warnings
from meshloom.core.plan import Plan
from meshloom.launch.environment import opened_cache
from meshloom.launch.one_at_a_time import working_alone
from meshloom.launch.world import World
from meshloom.program.store.program_cache import ProgramCache
from meshloom.program.trace.precision import default_precision
from meshloom.replica.replica import Replica
from meshloom.replica.step_checks import check_copies
from meshloom.telemetry.timings import Timings
from meshloom.train.memory_check import prepare_if_it_fits

T = TypeVar("T")


class LocalReplicas:
    """`all`: in the order of the world's local ranks. `warnings`: about programs kept from earlier starts.

    dtype, share, cache, timings: as for `Trainer`. files: directory for files beside the run.
    resumed: whether a checkpoint gives their state.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        world: World,
        *,
        dtype: torch.dtype | None,
        share: bool,
        cache: str,
        timings: Timings,
        files: Path | None = None,
        resumed: bool = False,
    ) -> None:
        self._job, self._plan, self._world = job, plan, world
        # the context of forwards: in another precision than the job's own random draws and new tensors without a dtype take that
        # precision, as in programs
        self.computing: Callable[[], AbstractContextManager[None]] = (
            partial(_in_precision, dtype) if dtype else nullcontext
        )
        self.all: list[Replica] = []
        self.warnings: list[str] = []
        with ExitStack() as building:
            for context in world.local:
                stored = _stored(cache, timings) if context.rank == 0 else None
                self.warnings = stored.warnings if stored else self.warnings
                of_first = timings if context is world.local[0] else None
                replica = Replica(
                    job,
                    plan,
                    context,
                    dtype=dtype,
                    share=share,
                    timings=of_first,
                    stored=stored,
                    files=files,
                    resumed=resumed,
                )
                building.callback(replica.close)
                self.all.append(replica)
            self._stack = building.pop_all()

    @property
    def first(self) -> Replica:
        """The replica that speaks for this process."""
        return self.all[0]

    def close(self) -> None:
        """Remove the hooks from the models."""
        self._stack.close()

    def check_first_step(self, *, saved: bool) -> None:
        """What the first step shows. saved: also of its state, which is to be saved, rather than at the first checkpoint.
        Raises `TrainingError`."""

        def check(replica: Replica) -> None:
            check_copies(self._job, replica.model)
            replica.updater.state.check_saved() if saved else None

        self.together(lambda replica: check_together(replica.context.world, partial(check, replica)))

    def enter(self, phase: Phase, step: int) -> None:
        """Record what all of them are doing, for diagnoses of ranks that do not answer."""
        for context in self._world.local:
            context.activity.enter(phase, step)

    def prepare(self, *, overcommit: bool, cache: str) -> None:
        """Prepare all of them. Arguments: of `prepare_if_it_fits`. Warnings of trials of the user's code are held."""
        with held_warnings() as self._held:
            self.together(lambda replica: prepare_if_it_fits(replica, overcommit=overcommit, cache=cache))

    def show_warnings(self) -> None:
        """Show those, once the run has said what it is, where no step gives them: it runs programs."""
        if self._world.main and self.first.engine.stages.cut:
            show_warnings(self._held)

    def together(self, function: Callable[[Replica], T]) -> list[T]:
        """What it returns for each local replica, simulated ones in turns; errors say which rank, and what it was doing."""
        try:
            with working_alone():
                if len(self.all) == 1:
                    return [function(self.all[0])]
                return self._world.turns.run([partial(_named, function, replica) for replica in self.all])
        except PeerLostError as error:
            raise PeerLostError(f"{error} It was {self._world.local[0].activity.now()}.") from error


@contextmanager
def _in_precision(dtype: torch.dtype) -> Generator[None]:
    with working_alone(), default_precision(dtype):
        yield


def _stored(cache: str, timings: Timings) -> ProgramCache | None:
    """For the rank that reads."""
    opened = opened_cache(cache)
    return ProgramCache(opened, timings) if opened is not None else None


def _named(function: Callable[[Replica], T], replica: Replica) -> T:
    """Names the simulated rank in an error of the user's code."""
    try:
        return function(replica)
    except MeshloomError:
        raise
    except Exception as error:
        error.add_note(f"on simulated rank {replica.context.rank} ({replica.context.place})")
        raise
