"""A pipeline computes what one device does: any model, cut anywhere, under every schedule, with uneven
microbatches and dropout."""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from meshloom.core.errors import PlanError
from meshloom.pipeline.schedules.builders import make_schedule
from meshloom.pipeline.schedules.check import most_in_flight
from meshloom.pipeline.stages.choose_cuts import choose_cuts
from meshloom.pipeline.stages.stage_traffic import traffic_of_ranks
from meshloom.pipeline.stages.stages import cut_into_stages, users_of
from meshloom.program.capture.capture import capture, capture_module
from meshloom.program.cost.cost import costs
from meshloom.program.ir.program import Program
from meshloom.program.run.execute import run_flat
from tests.families import FAMILIES
from tests.jobs import make_job
from tests.pipelines import Ran, Subject, evenly, run_pipeline, subject_of

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]
LIMIT = 1e-10
SIZES = (3, 2, 2, 1, 3, 1, 2, 2)  # samples of the microbatches


@cache
def family(name: str, num_microbatches: int, *, even: bool = False) -> Subject:
    job = FAMILIES[name].make_job(True)
    data = job.data()
    sizes = [2] * num_microbatches if even else SIZES[:num_microbatches]
    batches: list[Any] = []
    at = 0
    for size in sizes:
        batches.append(default_collate([data[(at + each) % len(data)] for each in range(size)]))
        at += size
    return subject_of(job, batches)


def check(ran: Ran) -> None:
    """Some models compute norms or scans in float32 whatever their type. Where such a value crosses a cut,
    its gradient is added up in float32 in another order; with float64 in its place all of them stay below
    LIMIT."""
    in_float32 = any(
        each.meta.dtype is torch.float32 and each.meta.requires_grad
        for stage in ran.crossings
        for each in stage.incoming
    )
    assert ran.error <= (1e-6 if in_float32 else LIMIT), f"{ran.what}: {ran.error:.1e}"


@pytest.mark.parametrize("model", ["mlp", "cnn", "gpt"])
@pytest.mark.parametrize("cut", range(1, 4))
@pytest.mark.slow
def test_cut_anywhere(model: str, cut: int):
    """One operator at a time on either side."""
    job = make_job(model, "sgd")
    data = job.data()
    subject = subject_of(
        job, [default_collate([data[3 * start + each] for each in range(3)]) for start in range(2)]
    )
    count = len(subject.programs[0].nodes)

    def at(program: Program, num_stages: int) -> dict[str, int]:
        return {node.name: int(number >= cut * count // 4) for number, node in enumerate(program.nodes)}

    check(run_pipeline(subject, make_schedule("1f1b", 2, 2), at))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("first", ["near", "far"])
@pytest.mark.slow
def test_microbatches_of_other_sizes_may_be_cut_so_that_other_values_cross(first: str, schedule: str):
    """With 5 samples in 2 microbatches there are two programs. What crosses from the first stage to the last
    in one of them may be made and used in one stage in the other; then a message without a tensor was looked
    up in vain (`KeyError: Message(source=0, destination=2, ...)`)."""
    job = make_job("unused_twice", "sgd")
    data = job.data()
    subject = subject_of(
        job, [default_collate([data[at] for at in each]) for each in (range(3), range(3, 5))]
    )

    def cut(program: Program, num_stages: int) -> dict[str, int]:
        near = (program is subject.programs[0]) == (first == "near")
        count = len(program.nodes)  # near: all but the loss in the first stage
        return {
            node.name: (2 if number == count - 1 else 0) if near else number * 3 // count
            for number, node in enumerate(program.nodes)
        }

    check(run_pipeline(subject, make_schedule(schedule, 3, 2), cut))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v", "gpipe", "zb-h1"])
@pytest.mark.slow
def test_what_is_alive_and_what_is_sent(schedule: str):
    """No more than the schedule's bound is alive, and what is sent is forward bytes plus those of the
    gradients that come back (R4.2)."""
    subject = family("bert", 6, even=True)
    made = make_schedule(schedule, 3, 6)
    ran = run_pipeline(subject, made)
    assert ran.peaks == most_in_flight(made)
    for rank, sent in enumerate(ran.sent):
        expected = 0
        for stage in ran.crossings:
            for each in stage.incoming:
                source, destination = made.ranks[each.source], made.ranks[each.destination]
                if source != destination:
                    expected += (
                        6
                        * each.num_bytes
                        * ((source == rank) + (destination == rank and each.meta.requires_grad))
                    )
        assert sent == expected
    assert sum(ran.sent) > 0
    predicted = traffic_of_ranks(
        [[each for stage in ran.crossings for each in stage.incoming]] * 6, made.ranks
    )
    assert sum(each.num_bytes for each in predicted) == sum(ran.sent)


@pytest.mark.slow
def test_what_is_computed_of_the_batch_does_not_cross():
    subject = family("bert", 2, even=True)
    stages = cut_into_stages(subject.programs[0], evenly(subject.programs[0], 4), 4)
    crossing = [each for stage in stages for each in stage.incoming]
    assert crossing
    assert all(each.meta.dtype == torch.float64 for each in crossing)  # no masks, no positions
    inputs = {
        each.name
        for stage in stages
        for each in stage.program.inputs
        if not each.name.startswith("from stage")
    }
    assert inputs == {each.name for each in subject.programs[0].inputs}


@pytest.mark.slow
def test_chosen_cuts_balance_blocks_and_ends():
    program = family("llama", 1, even=True).programs[0]
    cost = costs(program)
    for count in (2, 3):
        choice = choose_cuts(program, cost, count)
        stages = [
            {
                choice.stage_of[node.name]
                for node in program.nodes
                if node.path.startswith(f"model.layers.{block}.")
            }
            for block in range(2)
        ]
        assert len(choice.stages) == count and all(stage.seconds > 0 for stage in choice.stages)
        assert set().union(*stages) <= set(range(count))
        best = min(_worst(program, cost, count, bounds) for bounds in _all_bounds(len(program.nodes), count))
        assert max(each.seconds for each in choice.stages) <= best * 1.05  # what crosses counts, too


def _all_bounds(count: int, stages: int) -> list[tuple[int, ...]]:
    if stages == 2:
        return [(end,) for end in range(1, count)]
    return [(first, second) for first in range(1, count, 3) for second in range(first + 1, count, 3)]


def _worst(program: Program, cost: Any, stages: int, bounds: tuple[int, ...]) -> float:
    """Seconds of the slowest stage by an independent sum."""
    from meshloom.program.cost.rates import Rates

    rates = Rates()
    ends = [0, *bounds, len(program.nodes)]
    totals: list[float] = []
    for start, end in pairwise(ends):
        total = 0.0
        for node in program.nodes[start:end]:
            one = cost[node.name]
            total += max(
                one.flops / rates.flops_per_second,
                (one.read_bytes + one.written_bytes) / rates.bytes_per_second,
            )
            moved = one.backward_read_bytes + one.backward_written_bytes
            total += max(one.backward_flops / rates.flops_per_second, moved / rates.bytes_per_second)
        totals.append(total)
    return max(totals)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"num_stages": 2, "cuts": ["model.layers.7"]},
            "no module of that name runs in the forward. Did you mean model.layers.1?",
        ),
        ({"num_stages": 3, "cuts": ["model.layers.1"]}, "makes 2 stages, and the plan has 3. Name 2."),
        (
            {"num_stages": 3, "cuts": ["model.layers.1", "model.layers.0"]},
            "model.layers.0 runs before model.layers.1",
        ),
        ({"num_stages": 10_000}, "and 10000 stages need 9999. Use at most"),
        ({"num_stages": 2, "memory_bytes": 1000.0}, "No cut into 2 stages fits into 1000 B a rank"),
    ],
)
@pytest.mark.slow
def test_cuts_that_cannot_be(settings: dict[str, Any], sentence: str):
    program = family("llama", 1, even=True).programs[0]
    with pytest.raises(PlanError, match=re.escape(sentence)):
        choose_cuts(program, costs(program), **settings)


