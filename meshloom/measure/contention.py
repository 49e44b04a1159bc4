"""How much a job's own chunks slow each other down when several ranks compute them at the same time, measured
on this machine's CPU.

    this process     steps alone   |   steps together   |   steps alone   |   ...        seconds of its processor
    companion        idle          |   steps            |   idle          |

Companions are processes that compute the same job while they are told to. They end with this process, in
whatever way it ends.
"""

from __future__ import annotations

import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from io import FileIO
from types import TracebackType
from typing import Self

import torch

from meshloom.core.cache import Cache
from meshloom.core.errors import MeshloomError
from meshloom.core.job import Job
from meshloom.core.moments.by_metric import without_evaluation
from meshloom.core.plan import Plan
from meshloom.core.random import preserved_draws
from meshloom.launch.allocator import keep_freed_memory
from meshloom.launch.processes.child import start_child
from meshloom.machine.cores import cores
from meshloom.planner.advise import Advice, advise
from meshloom.planner.measure.contention_factors import powers_and_most
from meshloom.planner.pricing import Devices
from meshloom.telemetry.progress import QUIET
from meshloom.telemetry.timings import Timings
from meshloom.train.trainer import Trainer

ROUNDS = 5  # alone and together in turns, as machines are faster and slower from minute to minute
SECONDS = 0.12  # of each turn, or one step
START_SECONDS = 120.0  # until a companion has started and prepared
TURN_SECONDS = 120.0  # until it stands still


class Companions(AbstractContextManager["Companions"]):
    """Processes that have loaded the job, as many as are needed beside this one. They are started
    immediately, and waited for when they are needed.

    target: the job's FILE.py:NAME. words: its sys.argv after its name. num_ranks: the most of any plan.
    threads_of: of each of so many ranks.
    """

    def __init__(
        self, target: str, num_ranks: int, threads_of: Callable[[int], int], words: Sequence[str] = ()
    ) -> None:
        self._threads_of = threads_of
        self._numbers = numbers_beside(num_ranks, threads_of, cores())
        self._all = [_Companion(target, words) for _ in range(max(self._numbers, default=1) - 1)]
        self.failure = ""  # of the last measuring, in a sentence

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        """The companions."""
        return [each.process for each in self._all]

    def factors(self, job: Job) -> dict[int, float]:
        """Number of ranks that compute at the same time, up to the number of cores -> how many times longer
        each takes than alone.

        Empty if the batch is too small to be split, and if a companion fails or the job is refused; `failure`
        then says why.
        """
        self.failure = ""
        threads = torch.get_num_threads()
        found: dict[int, float] = {}
        try:
            for number in self._numbers:
                if number <= job.batch_size:
                    torch.set_num_threads(self._threads_of(number))
                    found[number] = self._factor(job, number)
        except (MeshloomError, OSError) as error:
            self.failure = f"How much ranks slow each other down could not be measured with this job, and is that of the machine: {error}"
            return {}
        finally:
            torch.set_num_threads(threads)
        return found

    def _factor(self, job: Job, number: int) -> float:
        beside = self._all[: number - 1]
        for each in beside:
            each.tell(f"prepare {number} {torch.get_num_threads()}")
        alone: list[float] = []
        together: list[float] = []
        with preserved_draws(), _steps(job, number) as step:
            for each in beside:
                each.hear("ready", START_SECONDS)
            for _ in range(ROUNDS):
                alone += _turn(step)
                for each in beside:
                    each.tell("go")
                together += _turn(step)
                for each in beside:
                    each.tell("stop")
                for each in beside:
                    each.hear("stopped", TURN_SECONDS)
        return max(1.0, statistics.median(together) / statistics.median(alone))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for each in self._all:
            each.end()


def advise_beside(
    job: Job, target: str, devices: Devices, *, words: Sequence[str] = (), plans: Sequence[Plan] | None = None,
    tell: Callable[[str], None] = lambda text: None, cache: Cache | None = None, timings: Timings | None = None,
) -> Advice:  # fmt: skip
    """`advise` for plans that run on this machine, with companions. target, words: the job's FILE.py:NAME,
    its sys.argv after its name."""
    keep_freed_memory()  # plans are rehearsed in this process as they run in others
    num_ranks = max((plan.mesh.size for plan in plans), default=1) if plans is not None else devices.num_ranks
    if devices.here is not None and devices.here.name != devices.machine.name:
        return advise(job, devices, plans=plans, tell=tell, cache=cache, timings=timings)
    with Companions(target, num_ranks, devices.threads_of, words) as companions:

        def beside() -> dict[int, float]:
            tell("measuring how ranks slow each other down")
            return companions.factors(job)

        return replace(
            advise(job, devices, plans=plans, tell=tell, beside=beside, cache=cache, timings=timings),
            not_beside=companions.failure,
        )


