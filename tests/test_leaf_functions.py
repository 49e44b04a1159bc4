"""`@ml.leaf` on functions: each call is one operator of a program, sentence by sentence of the contract."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import meshloom as ml
from meshloom.core.errors import CaptureError, JobError
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.data.samples import first_batches
from meshloom.planner.describe import describe
from meshloom.planner.readings import Readings
from meshloom.program.opaque.call import ChangedCallError
from meshloom.program.opaque.operator import call_of_node, is_opaque
from meshloom.program.store.captured_loss import CapturedLoss
from tests.covering import slow
from tests.opaque_jobs import equal

pytestmark = [pytest.mark.usefixtures("silent_export", "dear_memory")]

WIDTH, LENGTH = 8, 5
KEPT: list[Tensor] = []
LIMIT = [100.0]
GLOBAL: list[Any] = []


@ml.leaf
def read(layers: nn.Module, frames: Tensor, lengths: Tensor) -> Tensor:
    """Frames [batch, length, WIDTH] read as far as their lengths."""
    packed = pack_padded_sequence(frames, lengths.cpu(), batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(layers(packed)[0], batch_first=True, total_length=frames.shape[1])[0]


@ml.leaf
def largest(x: Tensor, factor: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """x where its sum is positive, else halved, in a structure."""
    return factor * (x if x.sum() > 0 else x / 2), {"mean": x.mean()}


@ml.leaf
def noised(x: Tensor, others: list[Tensor]) -> Tensor:
    if x.isnan().any():
        raise ValueError
    return F.dropout(x, 0.5) * random.uniform(0.5, 2) + others[0]


class Net(nn.Module):
    """Linear layers around `call`, which gets the module, the frames [batch, LENGTH, WIDTH] and the batch."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.BatchNorm1d(LENGTH)
        self.head = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.call = call

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.up(batch["x"])
        return self.head(x + self.call(self, x, batch))


def loss(model: Net, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch), batch["y"])


def data() -> list[dict[str, Tensor]]:
    return [
        {
            "x": torch.randn(LENGTH, WIDTH),
            "n": torch.randint(1, LENGTH + 1, ()),
            "y": torch.randn(LENGTH, WIDTH),
        }
        for _ in range(24)
    ]


def job_of(call: Callable[..., Tensor], loss: Callable[..., Any] = loss, **settings: Any) -> Job:
    return Job(
        model=lambda: Net(call),
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        data=data,
        batch_size=8,
        steps=3,
        **settings,
    )


