"""Modules that cannot be captured are leaves, run as written as one operator of the program; everything around them is captured."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from meshloom.core.errors import CaptureError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.data.samples import first_batches
from meshloom.planner.divided import divided
from meshloom.planner.readings import Readings
from meshloom.program.ir.program import Program
from meshloom.program.ir.transfer import pack, unpack
from meshloom.program.opaque.bound import OpaqueModule
from meshloom.program.opaque.call import ChangedCallError
from meshloom.program.opaque.operator import call_of_node, is_opaque
from meshloom.program.store.captured_loss import CapturedLoss
from meshloom.train.trainer import Trainer
from meshloom.verify.run import verify
from tests.covering import marked
from tests.opaque_jobs import (
    LENGTH,
    PARTS,
    WIDTH,
    Branches,
    Net,
    Readable,
    Router,
    ValueShapes,
    equal,
    job_of,
    part_job,
)
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
INNER = {
    "dropout": "parts.0.router",
    "frozen": "parts.0.router",
    "attribute": "parts.0.part",
}  # of others the whole part


def captured(job: Job, *, training: bool = True) -> Program:
    return CapturedLoss(job).capture(first_batches(job, 2, 8), training=training)


def leaf_paths(program: Program) -> Sequence[str]:
    assert set(program.opaque) == {node.args[2] for node in program.nodes if is_opaque(node)}
    return sorted(program.opaque)


@pytest.mark.long
@pytest.mark.covering("hooks", "router")
@pytest.mark.parametrize("name", sorted(PARTS))
def test_the_module_of_a_line_that_cannot_be_captured_is_a_leaf(name: str) -> None:
    assert leaf_paths(captured(part_job(name))) == [INNER.get(name, "parts.0")]


FIRST = sorted(PARTS)[3], PLANS[3]


@pytest.mark.parametrize(("name", "plan"), marked((), [FIRST], itertools.product(sorted(PARTS), PLANS)))
def test_every_part_equals_one_device_under_every_plan(name: str, plan: str) -> None:
    assert equal(part_job(name), plan)


@pytest.mark.long
def test_a_program_with_a_part_travels_as_bytes() -> None:
    program = captured(part_job("router"))
    other = unpack(pack(program))
    assert other.digest() == program.digest()
    assert other.opaque == program.opaque


@pytest.mark.slow
def test_a_module_is_a_leaf_because_the_job_names_it() -> None:
    for asked in ("blocks.1", Readable, "Readable"):
        program = captured(job_of(lambda: Net([], "rr"), leaves=[asked]))
        assert leaf_paths(program) == (["blocks.1"] if asked == "blocks.1" else ["blocks.0", "blocks.1"])
        assert set(program.opaque.values()) == {"the job asks for it"}


class Halves(Readable):
    """What is too large is halved: a choice by values."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * 0.5 if x.abs().max() > 3 else x


class HalvesToo(Halves):
    """Another class, although it does the same."""


class Clamps(Net):
    """The choice is in the model's own forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * 0.5 if x.abs().max() > 3 else x


class Wrapped(nn.Module):
    """It is in a module with nearly all of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = Clamps([], "rr"), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.net(x))


class Repeats(Branches):
    """It has little of the parameters, and most of the work."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(40):
            x = super().forward(x).tanh()
        return x


def averages() -> nn.Module:
    """One of torch's own layers divides by a number that it counts."""
    norm = nn.BatchNorm1d(WIDTH, momentum=None)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(3 * LENGTH, WIDTH), norm, nn.Linear(WIDTH, 10), nn.Unflatten(1, (LENGTH, 2))
    )


