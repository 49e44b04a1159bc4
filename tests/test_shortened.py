"""What is found of four of the blocks that are alike is what is found of all of them, value by value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshloom.core.job import Job
from meshloom.pipeline.stages.stages import cut_into_stages
from meshloom.planner.memory.dry_run import DryStages
from meshloom.planner.memory.memory import predict_memory
from meshloom.program.capture.shapes import capture_shapes
from meshloom.program.cost.cost import _costs, costs
from meshloom.program.cost.cost_fake import fake_tensors
from meshloom.program.cost.shortened import NUM_KEPT, node_by_node, shortened
from meshloom.program.ir.program import Program
from tests.jobs import Samples
from tests.published.model import from_transformers, tokens

pytestmark = pytest.mark.usefixtures("silent_export")


class Block(nn.Module):
    """[batch, 6] -> [batch, 6]. What it keeps, updates and shares: its input, running statistics, one weight
    with all others."""

    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6, bias=False)
        self.shared = shared

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return (
            x
            + self.down(
                nn.functional.dropout(self.shared(self.norm(x)).repeat(1, 2) * torch.relu(self.up(x)), 0.1)
            )
            * scale
        )


class Stack(nn.Module):
    """Blocks one after another, in which the outermost alone are given what lies outside. give: what becomes
    of all of their results."""

    def __init__(self, count: int, give: Callable[[list[Tensor]], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        shared = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block(shared) for _ in range(count))
        self.give = give

    def forward(self, x: Tensor) -> Tensor:
        scale = self.first(x).mean()
        results = [self.first(x)]
        for block in self.blocks:
            results.append(block(results[-1], scale))
        return self.give(results)


def last(results: list[Tensor]) -> Tensor:
    return results[-1].square().mean()


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for _, each in named], lr=0.1)


def of_all(results: list[Tensor]) -> Tensor:
    return torch.stack(results).square().mean()


def of_every_second(results: list[Tensor]) -> Tensor:
    return torch.stack(results[::2]).square().mean()


def of_a_sum(results: list[Tensor]) -> Tensor:
    return sum(results, torch.zeros(())).square().mean()


def program_of(model: Callable[[], nn.Module]) -> Program:
    job = Job(
        model=model,
        loss=lambda model, batch: model(batch["x"]),
        optimizer=lambda named: torch.optim.SGD([each for _, each in named], lr=0.1),
        data=lambda: Samples(x=torch.ones(4, 6)),
        batch_size=4,
        steps=1,
    )
    return capture_shapes(job, {"x": torch.ones(4, 6)})


@pytest.fixture(scope="module")
def stack() -> Program:
    return program_of(lambda: Stack(9, last))


def unshared(program: Program) -> dict[str, Any]:
    with fake_tensors():
        return _costs(program)


@pytest.mark.slow
def test_costs_of_blocks_that_share_and_update_are_those_of_all_of_them(stack: Program):
    short = shortened(stack)
    assert (
        short is not None
        and short.run.num_blocks >= 8
        and len(short.program.nodes) < len(stack.nodes) * 3 / 4
    )
    found = costs(stack)
    assert found == unshared(stack)
    assert list(found) == [node.name for node in stack.nodes]


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Any]:
    """What a call gives where nothing is shortened."""

    def call(found: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patched:
            for room in ("program.cost.shortened", "planner.memory.dry_run"):
                patched.setattr(f"meshloom.{room}.shortened", lambda *_: None)
            return found()

    return call


@pytest.mark.long
@pytest.mark.parametrize("settings", [{}, {"microbatches": 2}])
def test_memory_of_a_step_is_that_of_all_of_them(stack: Program, whole: Any, settings: dict[str, int]):
    def found() -> Any:
        return predict_memory(stack, adamw, **settings)

    assert found() == whole(found)


@pytest.mark.slow
def test_what_stages_keep_is_what_all_of_their_blocks_keep(whole: Any):
    program = program_of(lambda: Stack(16, last))
    stages = cut_into_stages(
        program, {node.name: place * 2 // len(program.nodes) for place, node in enumerate(program.nodes)}, 2
    )
    assert all(shortened(stage.program) for stage in stages)

    def found() -> list[int]:
        return [DryStages().kept(stage) for stage in stages]

    assert found() == whole(found)


def test_what_is_left_out_is_what_only_those_blocks_have(stack: Program):
    short = shortened(stack)
    assert short is not None
    left = short.run.num_blocks - NUM_KEPT
    whole, program = short.whole, short.program
    assert len(whole.nodes) - len(program.nodes) == left * short.run.period
    # the norm's two, two of `up`, one of `down`
    assert len(whole.parameters) - len(program.parameters) == left * 5
    assert "blocks.0.shared.weight" in program.parameters
    assert len(whole.updates) - len(program.updates) == left
    assert len(whole.buffers) - len(program.buffers) == left * 3


@pytest.mark.long
@pytest.mark.parametrize("give", [of_every_second, of_a_sum], ids=["every second", "a sum"])
def test_blocks_whose_results_are_used_by_themselves_are_all_gone_through(
    give: Callable[[list[Tensor]], Tensor],
):
    assert shortened(program_of(lambda: Stack(9, give))) is None


class Steps(nn.Module):
    """A loop over time: [batch, 12, 4] -> loss. form: what is taken of a moment, and what becomes of all
    states."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.into, self.again, self.gate = nn.Linear(4, 5), nn.Linear(5, 5, bias=False), nn.Linear(4, 5)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        given, gate = self.into(x), self.gate(x)
        state = x.new_zeros(x.shape[0], 5)
        found: list[Tensor] = []
        for t in range(x.shape[1]):
            now = given[:, t : t + 1].squeeze(1) if self.form == "slices" else given[:, t]
            state = torch.tanh(self.again(state) + now) * gate[:, t]
            found.append(
                state.unsqueeze(1)
                if self.form in ("cat", "slices")
                else state.reshape(-1, 1, 5)[:, 0]
                if self.form == "views"
                else state
            )
        if self.form == "last":
            return found[-1].square().mean() + given.mean()
        joined = torch.cat(found, 1) if self.form in ("cat", "slices") else torch.stack(found, -1)
        return (
            joined.square().mean()
            + (torch.stack(found).exp().sum() if self.form == "twice" else 0)
            + state.mean()
        )


