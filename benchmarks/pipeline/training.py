"""Seconds per step of the benchmark GPT in two processes: meshloom's plans and torch.distributed.pipelining,
schedule by schedule, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from gpt import loss, make_data, make_model, make_optimizer
from listening import listen
from pipelining import open_pipelining

import meshloom as ml
from meshloom.pipeline.schedules.builders import make_schedule
from meshloom.pipeline.schedules.schedule import Action
from meshloom.pipeline.schedules.timing import run_on_paper

RANKS, BATCH = 2, 16
Prepare = Callable[[], Callable[[], float]]  # reads the next batch, which is not timed; then one step


def time_systems(
    names: list[str], num_microbatches: int, num_rounds: int, num_steps: int
) -> list[dict[str, Any]]:
    """On each of the ranks. A round is a few steps of each system; the order is reversed from round to round,
    the first one warms up."""
    total = (num_rounds + 1) * num_steps
    with ExitStack() as stack:
        watches = {name: Watch() for name in names}
        prepare: dict[tuple[str, str], Prepare] = {}
        # meshloom goes first: it joins the ranks that torchrun started, and the peer uses what is there
        for name in names:
            prepare["meshloom", name] = open_meshloom(name, num_microbatches, total, watches[name], stack)
        for name in names:
            prepare["pipelining", name] = open_peer(name, num_microbatches, total)
        rounds: dict[tuple[str, str], list[float]] = {system: [] for system in prepare}
        for number in range(num_rounds + 1):
            losses: dict[tuple[str, str], float] = {}
            for system in list(prepare)[:: -1 if number % 2 else 1]:
                seconds, losses[system] = time_round(prepare[system], num_steps)
                if number:
                    rounds[system].append(seconds)
                elif system[0] == "meshloom":
                    watches[system[1]].clear()
            if number == 0:
                for system, value in losses.items():  # all start from the same parameters and samples
                    torch.testing.assert_close(
                        value,
                        losses["meshloom", names[0]],
                        rtol=1e-5,
                        atol=0.0,
                        msg=lambda text, of=system: f"{of}: {text}",
                    )
        records: list[dict[str, Any]] = []
        for (system, name), seconds in rounds.items():
            record: dict[str, Any] = {
                "system": system,
                "mode": "pp",
                "schedule": name,
                "ranks": RANKS,
                "batch": BATCH,
                "microbatches": num_microbatches,
            }
            record["seconds"] = {
                "median": statistics.median(seconds),
                "minimum": min(seconds),
                "maximum": max(seconds),
            }
            record["rounds"] = seconds
            if system == "meshloom":
                record |= watches[name].figures(name, num_microbatches)
            records.append(record)
    return records


def time_round(prepare: Prepare, num_steps: int) -> tuple[float, float]:
    """Seconds per step of the slower rank, and the first loss, of the rank where it is larger: that without
    the last stage may know none."""
    seconds, losses = 0.0, list[float]()
    for _ in range(num_steps):
        step = prepare()
        dist.barrier()
        started = time.perf_counter()
        losses.append(step())
        seconds += time.perf_counter() - started
    both = torch.tensor([seconds / num_steps, losses[0]])
    dist.all_reduce(both, dist.ReduceOp.MAX)
    return both[0].item(), both[1].item()


def open_meshloom(
    name: str, num_microbatches: int, num_steps: int, watch: Watch, stack: ExitStack
) -> Prepare:
    """The job as its documentation says, stepped by hand."""
    data = lambda: make_data(BATCH * num_steps)  # noqa: E731
    job = ml.Job(
        model=make_model,
        loss=loss,
        optimizer=make_optimizer,
        data=data,
        batch_size=BATCH,
        steps=num_steps,
        shuffle=False,
    )
    trainer = stack.enter_context(
        ml.Trainer(
            job, f"pp={RANKS},microbatches={num_microbatches},schedule={name}", devices="cpu", cache="off"
        )
    )
    listen(trainer.replicas[0], watch)
    batches = trainer.batches()
    stack.callback(batches.close)

    def prepare() -> Callable[[], float]:
        batch = next(batches)

        def step() -> float:
            value = trainer.step(batch)
            watch.stepped()
            return value

        return step

    return prepare


def open_peer(name: str, num_microbatches: int, num_steps: int) -> Prepare:
    """The same batches for the peer."""
    step = open_pipelining(name, num_microbatches, make_optimizer)
    batches = iter(make_data(BATCH * num_steps).tensors[0].split(BATCH))

    def prepare() -> Callable[[], float]:
        batch = next(batches)
        return lambda: step(batch)

    return prepare


class Watch:
    """When this rank's actions of meshloom ran."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget what was seen."""
        self._began = 0.0
        self._seen: dict[Action, list[float]] = {}  # seconds, step by step
        self._after: list[float] = []  # seconds from the last action to the end of the step

    def began(self, action: Action) -> None:
        """What it needs is there."""
        self._began = time.perf_counter()

    def ended(self, action: Action) -> None:
        """It has run."""
        self._ended = time.perf_counter()
        self._seen.setdefault(action, []).append(self._ended - self._began)

    def stepped(self) -> None:
        """The step is over."""
        self._after.append(time.perf_counter() - self._ended)

    def figures(self, name: str, num_microbatches: int) -> dict[str, Any]:
        """on_paper: the schedule's length for the medians of its actions' seconds, which are in `actions` by
        stage and kind.

        update: seconds after the last action, of the rank that has least to wait for then.
        """
        takes: dict[Action, float] = {}
        updates: list[float] = []
        everyone: list[Any] = [None] * RANKS
        dist.all_gather_object(everyone, (self._seen, self._after))
        for seen, after in everyone:
            takes |= {action: statistics.median(seconds) for action, seconds in seen.items()}
            updates.append(statistics.median(after))
        schedule = make_schedule(name, RANKS, num_microbatches)
        kinds = sorted({(action.stage, action.kind) for action in takes})
        of_kind = {
            f"{stage}{kind}": statistics.median(
                seconds for action, seconds in takes.items() if (action.stage, action.kind) == (stage, kind)
            )
            for stage, kind in kinds
        }
        return {
            "on_paper": run_on_paper(schedule, takes.__getitem__).length,
            "update": min(updates),
            "actions": of_kind,
        }
