"""Recomputation changes what is kept and what is computed twice, and nothing else."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from meshloom.comm.recording import RecordedGroup
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.core.errors import PlanError
from meshloom.core.random import preserved_draws, seed_everything
from meshloom.planner.memory.measured import measure_memory
from meshloom.program.capture.capture import capture, capture_module
from meshloom.program.cost.cost import costs
from meshloom.program.cost.rates import Rates
from meshloom.program.ir.leaves import leaves_of
from meshloom.program.ir.program import Program
from meshloom.program.recompute.recompute import recomputed, with_recomputation
from meshloom.program.recompute.segments import segments_of
from meshloom.program.run.execute import run_flat, run_program
from meshloom.program.trace.precision import build_model, default_precision, in_precision
from meshloom.tensor_parallel.partition import partition
from tests.division import cheapest
from tests.division import subject_of as divided_subject_of
from tests.families import FAMILIES
from tests.memory_jobs import CASES, case_of
from tests.program_jobs import OWN

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]
SLOW_COMPUTING = Rates(flops_per_second=1e8)  # for which products of tiny models are dear
HOW = ("full", "selective")


def in_flight(
    program: Program, build: Callable[[], nn.Module], batches: Sequence[Any]
) -> tuple[list[Tensor], Mapping[str, Any], Mapping[str, Tensor]]:
    """Outputs, gradients and buffers of F0 F1 B0 F2 B1 B2, twice: what is learnt in the first is used in the
    second."""
    model = build()
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    outputs: list[Tensor] = []

    def forward(number: int) -> Tensor:
        seed_everything(100 + number)
        returned = [
            each
            for each in run_flat(
                program, parameters, buffers, list(leaves_of(batches[number % 2]).tensors.values())
            )
            if isinstance(each, Tensor)
        ]
        outputs.extend(each.detach() for each in returned)
        return returned[0].sum()

    with preserved_draws():
        for _ in range(2):
            first, second = forward(0), forward(1)
            first.backward()
            third = forward(2)
            draw = torch.rand(3)
            second.backward()
            third.backward()
            outputs += [draw, torch.rand(3)]
    return outputs, {name: each.grad for name, each in parameters.items()}, buffers


def differences(
    program: Program, again: Program, build: Callable[[], nn.Module], batches: Sequence[Any]
) -> list[str]:
    """What is not equal bit for bit."""
    expected, found = (in_flight(each, build, batches) for each in (program, again))
    named: list[dict[Any, Tensor | None]] = []
    for outputs, gradients, buffers in (expected, found):
        named.append(
            {
                **dict(enumerate(outputs)),
                **gradients,
                **{f"buffer {name}": value for name, value in buffers.items()},
            }
        )
    assert named[0].keys() == named[1].keys()
    return [str(name) for name, value in named[0].items() if not _equal(value, named[1][name])]


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other is None or (one is not None and other is not None and torch.equal(one, other))


@cache
def family(name: str) -> tuple[Program, Callable[[], nn.Module], list[Any]]:
    job = FAMILIES[name].make_job(True)
    data = job.data()
    batches = [
        in_precision(default_collate([data[index] for index in indices]), torch.float64)
        for indices in ((0, 1, 2), (3, 4, 5))
    ]
    program = capture(job, (batches[0], batches[1]), dtype=torch.float64)
    return program, lambda: build_model(job, torch.float64, training=True), batches


@pytest.mark.covering("checkpointed", "noise", "in_place")
@pytest.mark.parametrize("name", OWN)
def test_own_models_are_the_same_bit_for_bit(name: str):
    """Autocast with cached casts, buffers that are read before and after they change, every kind of draw,
    fused recurrent layers."""
    make, loss, make_batch = OWN[name]
    generator = torch.Generator().manual_seed(0)
    batches = [make_batch(generator), make_batch(generator)]

    def build() -> nn.Module:
        torch.manual_seed(0)
        return make()

    program = capture_module(build(), loss, (batches[0], batches[1]))
    for how in HOW:
        assert not differences(program, with_recomputation(program, how), build, batches), how


@pytest.mark.parametrize("precision", ["float32", "bfloat16 autocast"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_kept_bytes_are_as_predicted_and_less(name: str, precision: str):
    """Followed while the program runs on real tensors; the loss itself, four bytes, is no activation."""
    case = case_of(name, precision)
    job = case.job("sgd")
    generator = torch.Generator().manual_seed(0)
    batch, other = case.batch(generator), case.batch(generator)
    program = capture(job, (batch, other))
    of_nodes = costs(program)
    kept: dict[str, int] = {}
    peaks: dict[str, int] = {}
    for how in ("none", *HOW):
        again = with_recomputation(program, how, costs_of=of_nodes)
        run = replace(
            job,
            loss=lambda model, chunk, again=again: run_program(
                again, dict(model.named_parameters()), dict(model.named_buffers()), chunk
            ),
        )
        measured = measure_memory(run, [batch])
        kept[how], peaks[how] = recomputed(program, of_nodes, how).kept_bytes, measured.peaks["backward"]
        # Under autocast torch's fakes halve the statistics of norms.
        assert kept[how] == pytest.approx(measured.kept, abs=4, rel=0.0 if precision == "float32" else 3e-3)
    assert kept["full"] < kept["selective"] < kept["none"]
    if len(segments_of(program)) > 2:  # what is there again at one time is a part of it
        assert peaks["full"] < peaks["none"] and peaks["selective"] < peaks["none"]


def test_the_prediction_adds_up_and_runs_no_product_again_under_selective():
    program, _, _ = family("gpt2")
    of_nodes = costs(program)
    rates = SLOW_COMPUTING
    found = recomputed(program, of_nodes, "selective", rates)
    again = {node.operator for node in program.nodes if node.name in found.seconds_of}
    assert again & {"linear", "addmm", "matmul"} == set()
    assert {"scaled_dot_product_attention", "layer_norm", "dropout"} <= again
    assert sum(found.kept_of.values()) == found.kept_bytes
    assert sum(found.seconds_of.values()) == pytest.approx(found.seconds)
    full = recomputed(program, of_nodes, "full", rates)
    forward = sum(rates.forward_seconds(each) for each in of_nodes.values())
    assert found.seconds < 0.2 * full.seconds < 0.2 * forward
    assert recomputed(program, of_nodes, "none").seconds == 0


def test_segments_are_all_of_the_program_and_about_as_many_as_the_root_of_a_chain():
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for _ in range(72):
                x = x.exp()
            return x

    program = capture_module(
        Chain(), lambda model, batch: model(batch).sum(), (torch.ones(50, 8), torch.zeros(50, 8))
    )
    segments = segments_of(program)
    assert tuple(node for segment in segments for node in segment.nodes) == program.nodes
    assert len(segments) == pytest.approx((73 / 2) ** 0.5, abs=2)  # borders count twice


@pytest.mark.slow
def test_nothing_is_left_when_backward_is_done():
    """Without the collector of circles, as many tensors are alive after a step as before it."""
    program, build, batches = family("gpt2")
    for how in HOW:
        again = with_recomputation(program, how, rates=SLOW_COMPUTING)
        model = build()
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())

        def step(again: Program = again, parameters: Any = parameters, buffers: Any = buffers) -> int:
            with preserved_draws(), default_precision(torch.float64):
                run_flat(again, parameters, buffers, list(leaves_of(batches[0]).tensors.values()))[
                    0
                ].sum().backward()
            return sum(isinstance(each, Tensor) for each in gc.get_objects())

        step()
        gc.collect()
        gc.disable()
        try:
            assert step() == step(), how
        finally:
            gc.enable()


def test_without_gradients_it_is_the_plain_program():
    program, build, batches = family("conv2d")
    model = build()
    leaves = list(leaves_of(batches[0]).tensors.values())
    values: list[list[Any]] = []
    for each in (program, with_recomputation(program, "full")):
        with torch.no_grad(), preserved_draws(), default_precision(torch.float64):
            seed_everything(1)
            values.append(
                run_flat(
                    each,
                    dict(model.named_parameters()),
                    {name: value.clone() for name, value in model.named_buffers()},
                    leaves,
                )
            )
    assert all(torch.equal(one, other) for one, other in zip(*values, strict=True))


def test_backward_may_run_twice():
    program, build, batches = family("gpt2")
    model = build()
    parameters = dict(model.named_parameters())
    with preserved_draws(), default_precision(torch.float64):
        loss = run_flat(
            with_recomputation(program, "full"),
            parameters,
            dict(model.named_buffers()),
            list(leaves_of(batches[0]).tensors.values()),
        )[0]
        once = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True)
        twice = torch.autograd.grad(loss, list(parameters.values()))
    assert all(torch.equal(one, other) for one, other in zip(once, twice, strict=True))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.slow
def test_divided_programs_send_no_more_and_are_the_same_bit_for_bit(how: str):
    subject = divided_subject_of(FAMILIES["gpt2"].make_job(True))
    part = partition(cheapest(subject.layout, 2))
    whole_costs = costs(subject.program)
    named = dict(subject.model.named_parameters())
    leaves = list(leaves_of(subject.batch).tensors.values())

    def run(programs: Sequence[Program]) -> tuple[list[Any], list[Any]]:
        groups = [RecordedGroup(each, "tp") for each in simulated_groups(2)]
        found: list[Any] = [None, None]

        def rank(number: int) -> None:
            torch.default_generator.manual_seed(7)
            mine = {
                name: nn.Parameter(
                    _part(each.detach(), part.parameters[name], number).clone(), each.requires_grad
                )
                for name, each in named.items()
            }
            loss = run_flat(
                programs[number], mine, dict(subject.model.named_buffers()), leaves, group=groups[number]
            )[0]
            loss.backward()
            found[number] = [loss.detach(), *(each.grad for each in mine.values())]

        with preserved_draws(), default_precision(torch.float64):
            in_turns([lambda number=number: rank(number) for number in range(2)])
        return found, [dict(group.counts) for group in groups]

    plain, sent = run(part.programs)
    again, sent_again = run(
        [with_recomputation(each, how, costs_of=whole_costs, rates=SLOW_COMPUTING) for each in part.programs]
    )
    assert [each.keys() for each in sent] == [each.keys() for each in sent_again]
    assert all(
        one[key].bytes == other[key].bytes and one[key].bytes
        for one, other in zip(sent, sent_again, strict=True)
        for key in one
    )
    assert all(_equal(one, other) for one, other in zip(tree_leaves(plain), tree_leaves(again), strict=True))


def _part(whole: Tensor, pieces: Any, rank: int) -> Tensor:
    from meshloom.comm.pieces import take

    return take(pieces, rank, whole)


def test_a_word_that_is_not_known():
    program, _, _ = family("gpt2")
    with pytest.raises(PlanError, match="recompute=some is not known. Known: none, full, selective."):
        with_recomputation(program, "some")