@pytest.mark.parametrize("form", ["stack", "cat", "slices", "views", "twice", "last"])
@pytest.mark.slow
def test_steps_of_a_loop_whose_results_are_joined_are_found_of_four(form: str, whole: Any):
    """A loop over 1,024 moments was priced moment by moment, as all states are used behind it: more than half
    of the 150 s that a plan of Mamba took."""
    job = Job(
        model=lambda: Steps(form),
        loss=lambda model, batch: model(batch["x"]),
        optimizer=adamw,
        data=lambda: Samples(x=torch.ones(3, 12, 4)),
        batch_size=3,
        steps=1,
    )
    program = capture_shapes(job, {"x": torch.ones(3, 12, 4)})
    short = shortened(program)
    assert short is not None and short.run.num_blocks >= 10
    stages = cut_into_stages(program, {node.name: 0 for node in program.nodes}, 1)
    assert costs(program) == unshared(program)
    assert DryStages().kept(stages[0]) == whole(lambda: DryStages().kept(stages[0]))
    assert predict_memory(program, adamw, microbatches=2) == whole(
        lambda: predict_memory(program, adamw, microbatches=2)
    )


@pytest.mark.slow
def test_blocks_whose_results_are_joined_are_found_of_four():
    program = program_of(lambda: Stack(9, of_all))
    short = shortened(program)
    assert short is not None and short.run.num_blocks >= 8
    assert costs(program) == unshared(program)


def test_blocks_that_are_found_unlike_are_all_gone_through(stack: Program):
    def places(given: Program) -> Mapping[str, int]:
        return {node.name: place for place, node in enumerate(given.nodes)}

    assert node_by_node(stack, places) == places(stack)


SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
DEEP = {
    "llama": ("LlamaForCausalLM", {"num_hidden_layers": 7, **SMALL}),
    "gpt2": ("GPT2LMHeadModel", {"n_layer": 7, "n_embd": 16, "n_head": 2}),
    "t5": (
        "T5ForConditionalGeneration",
        {"num_layers": 8, "d_model": 16, "d_ff": 24, "num_heads": 2, "d_kv": 8, "decoder_start_token_id": 0},
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        {"num_hidden_layers": 13, **SMALL, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 5},
    ),
    "mixtral": (
        "MixtralForCausalLM",
        {"num_hidden_layers": 7, **SMALL, "num_key_value_heads": 2, "num_local_experts": 4},
    ),
    "mamba": ("MambaForCausalLM", {"num_hidden_layers": 7, "hidden_size": 8, "state_size": 4}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEEP)
def test_costs_of_families_are_those_of_all_of_their_blocks(name: str, whole: Any):
    kind, settings = DEEP[name]
    model = from_transformers(
        name,
        "",
        "",
        kind,
        tokens(11),
        {"vocab_size": 40, "pad_token_id": 0, "use_cache": False, **settings},
        chunk=2,
    )
    program = capture_shapes(model.job(1), model.make(2))
    short = shortened(program)
    assert short is not None and len(short.program.nodes) < len(program.nodes) * 4 / 5
    assert costs(program) == unshared(program)
    assert predict_memory(program, adamw, microbatches=2) == whole(
        lambda: predict_memory(program, adamw, microbatches=2)
    )
