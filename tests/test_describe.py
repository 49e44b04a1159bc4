"""A description adds up: its rows are the model, its numbers are the program's, and what cannot be read is
refused in one sentence."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import meshloom as ml
from meshloom.cli.main import main
from meshloom.core.errors import CaptureError
from meshloom.machine.machine import example_machine, save
from meshloom.planner import describe as planner
from meshloom.planner.blocks import Block, rows_of
from meshloom.planner.readings import Readings
from meshloom.report.description import description_records, print_description
from meshloom.telemetry.timings import Timings
from tests.jobs import deciding_loss

FILE = str(Path(__file__).with_name("describe_jobs.py"))
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export", "unmeasured")]


def describe(job: ml.Job, **how: Any) -> planner.Description:
    return planner.describe(Readings(job), **how)


class Layer(nn.Module):
    """Two products and a residual, of `width`."""

    def __init__(self, width: int, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=bias)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    """Layers of which the third has no bias, a head tied to the embedding, and a layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Layer(8, bias=number != 2) for number in range(6))
        self.spare = nn.Linear(3, 3)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def job_of(model: Any, **settings: Any) -> ml.Job:
    return ml.Job(
        model=model,
        loss=loss,
        data=lambda: torch.randint(11, (20, 7)),
        **{
            "optimizer": lambda named: torch.optim.SGD(named, lr=0.1),
            "batch_size": 4,
            "steps": 1,
            **settings,
        },
    )


def shown(whole: Block, depth: int | None = None) -> list[str]:
    return [f"{'  ' * (level - 1)}{block.name} x{block.count}" for level, block in rows_of(whole, depth)]


def test_layers_that_are_alike_are_one_row():
    whole = describe(job_of(Stack)).whole
    assert shown(whole, 1) == [
        "token x1",
        "layers.0-1,3-5 x5",
        "layers.2 x1",
        "spare x1",
        "head x1",
        "(own forward and loss) x1",
    ]
    assert shown(whole, 2)[1:5] == ["layers.0-1,3-5 x5", "  up x5", "  down x5", "  (own forward) x5"]
    paths = [block.path for _, block in rows_of(whole, 2)]
    assert paths[2:4] == ["layers.0-1,3-5.up", "layers.0-1,3-5.down"]


@pytest.mark.parametrize("depth", [None, 1, 2, 5])
def test_rows_add_up_to_the_model(depth: int | None):
    whole = describe(job_of(Stack), machine=example_machine()).whole
    rows = list(rows_of(whole, depth))
    leaves = [
        block
        for (level, block), (below, _) in zip(rows, [*rows[1:], (0, whole)], strict=True)
        if below <= level
    ]
    for what in ("parameters", "parameter_bytes", "kept_bytes", "flops", "backward_flops", "operators"):
        assert sum(getattr(block, what) for block in leaves) == getattr(whole, what), what
    assert sum(block.seconds.total for block in leaves if block.seconds) == pytest.approx(
        whole.seconds.total if whole.seconds else None, rel=1e-9
    )


def test_numbers_are_those_of_the_eager_step():
    """Against torch's own counter and the module's own parameters."""
    whole = describe(job_of(Stack)).whole
    model = Stack()
    with FlopCounterMode(display=False) as counter:
        loss(model, torch.randint(11, (4, 7))).backward()
    assert whole.flops + whole.backward_flops == counter.get_total_flops()
    assert whole.parameters == sum(parameter.numel() for parameter in model.parameters())
    layers = next(block for _, block in rows_of(whole) if block.name.startswith("layers.0"))
    assert layers.parameters == 5 * sum(parameter.numel() for parameter in model.layers[0].parameters())
    # A layer keeps, of 4 x 7 tokens: its input [8], before and after gelu [16]; the residual's sum is the
    # next layer's input.
    assert layers.kept_bytes == 5 * 4 * 7 * (8 + 16 + 16) * 4


def test_tied_and_unused_parameters_are_named():
    found = describe(job_of(Stack))
    assert [tuple(names) for names in found.tied] == [("token.weight", "head.weight")]
    assert found.unused == ("spare.weight", "spare.bias")


