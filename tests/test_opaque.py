"""Modules that cannot be read run as they are, as one operator of the program; everything around them is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.errors import JobError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.data.samples import first_batches
from meshloom.planner.describe import describe
from meshloom.planner.divided import divided
from meshloom.planner.readings import Readings
from meshloom.program.cost.opaque_shares import opaque_shares
from meshloom.program.ir.program import Program
from meshloom.program.ir.transfer import pack, unpack
from meshloom.program.opaque.bound import OpaqueModule
from meshloom.program.opaque.call import ChangedCallError
from meshloom.program.opaque.operator import call_of_node, is_opaque
from meshloom.program.store.captured_loss import CapturedLoss
from meshloom.verify.run import verify
from tests.covering import few
from tests.opaque_jobs import LENGTH, PARTS, WIDTH, Net, Readable, Router, job_of, part_job
from tests.processes import on_ranks

pytestmark = [pytest.mark.usefixtures("silent_export", "dear_memory")]

PLANS = [
    "tp=2",
    "pp=2,microbatches=2",
    "dp=2,pp=2,tp=2",
    "dp=2,zero=3",
    "pp=2,tp=2,microbatches=4,schedule=zb-h1,recompute=full",
    "dp=2,pp=2,zero=3,recompute=selective",
]
FOUND = {
    "router": ["parts.0"],
    "own function": ["parts.0"],
    "branches": ["parts.0"],
    "numpy": ["parts.0"],
    "buffers": ["parts.0"],
    "dropout": ["parts.0.router"],
    "packed": ["parts.0"],
    "hooks": ["parts.0.linear"],
    "frozen": ["parts.0.router"],
    "attribute": ["parts.0.part"],
    "shapes of values": ["parts.0"],
    "scripted": ["parts.0.inner"],
    "normed": ["parts.0"],
    "normed over all chunks": ["parts.0"],
}


def captured(job: Job, *, training: bool = True) -> Program:
    return CapturedLoss(job).capture(first_batches(job, 2, 8), training=training)


def equal(job: Job, plan: str) -> bool:
    report = verify(job, Plan.parse(plan), devices="simulated", steps=2, dtype=torch.float64)
    assert report is not None
    return report.passed


def opaque_paths(program: Program) -> Sequence[str]:
    assert set(program.opaque) == {node.args[2] for node in program.nodes if is_opaque(node)}
    return sorted(program.opaque)


@pytest.mark.covering("hooks")
@pytest.mark.parametrize("name", ["router", pytest.param("hooks", marks=pytest.mark.long)])
def test_the_smallest_module_that_cannot_be_read_is_found(name: str) -> None:
    assert opaque_paths(captured(part_job(name))) == FOUND[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(PARTS) - {"router", "hooks"}))
def test_the_smallest_module_is_found_in_each_kind(name: str) -> None:
    assert opaque_paths(captured(part_job(name))) == FOUND[name]


@pytest.mark.covering("3")
@pytest.mark.long
@pytest.mark.parametrize("number", few(range(len(PARTS)), 5, pytest.mark.slow))
def test_parts_equal_one_device(number: int) -> None:
    name = sorted(PARTS)[number]
    assert equal(part_job(name), PLANS[number % len(PLANS)])


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", sorted(PARTS))
def test_every_part_equals_one_device_under_every_plan(name: str, plan: str) -> None:
    assert equal(part_job(name), plan)


@pytest.mark.long
def test_a_program_with_a_part_travels_as_bytes() -> None:
    program = captured(part_job("router"))
    other = unpack(pack(program))
    assert other.digest() == program.digest()
    assert other.opaque == program.opaque


@pytest.mark.long
@pytest.mark.slow
def test_what_a_part_returns_may_be_written_in_place() -> None:
    class InPlace(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = self.parts[0](self.embed(x))
            y += 1
            return self.head(F.relu_(self.blocks[0](y.mul_(0.5))))

    assert equal(job_of(lambda: InPlace([Router()], "r"), opaque=["parts.0"]), "tp=2")


@pytest.mark.long
@pytest.mark.slow
def test_a_module_is_opaque_because_the_job_asks() -> None:
    for asked in ("blocks.1", Readable, "Readable"):
        program = captured(job_of(lambda: Net([], "rr"), opaque=[asked]))
        assert opaque_paths(program) == (["blocks.1"] if asked == "blocks.1" else ["blocks.0", "blocks.1"])
        assert set(program.opaque.values()) == {"the job asks for it"}


def test_a_name_without_a_module_is_refused() -> None:
    with pytest.raises(JobError, match=r"names nowhere, and the model has no module of that name"):
        captured(job_of(lambda: Net([], "r"), opaque=["nowhere"]))
    with pytest.raises(JobError, match=r"must be names or types of modules"):
        job_of(lambda: Net([], "r"), opaque="router")  # a text is a sequence, too


class Tied(Net):
    """A readable layer uses the weight of one of the part's layers."""

    def __init__(self) -> None:
        super().__init__([Router()])

    def forward(self, x: Tensor) -> Tensor:
        router: Any = self.parts[0]
        return super().forward(x) + self.head(router.experts[0](self.embed(x)))


class Shared(Net):
    """A readable layer is the part's own, under both names."""

    def __init__(self) -> None:
        super().__init__([Router()])
        router: Any = self.parts[0]
        self.extra = nn.Linear(WIDTH, WIDTH)
        router.experts[1].weight = self.extra.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.head(self.extra(self.embed(x)))


class Evaluates(Net):
    """The part is in evaluation mode while the rest trains."""

    def __init__(self) -> None:
        super().__init__([PARTS["dropout"]()])
        self.train()
        self.parts[0].eval()


