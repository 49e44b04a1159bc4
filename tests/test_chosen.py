"""What a choice is said to send is what its ranks send, and its account says what is divided and why the rest
is not."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from choice_jobs import GPT, ConvNet, layout_by_shapes, next_token, normal, square, tokens
from program_jobs import job_of
from torch import Tensor, nn

import meshloom.tensor_parallel.search.bucket_elimination
from benchmarks.step import gpt
from meshloom.cli.main import main
from meshloom.program.capture.capture import capture
from meshloom.program.cost.cost import costs
from meshloom.program.cost.rates import Rates, default_rates
from meshloom.program.operators.linears import GatheredLinears
from meshloom.tensor_parallel.explain import account_of, text_of
from meshloom.tensor_parallel.layout.layout import Layout, layout_of
from meshloom.tensor_parallel.partition import partition
from meshloom.tensor_parallel.rules.table import BUILT_IN
from meshloom.tensor_parallel.search.choose import choose
from meshloom.tensor_parallel.sent_bytes import bytes_per_step, sent_at_step_end
from tests.sent import counted, predicted

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]
FAST = Rates(start_seconds=0.0, latency_seconds=0.0)
MODELS: dict[str, tuple[Any, Any, Any]] = {
    "gpt": (lambda: GPT(blocks=2), next_token, tokens()),
    "tied": (lambda: GPT(blocks=2, tied=True), next_token, tokens()),
    "grouped": (lambda: GPT(blocks=1, kv_heads=2), next_token, tokens(5)),
    "convolutions": (ConvNet, square, normal(4, 3, 8, 8)),
}
RATES = {
    "usual": FAST,
    "by samples": replace(FAST, memory_price=0.0, link_bytes_per_second=1e12),
    "slow memory": replace(FAST, bytes_per_second=1e5, link_bytes_per_second=1e9),
}


@pytest.mark.covering("tied-2", "grouped-3", "convolutions")
@pytest.mark.parametrize(
    "rates", ["usual", *(pytest.param(name, marks=pytest.mark.slow) for name in list(RATES)[1:])]
)
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_bytes_predicted_are_bytes_counted(name: str, num_ranks: int, rates: str):
    build, loss, batch = MODELS[name]
    program = capture(job_of(build, loss), (batch, batch))
    part = partition(choose(layout_of(program, BUILT_IN), num_ranks, RATES[rates]))
    torch.manual_seed(0)
    assert counted(part, build(), batch) == predicted(part)


@pytest.fixture(scope="module")
def benchmark() -> tuple[Layout, dict[str, Tensor]]:
    """The benchmark GPT on a batch of 4."""
    batch = {
        "x": torch.randint(
            gpt.SMALL.vocabulary, (4, gpt.SMALL.length + 1), generator=torch.Generator().manual_seed(0)
        )
    }
    return layout_of(capture(job_of(gpt.GPT, next_token), (batch, batch)), BUILT_IN), batch


@pytest.mark.slow
def test_sequences_are_divided_by_gathers_and_scatters_of_equal_volume(
    benchmark: tuple[Layout, dict[str, Tensor]],
):
    """Where memory is short, and as counted: what an all-reduce of S sends, a scatter and a gather of S send
    together (Korthikanti et al., 2022)."""
    layout, batch = benchmark
    rates = default_rates("cuda")
    usual = partition(choose(layout, 2, rates))
    short = partition(choose(layout, 2, rates, memory_bytes=142e6))
    assert all(
        short.choice.strategies[f"layer_norm_{number}"].work == 0.5
        for number in range(1, 2 * gpt.SMALL.blocks)
    )
    assert all(
        usual.choice.strategies[f"layer_norm_{number}"].work == 1 for number in range(1, 2 * gpt.SMALL.blocks)
    )
    size = 4 * gpt.SMALL.length * gpt.SMALL.width * 4
    before, after = (counted(part, gpt.GPT(), batch)[0] for part in (usual, short))
    assert before["all_reduce"][1] > 4 * gpt.SMALL.blocks * size > 10 * after["all_reduce"][1]
    assert after["reduce_scatter"][0] >= 4 * gpt.SMALL.blocks
    again = sum(
        isinstance(node.target, GatheredLinears) and node.target.change.source == "part"
        for node in short.programs[0].nodes
    )
    assert again >= 2 * gpt.SMALL.blocks  # inputs that are not kept, and gathered once more in the backward
    # they differ at the embedding and the loss
    assert on_a_ring(after) - again * size // 2 == pytest.approx(on_a_ring(before), rel=0.03)


def on_a_ring(found: dict[str, tuple[int, int]]) -> float:
    """Bytes that each of two ranks sends."""
    share = {"all_reduce": 1.0, "reduce_scatter": 0.5, "all_gather": 1.0}  # of what it hands in
    return sum(share[kind] * num_bytes for kind, (_, num_bytes) in found.items() if kind in share)


def test_chunks_send_alike_and_the_sum_comes_once():
    build, loss, batch = MODELS["gpt"]
    part = partition(choose(layout_by_shapes(build, loss, batch), 2, FAST))
    once = sum(each.num_bytes for each in sent_at_step_end(part))
    one, four = bytes_per_step(part), bytes_per_step(part, num_chunks=4)
    assert once > 0
    assert four == {kind: 4 * size - (3 * once if kind == "all_reduce" else 0) for kind, size in one.items()}


@pytest.mark.slow
def test_an_account_tells_blocks_that_are_alike_as_one():
    layout = layout_by_shapes(GPT, next_token, tokens())
    priced = costs(layout.program)
    account = account_of(partition(choose(layout, 2, FAST, priced=priced)), priced)
    rows = {row.path: row for row in account.rows}
    assert rows["blocks.0-2.up"].times == 3 and rows["blocks.0-2.up"].placements == (
        ("weight", "column"),
        ("bias", "column"),
    )
    assert rows["blocks.0-2.attention.q"].placements[0] == ("weight", "column by heads")
    assert account.parameters_divided > 0.95 and account.work == pytest.approx(0.5, abs=0.02)
    assert account.num_bytes == bytes_per_step(partition(choose(layout, 2, FAST, priced=priced)))
    text = text_of(account)
    assert "blocks.0-2.up  x3" in text and "tp=2 divides" in text and "Sent by a rank per step: " in text


def test_what_is_whole_is_said_with_the_reason_and_the_line():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(4, 6), nn.LayerNorm(6)
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.first(x)) * self.scale

    layout = layout_by_shapes(Odd, square, normal(6, 4))
    priced = costs(layout.program)
    pins = {"first": "replicated"}
    account = account_of(
        partition(choose(layout, 2, FAST, priced=priced, placements=pins)), priced, placements=pins
    )
    why = {each.what: each.why for each in account.whole}
    assert why["scale"] == "no dimension has 2 indices to divide"
    assert (
        why["norm.weight"].startswith("layer_norm needs all of it (at ")
        and "test_chosen.py" in why["norm.weight"]
    )
    assert why["first.weight"] == "the plan wants it so (tp_placements=first:replicated)"


def test_what_was_not_compared_is_not_said_to_cost_more(monkeypatch: pytest.MonkeyPatch):
    """Where a search was given up, what it left whole was said to cost more than it saves."""
    layout = layout_by_shapes(ConvNet, square, normal(4, 3, 8, 8))
    priced = costs(layout.program)
    slow = Rates(start_seconds=10.0)
    reasons: list[set[str]] = []
    for largest in (2**24, 2**2):
        monkeypatch.setattr(meshloom.tensor_parallel.search.bucket_elimination, "LARGEST", largest)
        reasons.append(
            {
                each.why.partition(" (at ")[0]
                for each in account_of(partition(choose(layout, 2, slow, priced=priced)), priced).whole
            }
        )
    assert "dividing it would cost more than it saves" in reasons[0] - reasons[1]
    assert any("too many to compare" in why for why in reasons[1] - reasons[0])


@pytest.mark.slow
def test_a_plan_is_described(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    file = tmp_path / "job.py"
    file.write_text("from tests.jobs import make_job\n\njob = make_job('gpt', 'adamw')\n")
    assert (
        main(["describe", str(file), "--plan", "tp=2,microbatches=2", "--json", str(tmp_path / "records")])
        == 0
    )
    printed = capsys.readouterr().out
    assert "tp=2 divides " in printed and "Whole: norm.bias" in printed
    (record,) = [
        each
        for each in map(json.loads, (tmp_path / "records").read_text().splitlines())
        if each["event"] == "division"
    ]
    assert record["plan"] == "dp=1,tp=2,microbatches=2" and set(record["num_bytes"]) <= {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
    }


@pytest.mark.slow
def test_a_limit_on_memory_is_kept_or_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """The smallest that a rank can hold is named, and holding that is then possible; nothing is a little
    less."""
    file = tmp_path / "job.py"
    file.write_text("from tests.jobs import make_job\n\njob = make_job('gpt', 'adamw')\n")
    words = ["describe", str(file), "--plan", "tp=2", "--memory"]
    assert main([*words, "1KiB"]) == 2
    refused = capsys.readouterr().err
    found = re.search(
        r"With tp=2 a rank holds (\d+\.?\d*) KiB or more of parameters, .*, and the limit is 1 KiB\. Use a larger tp, or smaller microb",
        refused,
    )
    assert found is not None, refused
    assert main([*words, f"{float(found[1]) * 0.97}KiB"]) == 2
    assert main([*words, f"{float(found[1]) * 1.03}KiB"]) == 0
