"""What the executor itself takes for one action: stages that compute nothing, a group that sends nothing, one
thread."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from meshloom.comm.group import Group, Work
from meshloom.core.schedules import SCHEDULES
from meshloom.pipeline.runtime.program_stage import ProgramStage
from meshloom.pipeline.runtime.run import PipelineRun
from meshloom.pipeline.schedules.builders import make_schedule
from meshloom.pipeline.stages.stages import Crossing, Stage
from meshloom.program.ir.leaves import leaves_of
from meshloom.program.ir.nodes import Input, Meta, Ref
from meshloom.program.ir.program import Program

META = Meta(shape=(8,), dtype=torch.float32, stride=(1,), requires_grad=True)
SPEC = tree_flatten(0)[1]


def overheads(num_ranks: int = 4, num_microbatches: int = 32, rounds: int = 30) -> list[dict[str, Any]]:
    """A record per schedule: microseconds per action of the rank whose actions take most, median and minimum
    over rounds.

    `executor`: stages are objects that hand over a tensor that is there. `with stages`: they are `ProgramStage`s
    of a program without operators, so that giving, keeping and letting go of microbatches is in it, and a
    call of autograd on an empty graph.
    """
    records: list[dict[str, Any]] = []
    for name in SCHEDULES:
        schedule = make_schedule(name, num_ranks, num_microbatches)
        crossings = [chain(schedule.num_stages)] * num_microbatches
        for what, make in (("executor", Nothing), ("with stages", empty_stage)):
            per_rank: list[list[float]] = []
            for rank in range(num_ranks):
                stages: Any = {
                    number: make(number, schedule.num_stages, num_microbatches, bool(schedule.split))
                    for number in schedule.stages_of(rank)
                }
                run = PipelineRun(schedule, Silent(rank, num_ranks), stages, crossings, torch.device("cpu"))
                per_rank.append(
                    [microseconds / len(schedule.actions[rank]) for microseconds in timed(run, rounds)]
                )
            worst = max(per_rank, key=statistics.median)
            figures = {"median": statistics.median(worst), "minimum": min(worst)}
            records.append(
                {
                    "schedule": name,
                    "ranks": num_ranks,
                    "microbatches": num_microbatches,
                    "what": what,
                    "microseconds_per_action": figures,
                }
            )
    return records


def timed(run: PipelineRun, rounds: int) -> list[float]:
    """Microseconds of a whole step, after two that warm up."""
    found: list[float] = []
    with collector_off():
        for number in range(rounds + 2):
            began = time.perf_counter()
            run.run()
            if number >= 2:
                found.append((time.perf_counter() - began) * 1e6)
    return found


def chain(num_stages: int, meta: Meta = META) -> list[Crossing]:
    """A value from each stage to the next, with a gradient back."""
    return [
        Crossing(value=f"x{stage + 1}", source=stage, destination=stage + 1, meta=meta)
        for stage in range(num_stages - 1)
    ]


class Nothing:
    """A stage that computes nothing, for `PipelineRun`."""

    def __init__(self, number: int, num_stages: int, num_microbatches: int, split: bool) -> None:
        self._out = {f"x{number + 1}": torch.zeros(META.shape)}
        self._back = {f"x{number}": torch.zeros(META.shape)}

    def receive(self, microbatch: int, values: Mapping[str, Tensor]) -> None:
        """Values of an earlier stage."""

    receive_gradients = receive

    def forward(self, microbatch: int) -> dict[str, Tensor]:
        """What leaves."""
        return self._out

    def backward(self, microbatch: int) -> dict[str, Tensor]:
        """What goes back."""
        return self._back

    input_gradients = backward

    def weight_gradients(self, microbatch: int) -> dict[str, Tensor]:
        """Nothing goes anywhere."""
        return {}

    def clear(self) -> None:
        """Nothing is kept."""


def empty_stage(
    number: int, num_stages: int, num_microbatches: int, split: bool, meta: Meta = META
) -> ProgramStage:
    """A stage whose program has no operators: what comes in leaves."""
    crossings = chain(num_stages, meta)
    incoming, outgoing = (
        tuple(crossings[number - 1 : number] if number else ()),
        tuple(crossings[number : number + 1]),
    )
    source = Input(value=f"x{number}", name="x", meta=meta)
    program = Program(
        parameters={}, buffers={}, constants={}, inputs=(source,), nodes=(), outputs=(Ref(source.value),), out_spec=SPEC,
        updates={}, in_place=frozenset(), device=torch.device("cpu"), training=True,
    )  # fmt: skip
    leaf = leaves_of({"x": torch.zeros(meta.shape, requires_grad=True)})
    stage = Stage(number=number, program=program, incoming=incoming, outgoing=outgoing, returned=SPEC)
    finish = (lambda microbatch, returned: returned[0].sum()) if number + 1 == num_stages else None
    return ProgramStage(
        [stage] * num_microbatches, {}, {}, lambda microbatch: leaf, finish=finish, split=split
    )


class _Done(Work):
    def wait(self) -> None:
        pass

    def is_finished(self) -> bool:
        return True


DONE = _Done()


class Silent(Group):
    """A group whose messages are there at once and hold nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def send(self, tensor: Tensor, destination: int) -> Work:
        return DONE

    def recv(self, tensor: Tensor, source: int) -> Work:
        return DONE

    def all_reduce(self, tensor: Tensor, op: Any = "sum") -> Work:
        raise NotImplementedError

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: Any = "sum") -> Work:
        raise NotImplementedError

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        raise NotImplementedError

    def all_to_all(self, output: Tensor, tensor: Tensor, output_sizes: Any, sizes: Any) -> Work:
        raise NotImplementedError

    def gather(self, outputs: Any, tensor: Tensor, destination: int) -> Work:
        raise NotImplementedError

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        raise NotImplementedError

    def barrier(self) -> Work:
        return DONE

    def abort(self) -> None:
        pass


@contextmanager
def collector_off():
    """Without garbage collection, which would come at any time."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
