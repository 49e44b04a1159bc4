"""Programs read by shapes alone are those that are read from batches, take no memory, and know a device that
is not there."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from captured import described
from program_jobs import OWN, batches_of, job_of
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import default_collate

from meshloom.core.errors import CaptureError, JobError
from meshloom.program.capture.capture import capture
from meshloom.program.capture.shapes import capture_shapes
from meshloom.program.run.execute import run_program
from tests.covering import slow
from tests.families import FAMILIES

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]

# What runs in the covering subset; the rest is `slow`.
COVERING_OWN = {"slice_writes", "autocast", "checkpointed", "tied", "parametrised", "noise"}


@pytest.mark.covering("slice_writes", "tied", "autocast")
@pytest.mark.parametrize("name", [name if name in COVERING_OWN else slow(name) for name in OWN])
def test_text_is_that_of_the_program_read_from_batches(name: str):
    job, batches = job_of(*OWN[name][:2]), batches_of(OWN[name])
    text = described(capture(job, (batches[0], batches[1])))
    program = capture_shapes(job, batches[0])
    assert program.by_shapes and described(program) == text


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.slow
def test_a_family_is_read_as_from_batches_or_refused_as_from_batches(name: str):
    job = FAMILIES[name].make_job(True)
    data = job.data()
    batches = [default_collate([data[each] for each in part]) for part in (range(3), range(3, 6))]
    try:
        text = described(capture(job, (batches[0], batches[1])))
    except CaptureError:
        # for the same reason, which has nothing to do with values
        with pytest.raises(CaptureError, match="Plans with dp and zero alone"):
            capture_shapes(job, batches[0])
    else:
        assert described(capture_shapes(job, batches[0])) == text


@pytest.mark.parametrize(("training", "dtype"), [(True, torch.float64), (False, torch.bfloat16)])
def test_mode_and_precision(training: bool, dtype: torch.dtype | None):
    job, batches = job_of(*OWN["in_place"][:2]), batches_of(OWN["in_place"])
    by_shapes = capture_shapes(job, batches[0], training=training, dtype=dtype)
    program = capture(job, (batches[0], batches[1]), training=training, dtype=dtype)
    assert (described(by_shapes), by_shapes.training, by_shapes.precision) == (
        described(program),
        training,
        dtype,
    )


def test_it_says_that_it_has_no_values_and_cannot_be_run():
    job, (batch, other) = job_of(*OWN["slice_writes"][:2]), batches_of(OWN["slice_writes"])
    program = capture_shapes(job, batch)
    assert program.constants and all(each.device.type == "meta" for each in program.constants.values())
    assert program.digest() != capture(job, (batch, other)).digest()
    model = job.model()
    with pytest.raises(
        CaptureError,
        match=r"was captured by shapes, so it cannot be run. Capture it from batches: capture\(job, batches\)",
    ):
        run_program(program, dict(model.named_parameters()), dict(model.named_buffers()), batch)


class Placed(nn.Module):
    """A model that puts itself on a GPU, in each of the ways to say so."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 6, device="cuda:1")
        self.second = nn.Linear(6, 5).cuda()
        with torch.device("cuda"):
            self.third = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.to("cuda")).to(torch.device("cuda", 1)) + torch.arange(6, device=x.device)
        return self.third(self.second(x.cuda()).to(device="cuda")) + torch.zeros(4, device="cuda")


@pytest.mark.covering("placed", "tied")
@pytest.mark.parametrize("name", ["recurrent", "tied", "placed"])
def test_a_device_that_is_not_there(name: str):
    model = OWN[name] if name in OWN else (Placed, OWN["tied"][1], OWN["recurrent"][2])
    job, batch = job_of(*model[:2]), batches_of(model)[0]
    program, here = capture_shapes(job, batch, device="cuda:0"), capture_shapes(job, batch)
    assert (program.device, here.device) == (torch.device("cuda:0"), torch.device("cpu"))
    assert described(program).replace("cuda:0", "cpu") == described(here)
    assert "cuda" not in described(here) and ("device=cuda:0" in described(program)) == (
        name in ("recurrent", "placed")
    )
    assert program.digest() != here.digest()