def reading(net: Net, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return read(net.layers, x, batch["n"])


def capture(call: Callable[..., Tensor], **settings: Any) -> Any:
    job = job_of(call, **settings)
    return CapturedLoss(job).capture(first_batches(job, 2, 8))


def refused(call: Callable[..., Tensor], text: str, **settings: Any) -> str:
    with pytest.raises(CaptureError, match=text) as found:
        capture(call, **settings)
    assert found.value.exit_code == 2
    return str(found.value)


def calls_of(program: Any) -> list[Any]:
    return [call_of_node(node) for node in program.nodes if is_opaque(node)]


# 1


@pytest.mark.long
def test_a_call_is_one_operator_of_a_program_and_the_function_elsewhere() -> None:
    layers, x, lengths = (
        nn.GRU(WIDTH, WIDTH, batch_first=True),
        torch.randn(2, LENGTH, WIDTH),
        torch.tensor([2, 5]),
    )
    assert torch.equal(read(layers, x, lengths), read.__wrapped__(layers, x, lengths))
    program = capture(reading)
    assert program.opaque == {f"@{__name__}:read;layers": "it is marked with @ml.leaf"}
    assert not any("gru" in node.operator for node in program.nodes)


# 2


@pytest.mark.slow
def test_arguments_and_results_are_tensors_modules_plain_values_and_structures_of_them() -> None:
    def both(net: Net, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        value, more = largest(x, factor=0.5)
        return value + more["mean"]

    program = capture(both)
    assert [each.leaves for each in calls_of(program)] == [(None, [0.5])]
    assert equal(job_of(both), "tp=2")


def test_a_plain_value_that_changes_is_refused() -> None:
    def by_batch(net: Net, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return largest(x, factor=float(batch["n"].sum()) if type(batch["n"]) is Tensor else 1.0)[0]

    refused(by_batch, r"largest \(.*\) cannot be one operator: (what it is given|it is called otherwise)")


@pytest.mark.long
def test_a_module_that_is_not_the_models_is_refused() -> None:
    other = nn.GRU(WIDTH, WIDTH, batch_first=True)
    refused(
        lambda net, x, batch: read(other, x, batch["n"]),
        r"read \(.*test_leaf_functions.py:\d+\) cannot be one operator: it is given a GRU, which is no module of the model",
    )


class Method(nn.Module):
    """A leaf that is a method."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    @ml.leaf
    def read(self, x: Tensor) -> Tensor:
        return self.layers(x)[0] * self.scale if x.isfinite().all() else x

    def forward(self, x: Tensor) -> Tensor:
        return self.read(x)


class Methods(Net):
    def __init__(self) -> None:
        super().__init__(lambda net, x, batch: net.parts[1](net.parts[0](x)))
        self.parts = nn.ModuleList(Method() for _ in range(2))


@pytest.mark.long
def test_self_is_a_module_among_the_arguments() -> None:
    job = Job(model=Methods, loss=loss, optimizer=torch.optim.SGD, data=data, batch_size=8, steps=3)
    program = CapturedLoss(job).capture(first_batches(job, 2, 8))
    assert list(program.opaque) == [f"@{__name__}:Method.read;parts.{number}" for number in range(2)]
    assert "scale" in str(calls_of(program)[0].state)


# 3


@ml.leaf
def reaches_a_module(x: Tensor) -> Tensor:
    return GLOBAL[-1].layers(x)[0]


@ml.leaf
def reaches_a_tensor(x: Tensor) -> Tensor:
    return x + KEPT[-1]


def test_a_parameter_that_is_reached_otherwise_is_refused_by_name() -> None:
    def by_global(net: Net, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        GLOBAL[:] = [net]
        return reaches_a_module(x)

    refused(
        by_global,
        r"reaches_a_module \(.*\) cannot be one operator: it uses the parameter layers.weight_ih_l0, which is not among its arguments",
    )


def test_a_tensor_with_a_gradient_that_is_reached_otherwise_is_refused() -> None:
    def by_global(net: Net, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        KEPT[:] = [x * 2]
        return reaches_a_tensor(x)

    refused(by_global, "it uses a tensor with a gradient that is not among its arguments; give it as one")
    KEPT.clear()


# 4


@pytest.mark.slow
def test_a_function_inside_of_another_closes_over_plain_values_only() -> None:
    factor = 0.5

    @ml.leaf
    def scaled(x: Tensor) -> Tensor:
        return x * factor if x.sum() > 0 else x

    def call(net: Net, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return scaled(x)

    assert dict(calls_of(capture(call))[0].closed_over) == {"factor": 0.5}
    assert equal(job_of(call), "tp=2")
    shift = torch.ones(WIDTH)

    @ml.leaf
    def shifted(x: Tensor) -> Tensor:
        return x + shift

    refused(
        lambda net, x, batch: shifted(x),
        "it closes over shift, a Tensor, of which another rank has its own; give it as an argument",
    )


def test_a_function_that_every_call_defines_anew_is_refused() -> None:
    def call(net: Net, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        @ml.leaf
        def anew(x: Tensor) -> Tensor:
            return x.clone()

        return anew(x)

    refused(
        call,
        "each call of the loss defines it anew, so another rank cannot find it; define it at the top of its file",
    )


def test_what_is_no_function_is_refused() -> None:
    wrong: Any = nn.ReLU()
    with pytest.raises(JobError, match=r"@ml.leaf marks a function, not a ReLU"):
        ml.leaf(wrong)


# 5


@ml.leaf
def writes(x: Tensor) -> Tensor:
    return x.mul_(2)


@ml.leaf
def keeps(x: Tensor) -> Tensor:
    KEPT[:] = [x * x]
    return x + 1


@ml.leaf
def puts(net: nn.Module, x: Tensor) -> Tensor:
    net.side = x.mean()
    return x + 1


@ml.leaf
def viewed(x: Tensor) -> Tensor:
    return x[0] if x.dim() > 3 else x


@ml.leaf
def normed(norm: nn.Module, x: Tensor) -> Tensor:
    return norm(x) if x.isfinite().all() else x


def test_writing_an_argument_is_refused() -> None:
    refused(
        lambda net, x, batch: writes(x * 1), r"it writes to its input in place; write to a copy, x.clone\(\)"
    )


def test_keeping_a_tensor_with_a_gradient_is_refused() -> None:
    refused(
        lambda net, x, batch: keeps(x) + KEPT[-1],
        "it keeps a tensor with a gradient that is used outside of it; return it",
    )
    KEPT.clear()
    refused(lambda net, x, batch: puts(net, x), "it keeps a tensor in the attribute side; return it")


@pytest.mark.slow
def test_a_result_that_is_an_argument_is_a_copy() -> None:
    def call(net: Net, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return viewed(x).mul(2) + x

    assert equal(job_of(call), "tp=2")


@pytest.mark.slow
def test_buffers_that_it_writes_follow_their_rule() -> None:
    def call(net: Net, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return normed(net.norm, x)

    for plan in ("pp=2,microbatches=2", "dp=2,tp=2"):
        assert equal(job_of(call, buffers={"norm.num*": "sum"}), plan)


def gradient_loss(model: Net, batch: dict[str, Tensor]) -> Tensor:
    x = batch["x"].requires_grad_()
    (gradient,) = torch.autograd.grad(model({**batch, "x": x}).sum(), x, create_graph=True)
    return gradient.square().mean()


def test_a_gradient_that_the_loss_takes_through_it_is_refused() -> None:
    refused(lambda net, x, batch: largest(x)[0], r"beside the leaf largest\(\)", loss=gradient_loss)


# 6


@pytest.mark.long
def test_modes_and_autocast_are_those_of_the_call() -> None:
    def call(net: Net, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            still = read(net.layers, x, batch["n"])
        return still.float() + x

    found = calls_of(capture(call))[0]
    assert all(found.modes)
    assert not found.results[0].requires_grad


# 7


@ml.leaf
def of_values(x: Tensor) -> Tensor:
    return x[x.sum((1, 2)) > 0].sum(0, keepdim=True).expand(int((x > 0).sum()), -1, -1)


@ml.leaf
def later(x: Tensor) -> Tensor:
    return x[:, : 2 if x.abs().max() > LIMIT[0] else LENGTH]


def test_shapes_that_depend_on_values_are_refused() -> None:
    text = refused(
        lambda net, x, batch: of_values(x).mean(0, keepdim=True),
        r"of_values \(.*\) cannot be one operator: the shapes that it returns depend on values",
    )
    assert "Or mark the function around it with @ml.leaf." in text


@pytest.mark.long
def test_a_shape_that_changes_later_is_an_error_of_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(lambda net, x, batch: later(x).mean(1, keepdim=True))
    with ml.Trainer(job, Plan.parse("tp=2"), devices="simulated") as trainer:
        batches = iter(trainer.batches())
        trainer.step(next(batches))
        monkeypatch.setattr(sys.modules[__name__], "LIMIT", [0.0])
        with pytest.raises(
            ChangedCallError,
            match=r"later \(.*\), a leaf, returned tensors of shapes .* Or mark the function around it",
        ):
            trainer.step(next(batches))


# 8


@ml.leaf
def draws(x: Tensor) -> Tensor:
    for _ in range(int(x.detach().abs().sum() * 1000) % 7):
        x = F.dropout(x)
    return x


@ml.leaf
def gathers(x: Tensor) -> Tensor:
    return ml.gather(x)[: len(x)]


@pytest.mark.parametrize("plan", [slow("tp=2"), slow("dp=2,pp=2,microbatches=2")])
def test_draws_belong_to_the_call(plan: str) -> None:
    def call(net: Net, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.dropout(noised(x, [batch["x"]]) + noised(x, [x]))

    assert equal(job_of(call), plan)


def test_as_many_draws_as_values_say_are_refused_where_something_draws_later() -> None:
    def call(net: Net, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.dropout(draws(x))

    refused(call, "how often it draws depends on values, and something after it draws, too")


def test_collectives_are_refused() -> None:
    refused(
        lambda net, x, batch: gathers(x),
        r"gathers \(.*\) cannot be one operator: meshloom.gather\(\) joins samples",
    )


# 9


@pytest.mark.slow
def test_metrics_and_losses_may_use_it() -> None:
    def metric(model: Net, batch: dict[str, Tensor]) -> Tensor:
        return largest(model(batch))[1]["mean"]

    def loss_with_one(model: Net, batch: dict[str, Tensor]) -> Tensor:
        return largest(model(batch) - batch["y"])[0].square().mean()

    job = job_of(reading, loss_with_one, evaluate=ml.Evaluate(data, {"mean": metric}, every=1))
    assert equal(job, "dp=2,pp=2")


# 10


@pytest.mark.long
def test_describe_says_its_share() -> None:
    (note,) = describe(Readings(job_of(reading))).opaque
    assert note.startswith(
        "read() runs as written, as one operator that is not divided: it is marked with @ml.leaf. It is "
    )


def test_a_line_that_cannot_be_captured_says_that_a_function_may_be_marked() -> None:
    def loss_of_values(model: Net, batch: dict[str, Tensor]) -> Tensor:
        found = loss(model, batch)
        return found * 2 if found > 1 else found

    refused(lambda net, x, batch: x, "a function marked with @ml.leaf", loss=loss_of_values)