def test_given_cuts_are_where_the_modules_begin():
    program = family("llama", 1, even=True).programs[0]
    choice = choose_cuts(program, costs(program), 2, cuts=["model.layers.1"])
    for node in program.nodes:
        if node.path.startswith("model.layers."):
            assert choice.stage_of[node.name] == int(node.path.startswith("model.layers.1"))


def test_a_program_of_one_stage_is_itself():
    job = make_job("mlp", "sgd")
    data = job.data()
    batch = default_collate([data[0], data[1]])
    program = capture(job, (batch, batch))
    (stage,) = cut_into_stages(program, dict.fromkeys((node.name for node in program.nodes), 0), 1)
    assert not stage.incoming and not stage.outgoing
    assert stage.program.nodes == program.nodes and stage.program.outputs == program.outputs


class _Sums(nn.Module):
    """Two sums, of which the graph calls the first `sum` and the second `sum_1`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        made = self.linear(x)
        rows, total = made.sum(dim=0), made.square().sum()
        return (rows * 0.5).mean() + total * 0.1


def test_values_that_cross_may_be_called_as_functions_of_python_are():
    """A stage's operand `sum` was written over another one, `sum_1`, as the function that runs its program
    cannot call an argument `sum`."""
    x = torch.randn(3, 4, dtype=torch.float64)
    torch.manual_seed(0)
    module = _Sums().double()
    program = capture_module(module, lambda module, batch: module(batch), (x, x))
    names = [node.name for node in program.nodes]
    assert {"sum", "sum_1"} <= {*names}
    after = max(names.index("sum"), names.index("sum_1")) + 1
    stages = cut_into_stages(program, {name: int(number >= after) for number, name in enumerate(names)}, 2)
    assert {each.value for each in stages[1].incoming} == {"sum", "sum_1"}
    state = dict(module.named_parameters())
    crossing = dict(zip(stages[0].sent, run_flat(stages[0].program, state, {}, [x]), strict=False))
    (loss,) = run_flat(
        stages[1].program, state, {}, [crossing[each.value] for each in stages[1].program.inputs]
    )
    assert torch.equal(loss, module(x))


class _Shared(nn.Module):
    """One layer before and after a normalisation, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(self.second(self.norm(self.first(x)))).sum()


def test_who_uses_a_parameter_or_buffer():
    model = _Shared().train()
    program = capture_module(model, lambda model, batch: model(batch), (torch.randn(3, 4), torch.randn(3, 4)))
    normal = [number for number, node in enumerate(program.nodes) if node.path == "norm"]
    stage_of = {
        node.name: (number >= normal[0]) + (number > normal[-1]) for number, node in enumerate(program.nodes)
    }
    stages = cut_into_stages(program, stage_of, 3)
    assert users_of(stages) == {
        "first.weight": (0, 2), "first.bias": (0, 2), "norm.weight": (1,), "norm.bias": (1,), "second.weight": (2,), "second.bias": (2,), "unused": (0,),
        "norm.running_mean": (1,), "norm.running_var": (1,), "norm.num_batches_tracked": (1,),
    }  # fmt: skip
    assert [stage.changing for stage in stages] == [
        frozenset(),
        {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"},
        frozenset(),
    ]