def deciding(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    wrong = model(batch["x"]).sub(batch["y"]).square()
    return wrong.mean() if wrong.max().item() > 8.0 else 2 * wrong.mean()


@pytest.mark.long
def test_its_like_are_the_modules_of_exactly_its_class() -> None:
    class Both(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for part in self.parts[: 2 if self.training else 3]:
                x = part(x)
            return self.head(x)

    program = captured(job_of(lambda: Both([Halves(), Halves(), HalvesToo()])))
    assert leaf_paths(program) == ["parts.0", "parts.1"]


@pytest.mark.parametrize(
    ("job", "sentence"),
    [
        (job_of(lambda: Clamps([], "rr")), r"test_leaves.py:\d+ .*outside of all modules but the model, Clamps\. .* of its own, which then runs as written\. Plans"),
        (job_of(Wrapped), r"test_leaves.py:\d+ .*net \(Clamps\) is 100% of the parameters\. .* write leaves=\[Clamps\]"),
        (job_of(lambda: Net([Repeats()])), r"py:\d+ .*parts.0 \(Repeats\) is \d\d% of the FLOPs\. .* write leaves=\[Repeats\]"),
        (job_of(lambda: Net([], "rr"), loss=deciding), r"depends on the values in the batch at .*test_leaves.py:\d+ .*torch.where"),
        (job_of(lambda: Net([ValueShapes()])), r"parts.0.select cannot be one operator: .*shapes.* depend on values.*Name the module around it in Job\(leaves="),
        (job_of(averages), r"depends on the values .* write leaves=\['2'\] to run 2 as written"),
    ],
    ids=["model", "most parameters", "most work", "loss", "no operator", "a layer of torch's"],
)  # fmt: skip
@pytest.mark.long
def test_what_is_no_small_leaf_is_refused_with_what_to_write(job: Job, sentence: str) -> None:
    with pytest.raises(CaptureError, match=sentence) as refused:
        captured(job)
    assert refused.value.exit_code == 2 and "dp and zero alone" in str(refused.value)


@pytest.mark.slow
def test_a_named_leaf_may_be_most_of_the_model() -> None:
    assert leaf_paths(captured(job_of(Wrapped, leaves=[Clamps]))) == ["net"]
    assert equal(job_of(lambda: Net([ValueShapes()]), leaves=[ValueShapes]), "tp=2")
    assert equal(job_of(lambda: Net([Repeats()]), leaves=["parts.0"]), "pp=2,microbatches=2")
    assert equal(job_of(averages, leaves=["2"]), "dp=2,tp=2")


@pytest.mark.parametrize("plan", ["tp=2", "pp=2,tp=2"])
@pytest.mark.long
def test_a_plan_under_which_nothing_is_divided_is_refused(plan: str) -> None:
    job = job_of(lambda: Net([], "rr"), leaves=[Net])
    sentence = f"{plan} divides nothing of this model: leaves .the model. run whole on every rank"
    with pytest.raises(CaptureError, match=sentence):
        Trainer(job, plan, devices="simulated")
    if plan == "tp=2":
        with pytest.raises(CaptureError, match=sentence):
            divided(Readings(job), Plan.parse(plan))


@pytest.mark.long
def test_how_little_is_divided_beside_leaves_is_said() -> None:
    with Trainer(
        job_of(lambda: nn.Sequential(Clamps([], "rr"), nn.Linear(2, 64), nn.Linear(64, 2)), leaves=[Clamps]),
        "tp=2",
        devices="simulated",
    ) as trainer:
        found = trainer.replicas[0].engine.stages.notes
    assert any(re.fullmatch(r"tp=2 divides \d+% of the parameters\.", each) for each in found)


@pytest.mark.long
def test_a_part_is_evaluated_in_evaluation_mode() -> None:
    program = captured(part_job("dropout"), training=False)
    (node,) = filter(is_opaque, program.nodes)
    assert node.num_draws == 0 and not any(call_of_node(node).modes)


def verdict(kind: str, plan: str) -> bool | None:
    """Whether a plan on rank processes equals one device; None on ranks that do not report."""
    report = verify(part_job(kind), Plan.parse(plan), devices="auto", steps=2, dtype=torch.float64)
    return report.passed if report is not None else None


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "plan", "size"),
    [("buffers", "pp=2,microbatches=2", 2), ("dropout", "pp=2,tp=2", 4), ("attribute", "dp=2,pp=2", 4)],
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
    with pytest.raises(ChangedCallError, match=r"parts.0 \(Cuts\), a leaf, returned tensors of shapes"):
        part([-x], state, "parts.0", call.text())


class Cuts(Router):
    """Returns half of its rows if they are negative."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if x.sum() > 0 else y[:4]


def test_a_packed_sequence_is_no_argument_of_a_leaf() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(2, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x[:, None], torch.ones(len(x)), batch_first=True)
            return self.rnn(packed)[1][0]

    with pytest.raises(
        CaptureError,
        match="rnn cannot be one operator: its arguments hold PackedSequence, which no program hands on",
    ):
        Trainer(job_of(Packed, leaves=["rnn"]), "tp=2", devices="simulated")
