"""What describe says of stages is what R4.2's formula and the stages themselves say; what it offers is as it
says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import meshloom as ml
from meshloom.cli.main import main
from meshloom.core.errors import PlanError
from meshloom.machine.machine import Machine, example_machine, save
from meshloom.planner.readings import Readings
from meshloom.planner.staged_plan import StagePlan, staged
from meshloom.report.stages import lines_of
from tests.test_describe import FILE, Stack, job_of

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export", "unmeasured")]
MACHINE = example_machine()
# Calls of no time, as every operator of a model this small would take as long as any other.
FAST = replace(MACHINE, operations=tuple(replace(each, points=((1e-3, 1e-12), (1e9, 1.0))) for each in MACHINE.operations), call_seconds=1e-12,
               backward_call_seconds=1e-12, links=tuple(replace(each, latency_seconds=0.0, bytes_per_second=1e12) for each in MACHINE.links))  # fmt: skip


def plan(text: str) -> ml.Plan:
    return ml.Plan.parse(text)


def staged_of(job: ml.Job, plan: ml.Plan, machine: Machine | None = None) -> StagePlan:
    return staged(Readings(job), plan, machine=machine)


@pytest.mark.slow
def test_traffic_is_the_formula_for_even_and_uneven_microbatches():
    """s = 7 x 8 values a sample cross before a layer; b = 10 samples; both ways: C = s b 2, in float32. The
    tied weight is on both sides."""
    for text, sizes in (
        ("pp=2,microbatches=5,cuts=layers.2", (2,) * 5),
        ("pp=2,microbatches=4,cuts=layers.2", (3, 3, 2, 2)),
    ):
        found = staged_of(job_of(Stack, batch_size=10), plan(text), machine=MACHINE)
        assert found.sizes == sizes
        (only,) = found.traffic
        assert only.forward_bytes == only.backward_bytes == 7 * 8 * 10 * 4
        parameters = {
            name: each.numel() for name, each in Stack().named_parameters() if not name.startswith("spare")
        }
        first = sum(
            count for name, count in parameters.items() if name.startswith(("token", "layers.0", "layers.1"))
        )
        assert [each.parameters for each in found.choice.stages] == [
            first,
            sum(parameters.values()) - first + parameters["token.weight"],
        ]


@pytest.mark.slow
def test_half_of_the_replicas_send_half():
    whole, half = (
        staged_of(job_of(Stack), plan(f"dp={dp},pp=2,microbatches=2,cuts=layers.2"), machine=MACHINE).traffic
        for dp in (1, 2)
    )
    assert whole[0].num_bytes == 2 * half[0].num_bytes


def test_what_a_rank_holds_is_its_state_and_what_is_in_flight():
    found = staged_of(job_of(Stack, batch_size=8), plan("pp=2,microbatches=4,cuts=layers.2"), machine=MACHINE)
    assert found.in_flight == (2, 1)
    for rank, stage in enumerate(found.choice.stages):
        assert (
            found.choice.rank_bytes[rank]
            == 4 * stage.parameter_bytes + found.in_flight[rank] * stage.kept_bytes
        )
    # Of 2 x 7 tokens the second stage keeps: its input [8], before and after gelu [16] in four layers, the
    # three sums between them and the head's input [8].
    layers = 2 * 7 * 4 * (8 + 4 * (16 + 16) + 3 * 8 + 8)
    assert (
        layers <= found.choice.stages[1].kept_bytes <= layers + 2 * 7 * 4 * 11 + 16
    )  # and the loss: log-probabilities of 11 tokens, a sum of weights


@pytest.mark.slow
def test_offers_are_what_is_found_when_they_are_taken():
    found = staged_of(job_of(Stack, batch_size=16), plan("pp=3,microbatches=2"), machine=FAST)
    assert found.better
    for each in found.better:
        setting, _, value = each.setting.partition("=")
        taken = staged_of(
            job_of(Stack, batch_size=16),
            replace(found.plan, **{setting: value if setting == "schedule" else int(value)}),
            machine=FAST,
        )
        assert taken.simulated.seconds == each.seconds < 0.97 * found.simulated.seconds
        assert max(taken.choice.rank_bytes) == each.rank_bytes
        assert taken.simulated.idle_share == each.idle_share
    assert {"microbatches", "schedule"} <= {each.setting.partition("=")[0] for each in found.better}


@pytest.mark.slow
def test_nothing_is_offered_that_does_not_fit():
    free = staged_of(job_of(Stack, batch_size=16), plan("pp=3,microbatches=8"), machine=FAST)
    offered = max(each.rank_bytes for each in free.better)
    limit = max(free.choice.rank_bytes)
    assert offered > limit
    bound = staged_of(job_of(Stack, batch_size=16), replace(free.plan, memory_bytes=limit), machine=FAST)
    assert all(each.rank_bytes <= limit for each in bound.better)


@pytest.mark.slow
def test_where_calls_take_all_the_time_no_more_microbatches_are_offered():
    """An operator of the example machine takes 1 us, however small: as many more of them as there are
    microbatches."""
    found = staged_of(job_of(Stack, batch_size=16), plan("pp=2,microbatches=4"), machine=MACHINE)
    assert not any(each.setting in ("microbatches=8", "microbatches=16") for each in found.better)


@pytest.mark.slow
def test_describe_prints_stages_and_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    save(MACHINE, tmp_path / "machine.json")
    words = [
        "describe",
        FILE,
        "--plan",
        "pp=2,microbatches=2,cuts=layers.2",
        "--machine",
        str(tmp_path / "machine.json"),
    ]
    assert main([*words, "--json", str(tmp_path / "records")]) == 0
    printed = capsys.readouterr().out
    assert (
        "2 stages on pp=2 ranks, 1f1b, 2 microbatches of 2 samples; seconds: measured on example" in printed
    )
    rows = re.findall(
        r"^ +(\d) +(\d)  (token \.\. layers\.1|layers\.2\.up \.\. head) +\S+ us +\S+ us +\S+ +\S+ KiB +x (\d) +(\S+.*)$",
        printed,
        re.MULTILINE,
    )
    assert [row[:4] for row in rows] == [
        ("0", "0", "token .. layers.1", "2"),
        ("1", "1", "layers.2.up .. head", "1"),
    ]
    assert re.search(r"^balance: stage 1 is the slowest, \d+\.\d% above the mean$", printed, re.MULTILINE)
    assert "sent in a step: stage 0 -> 1 896 B, back 896 B" in printed
    assert re.search(
        r"^a step takes \S+ [mu]s \(without exchange and update\); ranks wait \d+\.\d% of it \(\d+%, \d+%\), and would wait 33\.3% if ",
        printed,
        re.MULTILINE,
    )
    *_, record, ranks = map(json.loads, (tmp_path / "records").read_text().splitlines())
    # and the tied weight
    assert ranks["event"] == "ranks" and [each["num_bytes"]["pp"] for each in ranks["ranks"]] == 2 * [
        896 + 11 * 8 * 4
    ]
    assert record["event"] == "stages" and record["traffic"] == [
        {"source": 0, "destination": 1, "forward_bytes": 896, "backward_bytes": 896}
    ]
    assert [each["rank"] for each in record["stages"]] == [0, 1] and record["step_seconds"] > 0


@pytest.mark.slow
def test_default_rates_are_said_to_be_that(capsys: pytest.CaptureFixture[str]):
    text = "\n".join(
        lines_of(staged_of(job_of(Stack, batch_size=16), plan("pp=2,tp=2,microbatches=2,schedule=gpipe")))
    )
    assert (
        "seconds: default rates; meshloom calibrate measures this machine's; numbers are of whole stages, before they are divided over tp=2"
        in text
    )


@pytest.mark.slow
def test_what_cannot_be_cut_is_refused():
    with pytest.raises(PlanError, match="No cut into 2 stages fits into 1000 B a rank"):
        staged_of(job_of(Stack), plan("pp=2,memory_bytes=1000"), machine=MACHINE)
    torch.manual_seed(0)
    with pytest.raises(PlanError, match=r"cuts=layers.9: no module of that name runs"):
        staged_of(job_of(Stack), plan("pp=2,cuts=layers.9"), machine=MACHINE)