def model_with_parts(order: str, *names: str) -> Job:
    return job_of(lambda: Net([PARTS[each]() for each in names], order))


SHAPES_OF_MODELS = {
    "called twice": lambda: model_with_parts("r0r0", "router"),
    "twice with draws and buffers": lambda: model_with_parts("01r01", "dropout", "buffers"),
    "first": lambda: model_with_parts("0rr", "router"),
    "last": lambda: model_with_parts("rr0", "hooks"),
    "alone": lambda: model_with_parts("0", "packed"),
    "several": lambda: model_with_parts("0r1r2", "router", "own function", "buffers"),
    "tied": lambda: job_of(Tied),
    "shared": lambda: job_of(Shared),
    "evaluating": lambda: job_of(Evaluates),
    "asked for": lambda: job_of(lambda: Net([], "rrr"), opaque=[Readable]),
    "the whole model": lambda: job_of(lambda: Net([], "rr"), opaque=["Net"]),
}


@pytest.mark.covering("twice with draws")
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("twice with draws and buffers", "pp=2,microbatches=2"),
        ("tied", "dp=2,pp=2,tp=2"),
        ("shared", "tp=2"),
        pytest.param(
            "alone", "pp=2,tp=2,microbatches=4,schedule=zb-h1,recompute=full", marks=pytest.mark.slow
        ),
    ],
)
@pytest.mark.slow
def test_models_with_parts_equal_one_device(name: str, plan: str) -> None:
    assert equal(SHAPES_OF_MODELS[name](), plan)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", sorted(SHAPES_OF_MODELS))
def test_every_model_with_parts_equals_one_device_under_every_plan(name: str, plan: str) -> None:
    assert equal(SHAPES_OF_MODELS[name](), plan)


@pytest.mark.long
def test_a_part_is_evaluated_in_evaluation_mode() -> None:
    program = captured(part_job("dropout"), training=False)
    (node,) = filter(is_opaque, program.nodes)
    assert node.num_draws == 0 and not any(call_of_node(node).modes)


@pytest.mark.long
@pytest.mark.slow
def test_batches_of_other_sizes_are_captured_for_themselves() -> None:
    job = part_job("router")
    loss = CapturedLoss(job)
    for samples in (8, 3):
        assert loss.capture(first_batches(job, 2, samples)).opaque
    assert loss.num_captured == 2


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self, width: int, routed: bool) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.mlp = Router(width, 2) if routed else Readable(width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return self.mlp(self.norms[1](x))


class Deep(nn.Module):
    """Twelve layers, of which one has a router that cannot be read."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, width), nn.Linear(width, 2)
        self.blocks = nn.ModuleList(Block(width, routed=number == 7) for number in range(12))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.slow
def test_twelve_layers_with_one_unreadable_router_are_divided() -> None:
    """At least 90% of parameters and FLOPs, as `describe` counts them."""
    readings = Readings(job_of(Deep))
    found = describe(readings)
    assert opaque_paths(found.program) == ["blocks.7.mlp"]
    (note,) = found.opaque
    assert note.startswith("blocks.7.mlp runs as written, as one operator that is not divided: ")
    account = divided(readings, Plan.parse("tp=2")).account
    assert account.parameters_divided >= 0.9 and account.flops_divided >= 0.9
    parameters, flops = opaque_shares(found.program, readings.of(8).costs)
    assert 0 < parameters < 0.05 and 0 < flops < 0.05
    assert f"It is {parameters:.1%} of the parameters and {flops:.1%} of the FLOPs." in note


def verdict(kind: str, plan: str) -> bool | None:
    """Whether a plan on rank processes equals one device; None on ranks that do not report."""
    report = verify(part_job(kind), Plan.parse(plan), devices="auto", steps=2, dtype=torch.float64)
    return report.passed if report is not None else None


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "plan", "size"),
    [
        ("buffers", "pp=2,microbatches=2", 2),
        pytest.param("dropout", "pp=2,tp=2", 4, marks=pytest.mark.slow),
        pytest.param("attribute", "dp=2,pp=2", 4, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_ranks_in_processes_equal_one_device(kind: str, plan: str, size: int) -> None:
    assert on_ranks(verdict, size, kind, plan, timeout_seconds=150.0)[0]


@pytest.mark.long
def test_a_part_whose_shapes_change_later_stops_the_step() -> None:
    program = captured(part_job("router"))
    (node,) = filter(is_opaque, program.nodes)
    call = call_of_node(node)
    model = Net([Cuts()])
    part = OpaqueModule(model.parts[0], "parts.0", call)
    state = list(model.parts[0].parameters())
    x = torch.ones(8, LENGTH, WIDTH)
    (y,) = part([x], state, "parts.0", call.text())
    assert y.shape == x.shape
    with pytest.raises(
        ChangedCallError, match=r"parts.0 \(Cuts\), an opaque part, returned tensors of shapes"
    ):
        part([-x], state, "parts.0", call.text())


class Cuts(Router):
    """Returns half of its rows if they are negative."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if x.sum() > 0 else y[:4]


@pytest.mark.slow
@pytest.mark.long
def test_what_a_loss_differs_by_is_found_by_bisection() -> None:
    class OnlyInEager(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return y if torch.compiler.is_exporting() else y.detach() + 3 * (y - y.detach())

    program = captured(job_of(lambda: Net([OnlyInEager()], "rr0r")))
    assert opaque_paths(program) == ["parts.0"]
    assert "differs" in program.opaque["parts.0"]