@pytest.mark.slow
def test_the_memory_of_a_step_is_there_unless_the_optimizer_needs_values():
    found = describe(job_of(Stack)).memory
    assert found is not None and found.optimizer == 0 and found.peak > found.parameters + found.kept
    adam = describe(job_of(Stack, optimizer=lambda named: torch.optim.AdamW(named))).memory
    # Two moments of every parameter that has a gradient (not the spare layer's 12), and a count of steps for
    # each of them.
    assert adam is not None and 2 * 4 * (1764 - 12) <= adam.optimizer < 2 * 4 * (1764 - 12) + 8 * 40
    unknown = describe(
        job_of(Stack, optimizer=lambda named: torch.optim.LBFGS([parameter for _, parameter in named]))
    )
    assert unknown.memory is not None and unknown.memory.guessed == ("LBFGS",)
    assert unknown.memory.optimizer == 2 * unknown.memory.parameters  # where nothing is known of a state
    console = Console(file=io.StringIO(), width=200)
    print_description(unknown, console)
    assert "state of LBFGS: not known" in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]

    def reads(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([each for _, each in named], lr=float(named[0][1].abs().sum()))

    found = describe(job_of(Stack, optimizer=reads))
    assert found.memory is None and "cannot be made or stepped without values (" in found.no_memory


@pytest.mark.slow
def test_a_larger_batch_costs_more_and_has_the_same_parameters():
    small, large = (describe(job_of(Stack), batch_size=size).whole for size in (2, 6))
    assert large.flops == 3 * small.flops
    assert large.kept_bytes - 4 == 3 * (small.kept_bytes - 4)  # the sum of the loss's weights is one number
    assert large.parameters == small.parameters


def test_a_model_of_any_size_is_described_without_its_memory():
    """A layer of 2^34 parameters, 64 GiB, which this machine need not have."""

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Embedding(11, 1 << 17), nn.Linear(1 << 17, 1 << 17, bias=False), nn.Linear(1 << 17, 11)
        )

    whole = describe(job_of(build)).whole
    assert whole.inside[1].parameters == 1 << 34


@pytest.mark.slow
def test_experts_count_for_the_tokens_that_they_see():
    """A mixture of experts by the formula of its paper: each token goes through two experts of three products
    each (Jiang et al., 2024)."""
    import transformers

    config = transformers.MixtralConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, vocab_size=11,
        num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    job = replace(
        job_of(lambda: transformers.MixtralForCausalLM(config)),
        loss=lambda model, batch: model(input_ids=batch, labels=batch).loss,
    )
    found = describe(job)
    assert found.unpriced == ()
    experts = [block for _, block in rows_of(found.whole, 9) if block.name.endswith("experts")]
    forward = 2 * (4 * 7) * 2 * (3 * 16 * 24)
    assert [(each.count, each.flops, each.backward_flops) for each in experts] == [
        (2, 2 * forward, 4 * forward)
    ]


def test_what_has_no_formula_is_named():
    with torch.library._scoped_library("meshloom_tests", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x + x, "CompositeExplicitAutograd")
        library.impl("twice", lambda x: torch.empty_like(x), "Meta")
        twice = torch.ops.meshloom_tests.twice

        class Foreign(Stack):
            """Scales by another library's operator."""

            def forward(self, tokens: Tensor) -> Tensor:
                return super().forward(tokens) + twice(torch.ones(11))

        assert describe(job_of(Foreign)).unpriced == ("meshloom_tests.twice",)


def test_layers_in_a_row_keep_their_order():
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Embedding(11, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.ReLU(), nn.Linear(8, 11)
        )

    assert shown(describe(job_of(build)).whole, 1)[:5] == ["0 x1", "1 x1", "2 x1", "3-4 x2", "5 x1"]


