"""A run that cannot fit into memory is refused before it starts, with the numbers and with plans that would fit."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import meshloom as ml
from meshloom.core.errors import PlanError
from meshloom.core.plan import Plan
from meshloom.planner.fitting import (
    Limit,
    StateBytes,
    least_bytes,
    nearby,
    predicted_ranks,
    state_bytes,
    too_much,
)
from meshloom.planner.memory import rank_memory
from meshloom.planner.readings import Readings
from meshloom.train import memory_check
from tests.live_bytes import Blocks, blocks_job

PARAMETERS = sum(each.nbytes for each in Blocks().parameters())


def steps(job: ml.Job, plan: str, **settings: Any) -> float:
    with ml.Trainer(job, plan, devices="simulated", cache="off", **settings) as trainer:
        return [trainer.step(batch) for batch in trainer.batches()][-1]


@pytest.fixture
def no_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding plans that fit takes longer than refusing."""
    monkeypatch.setattr(memory_check, "offers_for", lambda *given, **settings: [])


@pytest.mark.usefixtures("silent_export")
@pytest.mark.slow
def test_a_model_that_does_not_fit_is_refused_with_plans_that_do():
    # 4 x parameters without activations; with zero=3 two, two units and activations
    limit = int(3.5 * PARAMETERS)
    with pytest.raises(PlanError) as refused:
        steps(blocks_job(batch_size=2), f"dp=2,memory_bytes={limit}")
    text = str(refused.value)
    assert re.match(r"dp=2,memory_bytes=\d+ does not fit: its fullest rank holds 1\.44 MiB at least \(parameters 369 KiB, gradients 369 KiB, "
                    r"optimizer 738 KiB, without activations\), and the limit of a rank \(memory_bytes\) is 1\.26 MiB\. ", text)  # fmt: skip
    offers = re.findall(r"(dp=\S+) \(\S+ .iB a rank\)", text)
    assert len(offers) == 3 and "--overcommit" in text
    # what is offered runs, and is predicted to fit
    for offer in offers:
        readings = Readings(blocks_job(batch_size=2))
        assert all(
            each.peak <= limit for each in predicted_ranks(readings, Plan.parse(offer), one_copy=False)
        )
        assert steps(blocks_job(batch_size=2), offer) > 0


@pytest.mark.usefixtures("no_offers")
def test_the_user_may_run_it_all_the_same_and_what_fits_is_not_looked_at():
    asked: list[int] = []

    def optimizer(named: Any) -> torch.optim.Optimizer:
        asked.append(len(named))
        return torch.optim.SGD(named, lr=0.1)

    job = replace(blocks_job(batch_size=2), optimizer=optimizer)
    with pytest.raises(PlanError, match="does not fit"):
        steps(job, f"dp=1,memory_bytes={PARAMETERS}")
    expected, asked[:] = steps(job, "dp=1"), []
    assert steps(job, f"dp=1,memory_bytes={PARAMETERS}", overcommit=True) == expected
    assert len(asked) == 1  # the job's functions are called as often as without a limit


@pytest.mark.on_cpu
@pytest.mark.usefixtures("no_offers")
@pytest.mark.long
def test_the_host_is_shared_by_its_ranks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory_check, "total_bytes", lambda: 6 * PARAMETERS)
    job = blocks_job(batch_size=2)
    assert steps(job, "dp=1") > 0  # 4 x
    with pytest.raises(
        PlanError, match=r"the 2 ranks of the host 2\.88 MiB, and the memory of this host is 2\.16 MiB"
    ):
        steps(job, "dp=2")


@pytest.mark.on_cpu
@pytest.mark.usefixtures("silent_export", "no_offers")
@pytest.mark.parametrize(
    ("plan", "ranks"),
    [("pp=2,microbatches=2,schedule=gpipe", 2), ("tp=5", 5), ("pp=2,tp=5,schedule=gpipe,microbatches=2", 10)],
)
@pytest.mark.slow
def test_activations_count_where_the_loss_is_captured(plan: str, ranks: int, monkeypatch: pytest.MonkeyPatch):
    # parameters, gradients and state fit, and what a forward saves does not
    job = blocks_job(batch_size=64)
    monkeypatch.setattr(memory_check, "total_bytes", lambda: 6 * PARAMETERS)
    message = rf"optimizer \S+ KiB, activations \S+ [KM]iB\), the {ranks} ranks of the host"
    with pytest.raises(PlanError, match=message):
        steps(job, plan)