def numbers_beside(num_ranks: int, threads_of: Callable[[int], int], num_cores: int) -> list[int]:
    """The numbers of ranks that are measured together: powers of two and the largest, of those that have
    cores of their own.

    >>> numbers_beside(4, lambda ranks: 1, 2), numbers_beside(6, lambda ranks: 1, 8), numbers_beside(4, lambda ranks: 4 // ranks, 4)
    ([2], [2, 4, 6], [2, 4])
    """
    most = max(
        (number for number in range(2, num_ranks + 1) if number * threads_of(number) <= num_cores), default=1
    )
    return powers_and_most(most)[1:]


def be_companion(job: Job, descriptors: Sequence[int]) -> None:
    """The loop of a companion, until its orders end. descriptors: of two pipes, orders to read and answers to
    write."""
    # Without buffers, so that what `select` says of the pipe is all there is to say.
    orders = os.fdopen(descriptors[0], "rb", buffering=0)
    answers = os.fdopen(descriptors[1], "wb", buffering=0)
    try:
        _obey(job, orders, answers)
    except Exception as error:
        answers.write(f"{type(error).__name__}: {' '.join(str(error).split())}\n".encode())
        raise


def _obey(job: Job, orders: FileIO, answers: FileIO) -> None:
    order = orders.readline().split()
    while order:
        _, number, threads = order
        torch.set_num_threads(int(threads))
        with _steps(job, int(number)) as step:
            answers.write(b"ready\n")
            order = orders.readline().split()
            while order == [b"go"]:
                while not select.select([orders], [], [], 0.0)[0]:
                    step()
                orders.readline()
                answers.write(b"stopped\n")
                order = orders.readline().split()


class _Companion:
    """One companion, as this process sees it."""

    def __init__(self, target: str, words: Sequence[str]) -> None:
        their_orders, orders = os.pipe()
        answers, their_answers = os.pipe()
        descriptors = (their_orders, their_answers)
        request = ["plan", target, "--companion", ",".join(map(str, descriptors)), "--", *words]
        command = [sys.executable, "-m", "meshloom", *request]
        try:
            self.process = start_child(command, passed=descriptors, own_session=False)
        finally:
            os.close(their_orders)
            os.close(their_answers)
        self._orders = os.fdopen(orders, "wb", buffering=0)
        self._answers = os.fdopen(answers, "rb", buffering=0)

    def tell(self, order: str) -> None:
        """Sends an order. If the companion has ended, the next `hear` says so."""
        with suppress(BrokenPipeError):
            self._orders.write(f"{order}\n".encode())

    def hear(self, answer: str, seconds: float) -> None:
        """Waits for the answer. Raises `ConnectionError` with its last output if it has ended, and if it does
        not answer."""
        if not select.select([self._answers], [], [], seconds)[0]:
            raise ConnectionError(
                f"a process that computed it beside this one did not answer for {seconds:.0f} s."
            )
        heard = self._answers.readline().decode().strip()
        if heard != answer:
            raise ConnectionError(
                f"a process that computed it beside this one ended{f' with {heard}' if heard else ' without a word.'}"
            )

    def end(self) -> None:
        """Ends it, whatever it is doing."""
        self.process.kill()
        self.process.wait()
        for pipe in (self._orders, self._answers):
            pipe.close()


@contextmanager
def _steps(job: Job, number: int) -> Iterator[Callable[[], object]]:
    """A function that takes a step of one of `number` replicas' share of a batch, after the first two
    steps."""
    job = replace(without_evaluation(job), batch_size=job.batch_size // number, batch_sizes={})
    with Trainer(job, Plan(), devices="cpu", listener=QUIET) as trainer:
        batch = next(iter(trainer.batches()))
        for _ in range(2):
            trainer.step(replace(batch, step=trainer.next_step))
        yield lambda: trainer.step(replace(batch, step=trainer.next_step))


def _turn(step: Callable[[], object]) -> list[float]:
    """Seconds of this thread's processor, for each of some steps."""
    found: list[float] = []
    until = time.perf_counter() + SECONDS
    while not found or time.perf_counter() < until:
        before = time.thread_time()
        step()
        found.append(time.thread_time() - before)
    return found
