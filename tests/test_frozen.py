"""What a program would freeze is refused, in one sentence that names the line and the way out."""

from __future__ import annotations

import inspect
import random
import re
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from jobs import make_job
from torch import Tensor, nn
from torch.utils.data import default_collate

from meshloom.core.errors import CaptureError
from meshloom.core.plan import Plan
from meshloom.program.capture.capture import capture, capture_module
from meshloom.program.run.execute import run_program
from meshloom.program.trace.frozen import line_that_changes
from meshloom.verify.run import verify

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]


class Plain(nn.Module):
    """A layer, and something around it that a subclass does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.inner = nn.Sequential(nn.Dropout(0.1))
        self.previous = torch.zeros(3)
        self.register_buffer("seen", torch.zeros(3))


class Python(Plain):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y * random.random()  # here


class Numpy(Plain):
    def forward(self, x: Tensor) -> Tensor:
        noise = numpy.random.standard_normal(3)  # here
        return self.layer(x) + torch.from_numpy(noise).float()


class LayerDrop(Plain):
    def forward(self, x: Tensor) -> Tensor:
        if random.uniform(0, 1) > 0.001:  # here
            x = self.layer(x)
        return self.layer(x)


class Switch(Plain):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.inner.eval()  # here
        return self.inner(y)


class Depends(Plain):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if y.mean() > 0:  # here
            return y
        return -y


class Checks(Plain):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if torch.isnan(y).any():  # here
            raise ValueError("NaN")
        return y


class Item(Plain):
    def forward(self, x: Tensor) -> Tensor:
        rows = int((x > 0).sum())  # here
        return self.layer(x)[:rows]


class Sizes(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[x > 0]  # here


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient / gradient.norm()


class Normalises(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return Own.apply(self.layer(x))  # here


class WritesParameter(Plain):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layer.weight.clamp_(-1, 1)  # here
        return self.layer(x)


class WritesAttribute(Plain):
    def forward(self, x: Tensor) -> Tensor:
        self.previous.mul_(0.9).add_(x.mean(0))  # here
        return self.layer(x) + self.previous


class OtherBuffer(Plain):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.mean(0)])
        return self.layer(x)


class WritesStrided(Plain):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) * 1
        y.as_strided((2, 2), (1, 2)).zero_()  # here
        return y


REFUSED: dict[type[Plain], str] = {
    Python: "draws from random .* Write torch.rand",
    Numpy: "draws from numpy.random .* Write torch.rand",
    LayerDrop: "draws from random .* Write torch.rand",
    Switch: "switches inner between training and evaluation",
    Depends: "depends on the values in the batch .* torch.where",
    Checks: "depends on the values in the batch .* leave out what only checks values",
    Item: "depends on the values in the batch",
    Sizes: "shape of the result of aten.index.Tensor .* depends on the values in the batch",
    Normalises: "Own.apply at .* has a custom backward",
    WritesParameter: "clamp_ at .* writes to parameter layer.weight in the forward",
    WritesAttribute: "writes to a tensor that is an attribute but not a buffer",
    WritesStrided: "writes through as_strided",
}


def line_marked(kind: type) -> int:
    """The line of `kind`'s forward that ends in `# here`."""
    lines, start = inspect.getsourcelines(kind)
    return start + next(number for number, line in enumerate(lines) if line.rstrip().endswith("# here"))


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_refused_with_the_line(kind: type[Plain]):
    batches = torch.randn(5, 3), torch.randn(5, 3)
    generators = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    with pytest.raises(CaptureError) as refused:
        capture_module(kind(), lambda model, batch: model(batch).sum(), batches)
    message = str(refused.value)
    assert re.search(REFUSED[kind], message), message
    assert f"test_frozen.py:{line_marked(kind)} " in message, message
    assert "Plans with dp and zero alone run the module as it is" in message and "\n" not in message
    assert refused.value.exit_code == 2
    assert generators[1] == random.getstate() and generators[2] == numpy.random.get_state()[1].tolist()


def test_a_buffer_that_grows_is_refused():
    with pytest.raises(
        CaptureError,
        match=r"replaces the buffer seen of OtherBuffer, of shape \[3\], by one of shape \[6\].*keeps its shape",
    ):
        capture_module(
            OtherBuffer(), lambda model, batch: model(batch).sum(), (torch.randn(5, 3), torch.randn(5, 3))
        )


def test_a_tensor_left_in_an_attribute_for_the_loss_is_read():
    class Auxiliary(Plain):
        auxiliary: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.auxiliary = x.square().sum()
            return self.layer(x)

    def loss(model: Any, batch: Tensor) -> Tensor:
        return model(batch).sum() + model.auxiliary

    model = Auxiliary()
    program = capture_module(model, loss, (torch.randn(5, 3), torch.randn(5, 3)))
    batch = torch.randn(5, 3)
    assert model.auxiliary is None
    assert torch.equal(run_program(program, dict(model.named_parameters()), {}, batch), loss(model, batch))


class Logs(Plain):
    """As modules for Lightning do: what was computed is kept for later, in a dictionary and in a list inside
    of one."""

    def __init__(self, inputs: int = 3, outputs: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)
        self.logged: dict[str, Any] = {}
        self.outputs: dict[str, list[Tensor]] = {"train": []}

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        self.logged["mean"] = out.mean().detach()
        self.outputs["train"].append(out.detach())
        return out


def test_a_log_of_tensors_in_containers_is_no_harm_and_holds_nothing_afterwards():
    """It ended in "'NoneType' object does not support item assignment": an attribute that held tensors was no
    plain value any more, so None was put there."""
    model = Logs()
    model.logged["before"] = torch.ones(1)
    logged, outputs = dict(model.logged), model.outputs["train"]
    program = capture_module(
        model, lambda model, batch: model(batch).sum(), (torch.randn(5, 3), torch.randn(5, 3))
    )
    assert [node.operator for node in program.nodes] == ["linear", "sum"]
    assert model.logged == logged and model.outputs == {"train": []} and not outputs


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tp=2", "pp=2"])
def test_a_model_that_reads_what_an_earlier_forward_logged_is_refused(plan: str):
    class Contrasts(Logs):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out * self.outputs["train"][0].sum()

    class Smooths(Logs):
        def forward(self, x: Tensor) -> Tensor:
            before = self.logged.get("mean", 1.0)
            return super().forward(x) * before

    for model in (Contrasts, Smooths):
        job = replace(make_job("mlp", "sgd"), model=lambda model=model: model(7, 5))
        with pytest.raises(CaptureError, match="differs from the model"):
            verify(job, Plan.parse(plan), devices="simulated", steps=2, dtype=torch.float64)


def test_branch_of_a_job_is_refused():
    job = make_job("branch", "sgd")
    batch = default_collate([job.data()[each] for each in range(6)])
    with pytest.raises(CaptureError, match=r"jobs\.py:\d+ \(layer = self\.positive if"):
        capture(job, (batch, batch))


def test_batches_of_two_shapes_are_refused():
    with pytest.raises(CaptureError, match=r"x is float32\[5, 3\] in one and float32\[4, 3\] in the other"):
        capture_module(
            Plain(), lambda model, batch: batch["x"].sum(), ({"x": torch.ones(5, 3)}, {"x": torch.ones(4, 3)})
        )


def test_line_that_changes_names_the_first_line():
    values: list[int] = []

    def change() -> None:
        values.clear()
        values.append(1)  # this one
        values.append(2)

    line = line_that_changes(change, lambda: list(values))
    assert line is not None and line.text == "values.append(1)  # this one"