def test_the_table_shows_blocks_shares_and_what_is_missing(capsys: pytest.CaptureFixture[str]):
    assert main(["describe", FILE]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Stack: 1,764 parameters (6.89 KiB, float32); 4 samples (batch int64[4, 7]); ")
    assert re.search(r"^layers\.0-1,3-5  x5 +Layer +1\.4k +79% ", text, re.MULTILINE)
    assert re.search(r"^total +Stack +1\.76k +100% ", text, re.MULTILINE)
    assert re.search(
        r"^memory of a step on one device: [\d.]+ KiB at its peak, in the backward: parameters 6\.89 KiB, gradients ",
        text,
        re.MULTILINE,
    )
    assert "tied: token.weight = head.weight" in text
    assert "not used by the loss: spare.weight, spare.bias" in text
    assert "meshloom calibrate" in text


def test_files_of_weights_are_compared_with_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """By their headers."""
    (tmp_path / "job.py").write_text(
        "import torch, meshloom as ml\n"
        "from torch import nn\n"
        "job = ml.Job(model=lambda: nn.Linear(5, 3), loss=lambda model, batch: model(batch).square().mean(),\n"
        "    optimizer=lambda named: torch.optim.SGD(named, lr=0.1), data=lambda: torch.ones(8, 5), batch_size=4, steps=1,\n"
        f"    weights={str(tmp_path / 'x.safetensors')!r})\n"
    )
    arguments = ["describe", str(tmp_path / "job.py"), "--cache", "off"]
    save_file({"weight": torch.ones(3, 5), "bias": torch.ones(3)}, tmp_path / "x.safetensors")
    assert main(arguments) == 0
    assert "Parameters and buffers start from" in capsys.readouterr().out
    save_file({"weight": torch.ones(5, 3), "other": torch.ones(3)}, tmp_path / "x.safetensors")
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert all(each in said.err for each in ("missing", "bias", "other", "weight")) and not said.out


def test_a_measured_machine_predicts_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    save(example_machine(), tmp_path / "machine.json")
    assert main(["describe", FILE, "--machine", str(tmp_path / "machine.json")]) == 0
    text = capsys.readouterr().out
    assert "predicted" in text.splitlines()[1]
    assert "on one rank of example (cpu), without optimizer and exchange; calibrated " in text


def test_a_narrow_terminal_gets_fewer_columns_and_whole_words():
    found = describe(job_of(Stack), machine=example_machine())
    for width in (80, 200):
        stream = io.StringIO()
        print_description(found, Console(file=stream, width=width), 2)
        assert "…" not in stream.getvalue()
        assert "predicted" in stream.getvalue()
        assert ("Linear" in stream.getvalue()) is (width == 200)


def test_records_hold_the_numbers(capsys: pytest.CaptureFixture[str]):
    assert main(["describe", FILE, "--depth", "1", "--json", "-"]) == 0
    captured = capsys.readouterr()
    records = [json.loads(line) for line in captured.out.splitlines()]
    assert [record["event"] for record in records] == ["model", *["block"] * 6, "total", "memory"]
    assert records[0]["tied"] == [["token.weight", "head.weight"]]
    assert sum(record["flops"] for record in records[1:-2]) == records[-2]["flops"]
    assert records[2] | {"block": "layers.0-1,3-5", "class": "Layer", "count": 5} == records[2]
    assert "total" in captured.err
    assert json.loads(json.dumps(description_records(describe(job_of(Stack)))))[0]["batch_size"] == 4


def test_timings_are_of_the_phases_that_a_plan_has(capsys: pytest.CaptureFixture[str]):
    assert main(["describe", FILE, "--plan", "tp=2", "--timings", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    seconds = json.loads(out.splitlines()[-1])["seconds"]
    assert list(seconds) == [
        "start",
        "reading",
        "memory of a step",
        "prices",
        "blocks",
        "axes",
        "choosing a division",
        "dividing",
        "memory of a comparison",
        "ranks",
    ]
    assert all(each >= 0 for each in seconds.values()) and seconds["reading"] > seconds["blocks"]
    assert "CPU seconds: start" in err


def test_a_phase_does_not_count_what_others_take_inside_of_it(monkeypatch: pytest.MonkeyPatch):
    clock = iter([0.0, 1.0, 4.0, 5.0, 7.0, 10.0])
    monkeypatch.setattr("time.process_time", lambda: next(clock))
    timings = Timings()
    with timings.of("outer"):
        with timings.of("inner"):
            pass
        with timings.of("inner"):
            pass
    assert timings.seconds == {"inner": 3.0 + 2.0, "outer": 10.0 - 5.0}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nothing.py"], "There is no file nothing.py"),
        ([FILE, "--depth", "0"], "--depth 0 must be 1 or more"),
        ([FILE, "--batch", "0"], "--batch 0 must be 1 or more"),
        ([FILE, "--machine", "nowhere.json"], "There are no measurements in nowhere.json"),
    ],
)
def test_a_wrong_request_is_one_sentence_and_2(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["describe", *words]) in (1, 2)
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error


def test_a_model_that_the_host_cannot_hold_is_not_built_for_what_needs_values():
    """Of 4 TiB, with a loss that no shapes compute."""
    width = 2**20
    job = replace(
        job_of(lambda: nn.Linear(width, width, bias=False)),
        loss=deciding_loss,
        data=lambda: [{"x": torch.zeros(width), "y": torch.tensor(0)}] * 4,
    )
    for each in (job, replace(job, leaves=[nn.Linear])):
        with pytest.raises(
            CaptureError, match=r"depends on the values in the batch|does not fit into the memory"
        ):
            Readings(each).of(2)


@pytest.mark.slow
def test_a_plan_with_tp_is_told_before_it_runs(capsys: pytest.CaptureFixture[str]):
    assert main(["describe", FILE, "--plan", "tp=2,tp_placements=layers.*.up:column", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert (
        re.search(r"layers\.\d.*up.*weight column", err)
        and "tp=2 divides" in err
        and "Sent by a rank per step" in err
    )
    *_, told, ranks = map(json.loads, out.splitlines())
    assert ranks["event"] == "ranks" and ranks["ranks"][0]["num_bytes"]["tp"] == sum(
        told["num_bytes"].values()
    )
    assert (
        told["event"] == "division"
        and told["num_ranks"] == 2
        and 0 < told["parameters_divided"] <= 1
        and told["num_bytes"]
    )
    assert main(["describe", FILE, "--plan", "tp=2,tp_placements=nothing.*:column"]) == 2
    assert "nothing.*" in capsys.readouterr().err