@pytest.mark.on_cpu
@pytest.mark.parametrize(("times", "returned"), [(33.0, False), (31.0, True)])
@pytest.mark.long
def test_freed_memory_is_returned_where_the_host_has_less_than_four_times_what_ranks_hold(
    times: float, returned: bool, monkeypatch: pytest.MonkeyPatch
):
    calls: list[bool] = []
    monkeypatch.setattr(memory_check, "return_freed_memory", lambda: calls.append(True))
    monkeypatch.setattr(
        memory_check, "free_bytes", lambda: int(times * PARAMETERS)
    )  # two ranks: 8 x at least
    assert steps(blocks_job(batch_size=2), "dp=2", overcommit=True) > 0
    assert calls == [True] * (2 if returned else 0)  # each rank on its own


def test_what_is_refused_exceeds_the_limit_by_a_tenth():
    needs = [{"parameters": 60}, {"parameters": 48}]
    assert not too_much(needs, Limit(num_bytes=100, source="", is_shared=True))
    assert too_much(needs, Limit(num_bytes=98, source="", is_shared=True))
    assert not too_much(needs, Limit(num_bytes=55, source="")) and too_much(
        needs, Limit(num_bytes=54, source="")
    )


@pytest.mark.parametrize(
    ("text", "one_copy", "expected"),
    [
        ("dp=2", False, (8, 8, 16)),
        ("dp=2", True, (4, 8, 8)),
        ("dp=2,zero=1", False, (8, 8, 8)),
        ("dp=2,zero=2", False, (8, 4, 8)),
        ("dp=2,zero=3", False, (4, 4, 8)),
        ("pp=2,tp=2", False, (2, 2, 4)),
    ],
)
def test_the_least_that_a_rank_holds(text: str, one_copy: bool, expected: tuple[int, ...]):
    named = [("w", torch.nn.Parameter(torch.zeros(2)))]
    state = StateBytes(total=16)
    assert tuple(least_bytes(Plan.parse(text), named, state, one_copy=one_copy).values()) == expected


@pytest.mark.parametrize(
    ("text", "one_copy", "expected"),
    [
        ("dp=2", True, (8, 8, 16)),
        ("dp=2,zero=1", False, (8, 8, 16)),
        ("dp=2,zero=3", False, (4 + 8, 4 + 8, 16)),
        ("tp=2", False, (4 + 8, 4 + 8, 16)),
    ],
)
def test_what_an_optimizer_gathers_counts_on_every_rank(text: str, one_copy: bool, expected: tuple[int, ...]):
    named = [("w", torch.nn.Parameter(torch.zeros(2)))]
    state = StateBytes(total=16, gathered=8, of_gathered=16)
    assert tuple(least_bytes(Plan.parse(text), named, state, one_copy=one_copy).values()) == expected


def test_state_is_found_without_values_and_unknown_where_they_are_read():
    named = list(Blocks().named_parameters())
    assert state_bytes(blocks_job(), named) == StateBytes(total=2 * PARAMETERS)

    def reads(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(named, lr=float(named[0][1].sum()))

    assert state_bytes(replace(blocks_job(), optimizer=reads), named) is None


def test_nearby_plans_have_as_many_ranks_and_change_the_least_first():
    found = list(nearby(Plan(dp=4)))
    assert {each.mesh.size for each in found} == {4} and len(found) == len(set(found))
    assert [str(each) for each in found[:3]] == ["dp=4,zero=1", "dp=4,zero=2", "dp=4,zero=3"]
    assert any(each.pp == 2 and each.tp == 2 for each in found)
    assert Plan(dp=4, offload="optimizer") in found
    assert not any(
        each.dp == 4 and each.zero == 0 and each.offload == "none"
        for each in nearby(Plan(dp=4, offload="optimizer"))
    )


def test_offloaded_state_is_not_what_ranks_hold_at_least():
    named = list(Blocks().named_parameters())
    needs = {
        plan: least_bytes(Plan.parse(plan), named, StateBytes(total=2 * PARAMETERS), one_copy=False)
        for plan in ("dp=2", "dp=2,offload=optimizer")
    }
    assert needs["dp=2"]["optimizer"] == 2 * PARAMETERS
    assert needs["dp=2,offload=optimizer"] == {**needs["dp=2"], "optimizer": 0}


@pytest.mark.slow
@pytest.mark.usefixtures("silent_export")
def test_state_that_alone_does_not_fit_is_offered_to_be_offloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Parameters, gradients and activations fit, two averages beside them do not."""
    monkeypatch.setattr(rank_memory, "WINDOW_BYTES", 4096)
    limit, job = f"memory_bytes={int(3.5 * PARAMETERS)}", blocks_job(batch_size=3)
    with pytest.raises(PlanError, match=r"Predicted to fit: dp=1,offload=optimizer,memory_bytes="):
        steps(job, f"dp=1,{limit}")
    assert steps(job, f"dp=1,offload=optimizer,{limit}", out=tmp_path) > 0
