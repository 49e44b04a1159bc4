"""Modules and tensors that were there before `Job(model=...)` is called: a backbone that the script has loaded, a table of
embeddings, anchors. All ranks of a process trained one backbone, or NaN was read in its place."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from meshloom.core.errors import JobError, TrainingError
from meshloom.core.job import Evaluate, Job
from meshloom.core.jobfile import load_job
from meshloom.core.modules.built import built
from meshloom.telemetry.progress import QUIET, Listener
from meshloom.train.trainer import Trainer
from tests.verified import equals_one_device, report_on


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def of(module: nn.Module) -> nn.Module:
    """With values that no default generator decides."""
    for number, each in enumerate(module.parameters()):
        each.data = drawn(*each.shape, seed=number) - 0.5
    return module


ARRAY = drawn(13, 9, seed=2).numpy()
SCALES = drawn(9, seed=3).numpy()
TABLE, ROWS = drawn(13, 9, seed=4), drawn(4, 9, seed=5)
WEIGHT = nn.Parameter(drawn(9, 9, seed=6))
BACKBONE = of(nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 9)))
COUNTS = torch.zeros(9)


@functools.lru_cache
def kept(size: int) -> Tensor:
    return torch.full((size,), 0.5)


class Net(nn.Module):
    def __init__(self, **parts: Any) -> None:
        super().__init__()
        self.table = parts.get("table", nn.Embedding(13, 9))
        self.body = parts.get("body", nn.Linear(9, 9))
        self.head = nn.Linear(9, 7)
        of(self.head)
        self.weight = parts.get("weight")
        for name in ("scale", "other", "counts"):
            if name in parts:
                self.register_buffer(name, parts[name])

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.body(self.table(x)))
        for name, buffer in list(self.named_buffers()):
            y = y * buffer.clone() if name == "scale" else y + (buffer.sum(0) if name == "other" else 0)
        if "counts" in self._buffers and self.training:
            self.counts.mul_(0.9).add_(y.detach().mean(0))
        return self.head(y if self.weight is None else y @ self.weight)


def embedding(values: Any) -> nn.Embedding:
    return nn.Embedding.from_pretrained(values, freeze=False)


def inside() -> dict[str, Any]:
    return {"table": embedding(TABLE.clone()), "body": of(nn.Linear(9, 9))}


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "an array's embeddings": lambda: {"table": embedding(torch.from_numpy(ARRAY)), "body": of(nn.Linear(9, 9))},
    "a tensor's embeddings": lambda: {"table": embedding(TABLE), "body": of(nn.Linear(9, 9))},
    "an array as a buffer": lambda: {**inside(), "scale": torch.as_tensor(SCALES)},
    "a tensor as a buffer": lambda: {**inside(), "scale": ROWS[0].contiguous(), "other": ROWS},
    "views as buffers": lambda: {**inside(), "scale": ROWS[1], "other": ROWS[1:3]},
    "a tensor that a function keeps": lambda: {**inside(), "scale": kept(9)},
    "a buffer that a forward changes": lambda: {**inside(), "counts": COUNTS},
    "a parameter": lambda: {**inside(), "weight": WEIGHT},
    "a module": lambda: {**inside(), "body": BACKBONE},
}  # fmt: skip
NETS = {name: of(Net(**make())) for name, make in KINDS.items() if name == "a module"}
MEMORY = [
    ARRAY,
    SCALES,
    TABLE,
    ROWS,
    WEIGHT.data,
    COUNTS,
    kept(9),
    *(each.data for each in BACKBONE.parameters()),
]


def values() -> list[np.ndarray]:
    return [np.asarray(each if isinstance(each, np.ndarray) else each.numpy()).copy() for each in MEMORY]


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def samples() -> list[dict[str, Tensor]]:
    xs = torch.randint(0, 13, (22,), generator=torch.Generator().manual_seed(8))
    return [{"x": x, "y": y} for x, y in zip(xs, drawn(22, 7, seed=9), strict=True)]


def job_of(model: Callable[[], nn.Module], loss: Any = loss_of, **more: Any) -> Job:
    return Job(
        model=model, data=samples, loss=loss, optimizer=lambda named: torch.optim.AdamW([each for _, each in named], lr=1e-2),
        batch_size=6, steps=8, evaluate=Evaluate(data=samples, metrics={"loss": loss_of}, every=2), **more,
    )  # fmt: skip


def losses_of(job: Job, plan: str) -> list[float]:
    with Trainer(job, plan, devices="simulated", listener=QUIET) as trainer:
        return [trainer.step(batch) for batch in trainer.batches()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "tp=2", "pp=2,microbatches=2"])
@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.slow
def test_ranks_in_one_process_have_copies_of_what_lies_outside_and_verification_converts_none(
    dtype: torch.dtype | None, plan: str, kind: str
):
    before = values()
    equals_one_device(job_of(lambda: Net(**KINDS[kind]())), plan, quick=False, dtype=dtype, steps=3)
    for was, now in zip(before, values(), strict=True):
        assert np.array_equal(was, now) and was.dtype == now.dtype


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "pp=2,microbatches=2", "dp=2,zero=3"])
@pytest.mark.slow
def test_a_model_that_a_script_has_built_is_trained_as_one_that_the_job_builds(plan: str):
    net = NETS["a module"]
    before = {name: each.clone() for name, each in net.state_dict().items()}
    expected = losses_of(job_of(lambda: of(Net(**KINDS["a module"]()))), "dp=1")
    assert losses_of(job_of(lambda: net), plan) == pytest.approx(expected, rel=1e-5)
    assert all(torch.equal(before[name], each) for name, each in net.state_dict().items())


@pytest.mark.long
def test_a_run_says_that_what_lies_outside_is_not_trained():
    told: list[str] = []
    listener = Listener(note=told.append, started=lambda text: None)
    net = NETS["a module"]
    for model in (lambda: net, lambda: of(Net(**KINDS["an array as a buffer"]()))):
        with Trainer(job_of(model), "dp=2", devices="simulated", listener=listener) as trainer:
            trainer.fit()
    assert [each for each in told if "what lies outside stays as it is" in each] == [told[0]]
    assert told[0].startswith("Job(model=...) returns parameters from outside of it (table.weight is one)")


def test_a_model_that_the_function_makes_is_as_it_was_made():
    made: list[nn.Module] = []

    def model() -> nn.Module:
        net = nn.Sequential(nn.LSTM(3, 4, num_layers=2), nn.BatchNorm1d(4))
        net.table = net[1].running_mean  # the same tensor at two places
        made.append(net)
        return net

    found = built(model)
    assert found is made[0] and found.table is found[1].running_mean
    weights = [id(each) for each in made[0][0].parameters()]
    assert [id(each) for each in found[0].parameters()] == weights


def test_what_a_function_makes_and_keeps_may_be_returned_once():
    made: list[nn.Module] = []

    def model() -> nn.Module:
        if not made:
            made.append(nn.Sequential(nn.Linear(3, 2), nn.Tanh()))
        return nn.Sequential(made[0], nn.Linear(2, 2))

    assert built(model)[0] is made[0]
    with pytest.raises(JobError, match=r"returned the same module twice \(0\), which it made the first time"):
        built(model)


def test_a_tensor_from_where_nobody_looks_may_be_returned_once():
    hidden = itertools.repeat(torch.ones(9))

    def model() -> nn.Module:
        return Net(**inside(), scale=next(hidden))

    assert built(lambda: built(model)).scale is next(hidden)
    with pytest.raises(JobError, match=r"returned the same tensor twice \(scale\)"):
        built(model)


def test_what_is_tied_or_overlaps_stays_so():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("all", ROWS)
            self.register_buffer("first", ROWS[0])
            self.again = self.all
            self.last = ROWS[-1]

    found = built(Tied)
    assert found.all is not ROWS and torch.equal(found.all, ROWS) and found.again is found.all
    found.all.zero_()
    assert not found.first.any() and not found.last.any() and ROWS.all()


def test_hooks_of_a_models_parameters_are_copied():
    net = of(nn.Sequential(nn.Linear(3, 2), nn.Tanh()))
    net[0].weight.register_hook(lambda gradient: gradient * 2)
    found = built(lambda: net)
    found(torch.ones(1, 3)).sum().backward()
    net(torch.ones(1, 3)).sum().backward()
    assert found is not net
    assert torch.equal(found[0].weight.grad, net[0].weight.grad)


def test_a_hook_that_refers_to_the_first_module_is_refused():
    net = of(nn.Sequential(nn.Linear(3, 2), nn.Tanh()))
    net[1].register_forward_hook(lambda module, inputs, output: output + net[0].bias)
    with pytest.raises(JobError, match=r"All of the model lies outside .* of 1 would refer to the first one"):
        built(lambda: net)


def test_what_cannot_be_copied_is_refused():
    net = nn.Sequential(nn.Linear(3, 2))
    net.computed = net[0].weight * 2
    with pytest.raises(
        JobError, match=r"lies outside of Job.* cannot be copied \(.*Let the function build it"
    ):
        built(lambda: net)


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "tp=2"])
@pytest.mark.covering("dp=2", "tp=2")
def test_a_loss_that_reads_what_it_trains_from_outside_is_refused(plan: str):
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return loss_of(model, batch) + BACKBONE[0].weight.square().mean()

    with pytest.raises(JobError, match=r"The loss reads body.0.weight from outside"):
        losses_of(job_of(lambda: Net(**KINDS["a module"]()), loss), plan)


@pytest.mark.parametrize("plan", ["dp=1", "dp=2"])
@pytest.mark.long
def test_a_loss_may_read_a_tensor_outside_that_nothing_changes(plan: str):
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return loss_of(model, batch) + ROWS.mean()

    found = losses_of(job_of(lambda: Net(**KINDS["a tensor as a buffer"]()), loss), plan)
    expected = losses_of(job_of(lambda: Net(**KINDS["a tensor as a buffer"]())), "dp=1")
    assert found == pytest.approx([each + float(ROWS.mean()) for each in expected], rel=1e-5)


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "pp=2,microbatches=2"])
@pytest.mark.slow
def test_a_loss_that_reads_a_buffer_from_outside_is_told_when_the_step_changes_it(plan: str):
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return loss_of(model, batch) + COUNTS.mean()

    with pytest.raises(
        TrainingError, match=r"The first step has changed the buffer counts, .* every rank has a copy"
    ):
        losses_of(job_of(lambda: Net(**KINDS["a buffer that a forward changes"]()), loss), plan)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "tp=2"])
@pytest.mark.slow
def test_other_initial_values_are_seen_in_the_first_step(plan: str):
    seeds = iter(range(100))  # other values at each call, where no seed of ours reaches

    def model() -> nn.Module:
        net = Net(**inside())
        net.head.weight.data = torch.from_numpy(
            np.random.default_rng(next(seeds)).normal(size=(7, 9))
        ).float()
        return net

    report = report_on(job_of(model), plan, steps=3, dtype=None)
    assert report.first_wrong is not None and report.first_wrong.step == 0


def test_a_files_draws_are_the_same_in_each_process(tmp_path: Path):
    file = tmp_path / "drawn.py"
    file.write_text(
        "import random, numpy, torch, meshloom\n"
        "VALUES = [float(torch.rand(1)), random.random(), float(numpy.random.rand())]\n"
        "job = meshloom.Job(model=lambda: torch.nn.Linear(2, 2), data=lambda: VALUES, loss=print, optimizer=print, batch_size=1, steps=1)\n"
    )
    before = torch.get_rng_state()
    found = [load_job(str(file)) for _ in range(2)]
    assert found[0].data() == found[1].data() and len(set(found[0].data())) == 3
    assert torch.equal(before, torch.get_rng_state())