def test_autocast_on_a_device_that_is_not_there():
    class Casts(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                y = super().forward(x)
            with torch.autocast(x.device.type, torch.bfloat16), torch.autocast("cuda", enabled=False):
                return y * super().forward(x)

    job, batch = job_of(lambda: Casts(3, 2)), {"x": torch.ones(4, 3)}
    nodes = capture_shapes(job, batch, device="cuda:0").nodes
    assert [str(node) for node in nodes[0].outputs] == ["bfloat16[4, 2]"] and [
        str(node) for node in nodes[1].outputs
    ] == ["float32[4, 2]"]
    assert {region.device for node in nodes for region in node.context.autocast} == {"cuda"}
    here = capture_shapes(job, batch).nodes  # where a region for CUDA casts nothing
    assert [str(node) for node in here[0].outputs] == ["float32[4, 2]"]


def test_reading_leaves_generators_and_the_batch_alone():
    batch = batches_of(OWN["noise"])[0]
    before, states = batch["x"].clone(), (torch.get_rng_state(), random.getstate())
    capture_shapes(job_of(*OWN["noise"][:2]), batch)
    assert (
        torch.equal(batch["x"], before)
        and torch.equal(torch.get_rng_state(), states[0])
        and random.getstate() == states[1]
    )


class Large(nn.Module):
    """Every constructor idiom that looks at values, at a size at which there are none."""

    def __init__(self) -> None:
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        self.drop = nn.Dropout(rates[2])
        self.first = parametrizations.orthogonal(nn.Linear(300, 300))
        self.second = parametrizations.spectral_norm(nn.Linear(300, 300))
        self.third = parametrizations.weight_norm(nn.Linear(300, 300))
        nn.init.trunc_normal_(self.third.bias)
        self.embed = nn.Embedding(500, 300)
        self.head = nn.Linear(300, 500, bias=False)
        self.head.weight = self.embed.weight
        for tensor in (self.embed.weight, self.first.bias):
            nn.init.trunc_normal_(tensor, std=0.02)
        nn.init.orthogonal_(self.embed.weight)
        self.embed.weight.data[0].zero_()
        self.register_buffer("mask", torch.tril(torch.ones(300, 300)).bool(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.third(self.second(self.first(self.embed(x)))))
        return self.head(x.masked_fill(self.mask[: x.shape[1], :1], 0.0))


@pytest.mark.slow
def test_constructors_may_look_at_values():
    batch, other = {"x": torch.randint(500, (2, 5))}, {"x": torch.randint(500, (2, 5))}
    program = capture_shapes(job_of(Large), batch)
    assert program.parameters["embed.weight"].aliases == ("head.weight",)
    assert any(node.operator == "dropout" and node.args[1] == pytest.approx(0.2) for node in program.nodes)
    assert described(program) == described(capture(job_of(Large), (batch, other)))


class Looks(nn.Module):
    """It reads what it has drawn, in two ways, so it is built with values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(100, 100)
        self.scale = self.first.weight.std().item()
        self.largest = float(self.first.weight.detach().numpy().max())
        self.table = torch.arange(100.0) / 10

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * self.scale + self.largest + self.table


def test_what_a_constructor_reads_of_large_tensors_is_one_devices():
    job, batch = job_of(Looks), {"x": torch.ones(2, 100)}
    assert described(capture_shapes(job, batch)) == described(capture(job, (batch, batch)))


def test_what_a_program_would_freeze_is_refused():
    class Counts(nn.Linear):
        steps = 0

        def __init__(self) -> None:
            super().__init__(3, 2)
            self.steps = 0

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            return super().forward(x)

    with pytest.raises(CaptureError, match="reads steps at .* it was 0, and is 1 after a batch"):
        capture_shapes(job_of(Counts), {"x": torch.ones(4, 3)})
    with pytest.raises(CaptureError, match="holds no tensors"):
        capture_shapes(job_of(Counts), {"x": 3})
    with pytest.raises(JobError, match="returned a int"):
        capture_shapes(job_of(lambda: 3), {"x": torch.ones(4, 3)})


def test_threads_read_one_after_another():
    def work(number: int) -> str:
        job = job_of(lambda: nn.Linear(3, 2))
        return described(
            capture_shapes(job, {"x": torch.ones(4, 3)})
            if number % 2
            else capture(job, ({"x": torch.ones(4, 3)}, {"x": torch.zeros(4, 3)}))
        )

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(work, range(4)))) == 1
