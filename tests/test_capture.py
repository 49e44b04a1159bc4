"""Programs equal eager: loss, gradients, buffers and draws, in float32 and float64, and what the raw export
does instead."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from captured import check_against_eager
from jobs import MODELS, make_job
from program_jobs import OWN, Loss, batches_of, job_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from meshloom.core.errors import CaptureError
from meshloom.core.random import KeyedDraws, seed_everything
from meshloom.program.capture.capture import capture, capture_module
from meshloom.program.capture.check import check_against_module
from meshloom.program.ir.leaves import leaves_of
from meshloom.program.ir.program import Program
from meshloom.program.run.execute import run_program

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]


@pytest.mark.covering("autocast-float32", "no_grad-float32", "checkpointed-float32")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
        for name in OWN
        for dtype in (torch.float32, torch.float64)
    ],
)
def test_program_equals_eager(name: str, dtype: torch.dtype):
    """Also where raw export loses it: gradients under no_grad or autocast inside of another, and those of reentrant checkpoints."""
    job, batches = job_of(*OWN[name][:2]), batches_of(OWN[name], 4)
    program = capture(job, (batches[0], batches[1]), dtype=dtype)
    # the same operators in the same order; a gradient that checkpointed blocks bring in parts is summed in another one
    tolerance = 0.0 if name != "checkpointed" else {torch.float32: 1e-6, torch.float64: 1e-12}[dtype]
    check_against_eager(program, job, batches[2:], tolerance=tolerance)


@pytest.mark.covering("training-mlp", "training-cnn", "training-unused_twice", "evaluation-gpt")
@pytest.mark.parametrize("name", [name for name in MODELS if name != "branch"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_program_of_a_job_equals_eager(name: str, training: bool):
    job = make_job(name, "sgd")
    data = job.data()
    batches = [default_collate([data[start + each] for each in range(6)]) for start in (0, 6, 12, 18)]
    program = capture(job, (batches[0], batches[1]), training=training)
    check_against_eager(program, job, batches[2:], tolerance=0.0)


@pytest.mark.covering("in_place", "autocast", "rotary", "precisions")
@pytest.mark.parametrize("name", ["in_place", "autocast", "rotary", "precisions", "transformer"])
def test_lifted_program_computes_all_in_float64_near_the_unlifted_value(name: str):
    model = OWN[name]
    batch, other = batches_of(model, 2)
    program = capture(job_of(*model[:2]), (batch, other), training=False)
    seed_everything(0)
    eager = model[0]().eval()
    low = run_program(program, dict(eager.named_parameters()), dict(eager.named_buffers()), batch)
    eager.double() if name != "rotary" else eager.to(torch.complex128).double()
    lifted = {name: each.detach().double().requires_grad_() for name, each in eager.named_parameters()}
    buffers = {
        name: each.double() if each.is_floating_point() else each for name, each in eager.named_buffers()
    }
    if name == "rotary":
        buffers = {key: each.to(torch.complex128) for key, each in model[0]().named_buffers()}
    value = run_program(program, lifted, buffers, batch, dtype=torch.float64)
    assert value.dtype == torch.float64
    # bfloat16 has 8 bits, and the loss is a mean of squares; the others are float32's rounding.
    torch.testing.assert_close(
        value.float(), low.float(), rtol=2e-2 if name in ("autocast", "precisions") else 1e-5, atol=1e-6
    )
    seen: list[torch.dtype] = []
    run_program(
        program,
        lifted,
        buffers,
        batch,
        dtype=torch.float64,
        visit=lambda node, each: seen.extend(_floats(each)),
    )
    assert set(seen) <= {torch.float64, torch.complex128}


def _floats(value: Any) -> Iterator[torch.dtype]:
    for each in value if isinstance(value, tuple | list) else [value]:
        if isinstance(each, Tensor) and (each.is_floating_point() or each.is_complex()):
            yield each.dtype


@pytest.mark.parametrize("training", [True, False])
def test_a_job_is_read_on_the_device_of_its_batch(training: bool):
    """Metrics, and batches of new shapes, are read while the run goes on, from batches that lie on the GPU;
    the model that was built for it lay on the CPU."""
    job = make_job("mlp", "sgd")
    data = job.data()
    batches = [default_collate([data[0], data[1]]), default_collate([data[2], data[3]])]
    there = [
        leaves_of(batch).rebuild([leaf.to("meta") for leaf in leaves_of(batch).tensors.values()])
        for batch in batches
    ]
    program = capture(job, (there[0], there[1]), training=training)
    assert program.device.type == "meta"
    assert [str(node.target) for node in program.nodes] == [
        str(node.target) for node in capture(job, (batches[0], batches[1]), training=training).nodes
    ]


def test_draws_are_those_of_keyed_eager():
    model = OWN["noise"]
    first, second = batches_of(model, 2)
    program = capture(job_of(*model[:2]), (first, second))
    seed_everything(0)
    eager = model[0]()
    seen: list[list[Any]] = []
    for run in (
        lambda: model[1](eager, second),
        lambda: run_program(program, dict(eager.named_parameters()), {}, second),
    ):
        seed_everything(11)
        with KeyedDraws(seen=(draws := [])):
            run()
        seen.append(draws)
    assert len(seen[0]) > 8
    numbers = [(node.draw, node.num_draws) for node in program.nodes if node.draw is not None]
    assert numbers == [(number, 1) for number in range(len(seen[0]))]


def test_without_draws_the_program_is_compared_with_plain_eager():
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch, batch).square().mean()

    model, batch = nn.Bilinear(5, 5, 3), torch.randn(4, 5)
    with KeyedDraws():
        watched = loss(model, batch)  # the products inside of the operator are not cast then
    assert not torch.equal(watched, loss(model, batch))
    program = capture_module(model, loss, (batch, torch.randn(4, 5)))
    check_against_module(program, model, loss, [torch.randn(4, 5)], tolerance=0.0)


def test_nodes_know_module_line_and_context():
    program = capture(job_of(*OWN["autocast"][:2]), (*batches_of(OWN["autocast"], 2),))
    linears = [node for node in program.nodes if node.operator == "linear"]
    assert [node.path for node in linears] == ["first", "first", "first", "second", "second", "second"]
    assert [str(node.context) for node in linears] == [
        "autocast 0 bfloat16",
        "autocast 0 bfloat16",
        "autocast 0 bfloat16, autocast 1 off",
        "autocast 0 bfloat16, no_grad",
        "autocast 0 bfloat16",
        "autocast 2 bfloat16",
    ]
    assert all(node.line and node.line.file.endswith("program_jobs.py") for node in linears)
    assert linears[3].line is not None and linears[3].line.text == "z = self.second(y)"


def test_user_module_is_untouched():
    build, loss, _ = OWN["in_place"]
    seed_everything(0)
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = [set(vars(module)) for module in model.modules()]
    state = torch.get_rng_state()
    capture_module(model, loss, (*batches_of(OWN["in_place"], 2),))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


# --- The traps of raw exports: each seen there, and gone.


def raw(model: nn.Module, loss: Any, batch: Any) -> Any:
    return torch.export.export(Loss(model, loss), (batch,), strict=False).module()


def run(program: Program, model: nn.Module, batch: Any, **where: Any) -> Any:
    return run_program(program, dict(model.named_parameters()), dict(model.named_buffers()), batch, **where)


def test_entries_that_were_one_tensor_stay_two_inputs():
    model, loss = nn.Linear(3, 2), lambda model, batch: (model(batch["a"]) * model(batch["b"])).sum()
    same, a, b = torch.randn(4, 3), torch.randn(4, 3), torch.randn(4, 3)
    fresh = {"a": a, "b": b}
    # one input for ever
    assert torch.equal(raw(model, loss, {"a": same, "b": same})(fresh), loss(model, {"a": b, "b": b}))
    program = capture_module(model, loss, ({"a": same, "b": same}, {"a": a, "b": a}))
    assert torch.equal(run(program, model, fresh), loss(model, fresh))


def test_threads_capture_one_after_another():
    def in_threads(work: Any) -> list[Any]:
        with ThreadPoolExecutor(3) as pool:
            return [each.exception() for each in [pool.submit(work) for _ in range(3)]]

    batch = torch.randn(4, 3)
    loss = lambda model, batch: model(batch).sum()  # noqa: E731
    assert in_threads(lambda: capture_module(nn.Linear(3, 2), loss, (batch, batch + 1))) == [None, None, None]


def test_in_place_operators_are_gone_and_batch_norm_still_trains():
    build, loss, _ = OWN["in_place"]
    seed_everything(0)
    model = build()
    batch, other = batches_of(OWN["in_place"], 2)
    targets = [str(node.target) for node in raw(model, loss, batch).graph.nodes]
    assert "aten.relu_.default" in targets and "aten.add_.Tensor" in targets
    program = capture_module(model, loss, (batch, other))
    mutable = [
        node.operator
        for node in program.nodes
        if getattr(getattr(node.target, "_schema", None), "is_mutable", False)
    ]
    assert mutable == []
    assert program.in_place == {
        "norm.running_mean",
        "norm.running_var",
        "norm2.running_mean",
        "norm2.running_var",
    }
    assert set(program.updates) == {"norm.num_batches_tracked", "norm2.num_batches_tracked"}


def test_batch_size_device_and_default_dtype_are_not_baked_in():
    class Constructs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (
                x * torch.ones(x.shape[1], device=x.device)
                + torch.arange(3, device=x.device)
                + torch.zeros(3)
            )

    model, loss = Constructs(), lambda model, batch: model(batch).sum()
    batch = torch.randn(4, 3)
    exported = raw(model, loss, batch)
    with pytest.raises(AssertionError, match="Guard failed"):
        exported(torch.randn(5, 3))
    assert "device(type='cpu')" in exported.code  # for ever
    program = capture_module(model, loss, (batch, torch.randn(4, 3)))
    with pytest.raises(
        CaptureError, match=r"batch of the batch has shape \[5, 3\], and the program is for \[4, 3\]"
    ):
        run(program, model, torch.randn(5, 3))
    assert torch.equal(run(program, model, batch), loss(model, batch))
    on_meta = run(program, model, batch, device="meta")
    assert on_meta.device.type == "meta" and on_meta.shape == ()
    lifted = run(program, model, batch, dtype=torch.float64)
    assert torch.equal(lifted, (batch.double() + torch.arange(3)).sum())
    torch.set_default_dtype(torch.float64)
    try:
        assert run(program, model, batch).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_evaluation_is_another_program_where_raw_export_cannot_switch():
    job = make_job("cnn", "sgd")
    batch = default_collate([job.data()[each] for each in range(6)])
    with pytest.raises(NotImplementedError):
        raw(job.model(), job.loss, batch).eval()
    train, evaluate = (
        capture(job, (batch, {**batch, "x": batch["x"] + 1}), training=training) for training in (True, False)
    )
    assert train.training and not evaluate.training
    assert (
        not evaluate.in_place
        and not evaluate.updates
        and all(node.draw is None for node in evaluate.nodes if node.operator == "dropout")
    )


def test_state_is_not_shared_with_the_module():
    model, loss = nn.BatchNorm1d(3), lambda model, batch: model(batch).square().sum()
    batch = torch.randn(4, 3)
    shared = nn.BatchNorm1d(3)
    raw(shared, loss, batch)(batch)
    assert int(shared.num_batches_tracked) == 1  # running the export trained the module it was made from
    program = capture_module(model, loss, (batch, torch.randn(4, 3)))
    buffers = {name: each.clone() for name, each in model.named_buffers()}
    run_program(program, {name: each.clone() for name, each in model.named_parameters()}, buffers, batch)
    assert int(buffers["num_batches_tracked"]) == 1 and int(model.num_batches_tracked) == 0
    assert float(model.running_mean.abs().sum()) == 0.0 and float(buffers["running_mean"].abs().sum()) > 0


def test_difference_from_eager_names_the_first_module():
    class Traced(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (2 if torch.compiler.is_exporting() else 1)

    model = nn.Sequential(nn.Linear(3, 3), Traced(), nn.Linear(3, 2))
    loss = lambda model, batch: F.mse_loss(model(batch), torch.ones(4, 2))  # noqa: E731
    program = capture_module(model, loss, (torch.randn(4, 3), torch.randn(4, 3)))
    with pytest.raises(CaptureError, match=r"the first module whose output differs is 1\."):
        check_against_module(program, model, loss, [torch.randn(4, 3)])


def test_a_faster_way_that_fails_is_not_in_the_program() -> None:
    """The call that raised an error, which the user's code catches, stayed in the export, and the comparison refused the program."""

    class Tries(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return super().forward(x.view(7, 9))
            except RuntimeError:
                return super().forward(x)

    def slope(model: Any, batch: Tensor) -> Tensor:
        x = batch.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        return gradient.square().sum()

    one, two, fresh = (torch.randn(5, 3) for _ in range(3))
    model = Tries(3, 4)
    for loss in (lambda model, batch: model(batch).square().sum(), slope):
        program = capture_module(model, loss, (one, two))
        assert not any("(7, 9)" in str(node.args) for node in program.nodes)
        check_against_module(program, model, loss, [fresh])


def test_a_number_of_the_batch_that_is_only_logged_is_left_out() -> None:

    class Notes(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 4)
            self.metrics: dict[str, float] = {}

        def forward(self, x: Tensor) -> Tensor:
            self.metrics["mean"] = x.mean().item()
            return super().forward(x)

    model, loss = Notes(), lambda model, batch: model(batch).sum()
    program = capture_module(model, loss, [torch.ones(5, 3)])
    check_against_module(program, model, loss, [torch.randn(5, 3)])
    assert model.metrics == {}
