"""One rank reads the loss, the others receive the same program; what goes wrong on one is raised on all."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from captured import described
from jobs import make_job
from processes import on_ranks
from torch import Tensor, nn
from torch.utils.data import default_collate

from meshloom.comm.group import Group
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.torch.c10d import C10dGroup
from meshloom.comm.turns import in_turns
from meshloom.core.errors import CaptureError, MeshloomError
from meshloom.core.job import Job
from meshloom.program.run.execute import run_program
from meshloom.program.store import captured_loss as module
from meshloom.program.store import checked_capture
from meshloom.program.store.captured_loss import CapturedLoss

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]


def batches(count: int = 4, size: int = 6) -> list[Any]:
    data = make_job("mlp", "sgd").data()
    return [
        default_collate([data[(number * size + each) % 30] for each in range(size)])
        for number in range(count)
    ]


def read(programs: list[CapturedLoss], given: list[Any] | None, **settings: Any) -> list[Any]:
    """What `capture_together` returns on every simulated rank; batches on rank 0 alone."""
    groups = simulated_groups(len(programs))
    return in_turns(
        [
            partial(each.capture_together, group, [] if group.rank else [given or []], **settings)
            for each, group in zip(programs, groups, strict=True)
        ]
    )


def errors(programs: list[CapturedLoss], given: list[Any] | None) -> list[MeshloomError | None]:
    """What it raises on each of them."""

    def caught(each: CapturedLoss, group: Group) -> MeshloomError | None:
        try:
            each.capture_together(group, [] if group.rank else [given or []])
        except MeshloomError as error:
            return error
        return None

    groups = simulated_groups(len(programs))
    return in_turns([partial(caught, each, group) for each, group in zip(programs, groups, strict=True)])


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.slow
def test_all_ranks_have_the_program_that_rank_0_read(size: int):
    job = make_job("mlp", "sgd")
    programs = [CapturedLoss(job) for _ in range(size)]
    found = read(programs, batches())
    assert len({id(each) for each in found}) == size and len({each.digest() for each in found}) == 1
    assert described(found[-1]) == described(CapturedLoss(job).capture(batches()))
    model, batch = job.model(), batches()[0]
    values = [
        run_program(each, dict(model.named_parameters()), dict(model.named_buffers()), batch)
        for each in found
    ]
    assert all(torch.equal(each, values[0]) for each in values)


@pytest.mark.slow
def test_it_is_read_once_for_each_kind_of_batch_and_mode(monkeypatch: pytest.MonkeyPatch):
    captured: list[bool] = []
    built = checked_capture.comparable
    monkeypatch.setattr(
        checked_capture,
        "comparable",
        lambda build, device: captured.append(build.keywords["training"]) or built(build, device),
    )
    programs = [CapturedLoss(make_job("mlp", "sgd"), dtype=torch.float64) for _ in range(2)]
    first = read(programs, batches())
    assert all(one is other for one, other in zip(read(programs, batches()[2:]), first, strict=True))
    assert captured == [True]
    assert first[0].precision == torch.float64 and programs[1].get(batches()[3]) is first[1]
    # without values, as it is the first but for sizes
    assert read(programs, batches(size=4))[1] is not first[1] and captured == [True]
    assert not read(programs, batches(), training=False)[1].training and captured == [True, False]


def test_a_rank_that_lacks_the_program_receives_it():
    job = make_job("mlp", "sgd")
    alone, late = CapturedLoss(job), CapturedLoss(job)
    known = alone.capture(batches())
    found = read([alone, late], batches())
    assert found[0] is known and found[1].digest() == known.digest()


def job_of(forward: Any) -> Job:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    return Job(
        model=lambda: Model(7, 5),
        loss=lambda model, batch: forward(model(batch["x"])).sum(),  # outside of modules, which may be opaque
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        data=lambda: [0],
        batch_size=6,
        steps=1,
    )


def adds_to_gradients(y: Tensor) -> Tensor:
    y.sum().backward(retain_graph=True)
    return y


def fails(y: Tensor) -> Tensor:
    if torch.compiler.is_exporting():
        return y
    raise RuntimeError("the user's own\nmistake")


@pytest.mark.parametrize(
    ("forward", "given", "message"),
    [
        (
            adds_to_gradients,
            batches(),
            r"adds to the gradient of .*test_captured_loss.py",
        ),
        (
            fails,
            batches(),
            r"Capturing the loss failed at .*test_captured_loss.py:\d+ \(raise RuntimeError.*: RuntimeError: the user's own$",
        ),
        (lambda y: y, batches()[:1], "takes two batches of equal shapes, got 1"),
        (lambda y: y, None, "takes two batches of equal shapes, got 0"),
    ],
    ids=["refused", "fails", "one batch", "no batches"],
)
def test_an_error_on_rank_0_is_raised_on_all(forward: Any, given: Any, message: str):
    found = errors([CapturedLoss(job_of(forward)) for _ in range(3)], given)
    assert len({str(each) for each in found}) == 1 and all(isinstance(each, CaptureError) for each in found)
    with pytest.raises(CaptureError, match=message):
        raise found[0] or AssertionError


def test_an_error_on_another_rank_is_raised_on_all(monkeypatch: pytest.MonkeyPatch):
    unpack = module.unpack

    def fails_on_rank_2(data: bytes) -> Any:
        return unpack(data[:-1] if threading.current_thread().name == "rank 2" else data)

    monkeypatch.setattr(module, "unpack", fails_on_rank_2)
    found = errors([CapturedLoss(make_job("mlp", "sgd")) for _ in range(3)], batches())
    assert len({str(each) for each in found}) == 1
    assert "Rank 2 cannot use the program that rank 0 captured: These" in str(found[0])


def test_a_program_that_arrives_as_another_is_refused(monkeypatch: pytest.MonkeyPatch):
    unpack = module.unpack
    monkeypatch.setattr(module, "unpack", lambda data: replace(unpack(data), training=False))
    found = errors([CapturedLoss(make_job("mlp", "sgd")) for _ in range(2)], batches())
    assert all(
        "what rank 1 received has" in str(each) and "Use one version of meshloom and torch" in str(each)
        for each in found
    )


def read_on_a_rank() -> tuple[str, str, str]:
    """Text and hash of the program on this process, and what an unreadable loss raises."""
    import warnings

    import torch.distributed as dist

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    size = dist.get_world_size()
    process_group = dist.new_group(list(range(size)), backend="gloo", timeout=timedelta(seconds=60))
    assert isinstance(process_group, dist.ProcessGroup)
    group = C10dGroup(process_group, [f"rank {rank}" for rank in range(size)])
    given = batches() if group.rank == 0 else None
    program = CapturedLoss(make_job("mlp", "sgd")).capture_together(group, [given or []])
    with pytest.raises(CaptureError) as caught:
        CapturedLoss(job_of(adds_to_gradients)).capture_together(group, [given or []])
    return described(program), program.digest(), str(caught.value)


@pytest.mark.processes
def test_processes_have_the_program_that_rank_0_read():
    found = on_ranks(read_on_a_rank, 2)
    assert found[0] == found[1]
    program = CapturedLoss(make_job("mlp", "sgd")).capture(batches())
    assert found[0][:2] == (described(program), program.digest())
    assert "adds to the gradient of" in found[0][2]


class Dropped(nn.Module):
    """A model that computes a rate when it is built, as stochastic depth does: 0.9 in float32 is not 0.9."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.keep = torch.linspace(1.0, 0.9, 2)[1].item()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) / self.keep


def test_a_program_read_later_is_of_the_model_as_it_was_built():
    job = replace(
        make_job("mlp", "sgd"), model=Dropped, loss=lambda model, batch: model(batch["x"]).square().mean()
    )
    programs = CapturedLoss(job, dtype=torch.float64)
    torch.set_default_dtype(torch.float64)  # as verification has it when a chunk of new shapes comes
    try:
        program = programs.capture([{"x": torch.rand(2, 4)} for _ in range(2)])
    finally:
        torch.set_default_dtype(torch.float32)
    (division,) = [node for node in program.nodes if node.operator.startswith("div")]
    assert division.args[1] == Dropped().keep != 0.9
