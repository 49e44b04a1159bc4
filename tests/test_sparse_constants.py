"""A sparse matrix that a loss or a model keeps, like a graph's adjacency matrix, is a constant of the program
under tp and pp."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from meshloom.core.errors import CaptureError, MeshloomError, TrainingError
from meshloom.core.job import Job
from meshloom.program.capture.capture import capture
from meshloom.program.capture.shapes import capture_shapes
from meshloom.program.cost.cost import costs
from meshloom.program.ir.transfer import pack, unpack
from meshloom.train.trainer import Trainer
from tests.fitted import fitted
from tests.verified import equals_one_device

NODES, KINDS = 12, 3


def adjacency() -> Tensor:
    """Who has an edge to whom, and to itself; rows add up to one."""
    dense = (torch.rand(NODES, NODES, generator=torch.Generator().manual_seed(1)) < 0.3).double() + torch.eye(
        NODES
    )
    return (dense / dense.sum(1, keepdim=True)).to_sparse()


class GCN(nn.Module):
    """Two layers of a graph convolution (Kipf & Welling, 2017). operator: how the matrix is multiplied."""

    def __init__(self, *, operator: str = "sparse.mm") -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 16).double(), nn.Linear(16, KINDS).double()
        self.adjacency = adjacency()
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        return self.spread(self.two(torch.relu(self.spread(self.one(x)))))

    def spread(self, x: Tensor) -> Tensor:
        return self.adjacency @ x if self.operator == "@" else torch.sparse.mm(self.adjacency, x)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return torch.stack(
        [nn.functional.cross_entropy(model(x), y) for x, y in zip(batch["x"], batch["y"], strict=True)]
    ).mean()


def job(operator: str = "sparse.mm") -> Job:
    source = torch.Generator().manual_seed(0)
    samples = [
        {
            "x": torch.randn(NODES, 8, generator=source, dtype=torch.float64),
            "y": torch.randint(0, KINDS, (NODES,), generator=source),
        }
        for _ in range(4)
    ]
    return Job(
        model=lambda: GCN(operator=operator), data=lambda: samples, loss=loss, batch_size=2, steps=2, buffers={"count": "sum"},
        optimizer=lambda named: torch.optim.SGD([each for _, each in named], lr=0.1),
    )  # fmt: skip


BATCH = {"x": torch.ones(2, NODES, 8, dtype=torch.float64), "y": torch.zeros(2, NODES, dtype=torch.long)}


@pytest.mark.parametrize(
    "plan", ["dp=2", "tp=2,tp_placements=one:column+two:row", "pp=2,cuts=two", "pp=2,cuts=two,recompute=full"]
)
@pytest.mark.parametrize("operator", ["sparse.mm", "@"])
@pytest.mark.slow
def test_a_graph_convolution_equals_one_device(plan: str, operator: str):
    """Reading it ended in "unsupported memory format option Contiguous". In float64, to 1e-10."""
    equals_one_device(job(operator), plan, dtype=None)


@pytest.mark.long
def test_a_closures_matrix_is_one_too_and_travels():
    matrix = adjacency()
    closed = replace(
        job(),
        model=lambda: nn.Linear(8, KINDS).double(),
        loss=lambda model, batch: torch.sparse.mm(matrix, model(batch["x"][0])).square().mean(),
    )
    program = capture(closed, (BATCH, {**BATCH, "x": torch.randn(2, NODES, 8, dtype=torch.float64)}))
    ((_, constant),) = program.constants.items()
    assert constant.layout == torch.sparse_coo
    there = unpack(pack(program))
    assert there.digest() == program.digest()
    ((_, sent),) = there.constants.items()
    assert sent.is_coalesced() and torch.equal(sent.to_dense(), matrix.to_dense())
    assert (
        replace(program, constants={name: each * 2 for name, each in program.constants.items()}).digest()
        != program.digest()
    )
    by_shapes = capture_shapes(closed, BATCH)
    assert costs(by_shapes) == costs(program)


class Normalised(GCN):
    """GCN with its matrix as a buffer, and a counter. writes: whether the forward changes the matrix."""

    def __init__(self, *, layout: torch.layout = torch.sparse_coo, writes: str = "") -> None:
        super().__init__()
        matrix = self.adjacency
        del self.adjacency
        self.register_buffer("adjacency", matrix if layout == torch.sparse_coo else matrix.to_sparse_csr())
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.writes = writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.writes == "in place":
            self.adjacency *= 0.9
        elif self.writes == "anew":
            self.adjacency = self.adjacency * 0.9
        return super().forward(x)


@pytest.mark.parametrize(
    ("plan", "layout"),
    [
        ("dp=1,microbatches=2", torch.sparse_csr), ("dp=2", torch.sparse_coo), ("dp=2,zero=3", torch.sparse_csr),
        ("tp=2,tp_placements=one:column+two:row", torch.sparse_coo), ("pp=2", torch.sparse_coo),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.slow
def test_a_sparse_buffer_is_a_constant(plan: str, layout: torch.layout):
    """It ended in "unsupported memory format option Contiguous", and was refused later on."""
    normalised = replace(job(), model=lambda: Normalised(layout=layout))
    equals_one_device(normalised, plan, dtype=None)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_programs_know_one_sparse_layout():
    """The whole loss ran as written once, where torch.export does not know the layout."""
    normalised = replace(job(), model=lambda: Normalised(layout=torch.sparse_csr))
    with pytest.raises(CaptureError, match="Sparse CSR .* outside of all modules .* @ml.leaf"):
        Trainer(normalised, "tp=2", devices="simulated")


@pytest.mark.slow
def test_checkpoints_leave_it_out_and_resume(tmp_path: Path):
    normalised = replace(job(), model=Normalised, steps=2)
    for plan, steps, resume in (("dp=2", 1, None), ("tp=2,microbatches=2", 2, tmp_path)):
        fitted(normalised, plan, out=tmp_path, steps=steps, resume=resume)
    with Trainer(normalised, "dp=1,microbatches=2", devices="simulated") as whole:
        whole.fit()
        state = whole.replicas[0].model.state_dict()
    saved = load_file(max(tmp_path.glob("step-*")) / "model.safetensors")
    assert saved.keys() == state.keys() and "adjacency" not in saved
    assert all(torch.allclose(saved[name], each, atol=1e-12) for name, each in state.items())


@pytest.mark.parametrize("writes", ["in place", "anew"])
@pytest.mark.long
def test_a_forward_that_changes_it_is_refused_by_name(writes: str):
    with (
        pytest.raises(TrainingError, match="adjacency is a sparse matrix, which is a constant of the run"),
        Trainer(
            replace(job(), model=lambda: Normalised(writes=writes)), "dp=2", devices="simulated"
        ) as trainer,
    ):
        trainer.fit()


def test_ranks_whose_matrices_differ_are_refused():
    values = iter((1.0, 2.0))

    def model() -> GCN:
        made = GCN()
        made.adjacency = made.adjacency * next(values)
        return made

    with pytest.raises(MeshloomError, match="adjacency"):
        Trainer(replace(job(), model=model), "dp=2", devices="simulated")


@pytest.mark.long
def test_what_an_operator_gives_is_dense():
    turned = replace(
        job(), loss=lambda model, batch: torch.sparse.mm(model.adjacency.t(), model(batch["x"][0])).mean()
    )
    with pytest.raises(CaptureError, match="in a program only constants are sparse"):
        capture(turned, (BATCH, BATCH))
