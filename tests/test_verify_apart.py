"""One device in a process of its own says what it says in this one, and this one never has it."""

from __future__ import annotations

import io
import os
import pickle
import signal
import socket
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshloom.core.errors import DeviceError, MeshloomError
from meshloom.core.job import Job
from meshloom.core.jobfile import load_job
from meshloom.core.plan import Plan
from meshloom.verify import comparison_run
from meshloom.verify.apart import ReferenceProcess, receive, send, to_send
from meshloom.verify.run import verify
from tests.verified import report_on

pytestmark = pytest.mark.long

FILE = str(Path(__file__).with_name("job_file.py"))
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
    SPARSE = [
        torch.eye(3).to_sparse(), torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.ones(2, 2), (4, 2), check_invariants=True),
    ]  # fmt: skip
TENSORS = [
    torch.randn(3, 5), torch.randn(4, 6).t(), torch.tensor(2.5), torch.empty(0, 3), torch.ones(2, 2, dtype=torch.bool),
    torch.randn(3, dtype=torch.bfloat16), torch.randn(2, dtype=torch.complex64), torch.randn(2, requires_grad=True),
    *SPARSE,
]  # fmt: skip


def answered(value: Any) -> Any:
    here, there = socket.socketpair()
    with here, there, here.makefile("wb") as writer, there.makefile("rwb") as reader:
        send(writer, value)
        return receive(reader)


@pytest.mark.parametrize("number", range(len(TENSORS)))
def test_tensors_arrive_as_they_are(number: int) -> None:
    sent = TENSORS[number]
    name, found, rest = answered(("weight", sent, {"also": [sent, None]}))
    assert name == "weight" and rest["also"][1] is None
    for each in (found, rest["also"][0]):
        assert (each.dtype, each.shape, each.layout) == (sent.dtype, sent.shape, sent.layout)
        if sent.is_sparse:
            assert each.is_coalesced() == sent.is_coalesced()
            assert torch.equal(each.to_dense(), sent.to_dense())
        else:
            assert torch.equal(each, sent.detach())
    assert not found.requires_grad


def test_tensors_are_not_part_of_the_pickle() -> None:
    """So that they are not copied on the way."""
    stream = io.BytesIO()
    send(stream, torch.zeros(1000))
    stream.seek(0)
    values, tensor = pickle.load(stream)
    assert values < 1000 and tensor == 4000


def test_an_end_that_is_gone_is_said() -> None:
    here, there = socket.socketpair()
    stream = here.makefile("rwb")
    here.close()
    there.close()
    with pytest.raises(EOFError):
        receive(stream)
    with pytest.raises(BrokenPipeError):
        send(stream, torch.zeros(10))
    with pytest.raises(BrokenPipeError):
        stream.close()


class _TwoNumbers(Exception):  # noqa: N818
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_errors_are_raised_elsewhere_with_what_they_say() -> None:
    found = answered(to_send(DeviceError("not enough")))
    assert type(found) is DeviceError and str(found) == "not enough"
    found = answered(to_send(_TwoNumbers(1, 2)))  # it cannot be unpickled
    assert type(found) is MeshloomError and str(found) == "One device fails with _TwoNumbers: 1 and 2"


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReferenceProcess]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    command = [sys.executable, "-m", "meshloom", "verify", FILE, "--plan", "dp=1"]
    with ReferenceProcess(command) as process:
        yield process


def the_job() -> Job:
    job = load_job(FILE)
    assert job is not None
    return job


@pytest.mark.processes
def test_the_verdict_is_the_same_and_no_rank_has_one_device(
    apart: ReferenceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a second run that follows, and of a gradient that is wrong."""
    plan = Plan.parse("dp=2,zero=1")
    wanted = verify(the_job(), plan, devices="simulated", quick=False)
    wrong = _planted(monkeypatch)
    wanted_wrong = verify(the_job(), plan, devices="simulated")
    monkeypatch.setattr(comparison_run, "Reference", lambda *_: pytest.fail("one device is here"))
    found_wrong = verify(the_job(), plan, devices="simulated", compare=apart.compare)
    wrong.undo()
    found = report_on(the_job(), plan, quick=False, compare=apart.compare, steps=3, dtype=None)
    assert wanted and wanted_wrong and found_wrong
    assert found.passed and found.between and not found_wrong.passed
    assert [*found.records()] == [*wanted.records()]
    assert [*found_wrong.records()] == [*wanted_wrong.records()]
    assert found_wrong.differing and wanted_wrong.differing
    assert torch.equal(found_wrong.differing.one_device, wanted_wrong.differing.one_device)


def _planted(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Gradients are multiplied by three before the plan's are compared and used."""
    patch = pytest.MonkeyPatch()
    from meshloom.exchange.sharded import Sharded

    real = Sharded.finish

    def finish(exchange: Sharded, weight: Any) -> Any:
        found: list[Tensor | None] = real(exchange, weight)
        return [each if each is None else each * 3 for each in found]

    patch.setattr(Sharded, "finish", finish)
    return patch


@pytest.mark.processes
def test_a_process_that_was_killed_is_one_sentence(apart: ReferenceProcess) -> None:
    os.kill(apart._process.pid, signal.SIGKILL)
    with pytest.raises(DeviceError) as failure:
        verify(the_job(), Plan.parse("dp=2"), devices="simulated", compare=apart.compare)
    assert str(failure.value) == (
        "The process of one device, which the plan is compared with, was killed by SIGKILL (the system does that when memory runs out). It holds the whole model: "
        "verify the same job with fewer layers, or where there is more memory."
    )
