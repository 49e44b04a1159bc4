"""Choices: optimal, Megatron's pattern on transformers, and within pins and memory limits."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from choice_jobs import GPT, ConvNet, layout_by_shapes, next_token, normal, square, tokens
from torch import Tensor, nn
from torch.nn import functional as F

import meshloom.tensor_parallel.search.problem
from benchmarks.step import gpt
from meshloom.comm.pieces import Pieces
from meshloom.core.errors import PlanError
from meshloom.program.cost.cost import costs
from meshloom.program.cost.rates import Rates, default_rates
from meshloom.tensor_parallel.layout.layout import Layout
from meshloom.tensor_parallel.layout.placement import INVARIANT, PARTIAL, REPLICATED, Part, Placement
from meshloom.tensor_parallel.partition import partition
from meshloom.tensor_parallel.search.bucket_elimination import Floats
from meshloom.tensor_parallel.search.choose import (
    DivisionChoice,
    choice_of_numbers,
    choose,
    numbers_of_choice,
)
from meshloom.tensor_parallel.search.costs import reshard_seconds
from meshloom.tensor_parallel.search.milp import cheapest_by_milp
from meshloom.tensor_parallel.search.problem import Problem
from meshloom.tensor_parallel.search.repeats import Repeats
from meshloom.tensor_parallel.search.reshards import total_cost
from meshloom.tensor_parallel.search.strategies import Strategy
from meshloom.tensor_parallel.sent_bytes import sent_in_chunk
from tests.division import RATES, at_random, compare, subject_of
from tests.families import FAMILIES
from tests.jobs import make_job

FAST = Rates(start_seconds=0.0, latency_seconds=0.0)  # a network on which sharding tiny models pays off

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]


def gpt_loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"][:, :-1]).flatten(0, 1), batch["x"][:, 1:].flatten())


@pytest.fixture(scope="module")
def benchmark() -> Layout:
    """The benchmark GPT, batch 4."""
    return layout_by_shapes(gpt.GPT, gpt_loss, {"x": torch.zeros(4, gpt.SMALL.length + 1, dtype=torch.int64)})


@pytest.fixture(scope="module")
def small() -> Layout:
    return layout_by_shapes(GPT, next_token, tokens())


def shapes_of(choice: DivisionChoice) -> dict[str, tuple[int, ...]]:
    """The shape of rank 0's shard of every parameter."""
    return {
        name: choice.pieces(each.value, choice.input_placements[each.value]).local_shape(0)
        for name, each in choice.layout.program.parameters.items()
    }


# The oracle: every combination, priced by definition.


def least_of_all(problem: Problem, rates: Rates) -> float:
    """The cost of the cheapest combination of placements and strategies."""
    layout = problem.layout
    program = layout.program
    parameters = {each.value for each in program.parameters.values()}
    priced = costs(program)
    best = float("inf")
    names = [*problem.placements, *problem.strategies]
    for row in itertools.product(*problem.placements.values(), *problem.strategies.values()):
        made: dict[str, Placement] = {
            name: way.output if isinstance(way, Strategy) else way for name, (way, _) in zip(names, row, strict=True)
        }  # fmt: skip
        total = sum(problem.formulation.decisions.seconds[unknown] for _, unknown in row)
        wanted = {(out.name, INVARIANT) for out in program.outputs}
        for node, (way, _) in zip(program.nodes, row[len(problem.placements) :], strict=True):
            assert isinstance(way, Strategy)
            wanted |= {
                (ref.name, placement) for ref, placement in zip(node.operands(), way.operands, strict=True)
            }
        for value, placement in wanted:
            source = made[value]
            if source == placement:
                continue
            if value in parameters and isinstance(source, Part) and source.cut is not None:
                total = float("inf")
                break
            users = [node for node in program.nodes if any(ref.name == value for ref in node.operands())]
            again = placement == REPLICATED and all(
                node.operator == "linear" and next(node.operands()).name == value for node in users
            )
            seconds = reshard_seconds(
                layout.metas[value][0],
                source,
                placement,
                held(problem, value, source),
                held(problem, value, placement),
                rates,
                regathered=again,
                behind_seconds=sum(priced[node.name].flops for node in users)
                / problem.num_ranks
                / rates.flops_per_second
                if again
                else 0.0,
            )
            total = float("inf") if seconds is None else total + seconds
            if total >= best:
                break
        best = min(best, total)
    return best


def own_costs(problem: Problem) -> list[Floats]:
    """[its options]: of each decision, the seconds of each option."""
    decisions = problem.formulation.decisions
    return [np.array([decisions.seconds[number] for number in row]) for row in decisions.options]


def held(problem: Problem, value: str, placement: Placement) -> Pieces:
    made = DivisionChoice(
        num_ranks=problem.num_ranks, layout=problem.layout, numbers=problem.numbers, strategies={}, input_placements={}, seconds=0.0, chosen=()
    )  # fmt: skip
    return made.pieces(value, placement)


class Two(nn.Module):
    """Two linear layers without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 8, bias=False), nn.Linear(8, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


class Tied(nn.Module):
    """One matrix, looked up and multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.token(x), self.token.weight)


def mean(model: Any, batch: Any) -> Tensor:
    return model(batch["x"]).mean()


@pytest.mark.parametrize("name", ["two", "tied", "norm"])
@pytest.mark.slow
def test_no_combination_is_cheaper(name: str):
    build, batch = {
        "two": (Two, normal(4, 5)),
        "tied": (Tied, {"x": torch.zeros(6, dtype=torch.int64)}),
        "norm": (lambda: nn.Sequential(nn.Linear(3, 4, bias=False), nn.LayerNorm(4)), normal(2, 3)),
    }[name]
    layout = layout_by_shapes(build, mean, batch)
    draw = random.Random(name)
    priced = costs(layout.program)
    for _ in range(4):
        rates = Rates(
            flops_per_second=10 ** draw.uniform(3, 8), bytes_per_second=10 ** draw.uniform(3, 8), start_seconds=10 ** draw.uniform(-7, -3),
            latency_seconds=10 ** draw.uniform(-7, -3), link_bytes_per_second=10 ** draw.uniform(3, 8), memory_price=draw.choice([0.0, 1.0, 100.0]),
        )  # fmt: skip
        problem = Problem(layout, 2, rates=rates, costs=priced)
        _, found, _ = problem.solve()
        assert found == pytest.approx(least_of_all(problem, rates), rel=1e-9)  # sums in another order


@pytest.mark.parametrize(
    "name",
    [
        "gpt",
        "convolutions",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "resnet", "clip")),
    ],
)
def test_an_integer_program_finds_nothing_cheaper(name: str):
    """Another formulation and solver, for programs too large to try all combinations."""
    if name in FAMILIES:
        layout, rates = subject_of(FAMILIES[name].make_job(True)).layout, RATES
    elif name == "gpt":
        layout, rates = (
            layout_by_shapes(lambda: GPT(blocks=2, tied=True, kv_heads=2), next_token, tokens()),
            FAST,
        )
    else:
        layout, rates = layout_by_shapes(ConvNet, square, normal(4, 3, 8, 8)), FAST
    problem = Problem(layout, 2, rates=rates, costs=costs(layout.program))
    _, found, _ = problem.solve()
    other = cheapest_by_milp(own_costs(problem), problem.formulation.reshards)
    assert other is not None and found <= other[1] * (1 + 1e-6)  # the solver's tolerance
    assert other[1] <= found * (1 + 2e-3)  # its gap; it has 10 s and needs fewer here


def test_blocks_that_share_unknowns_cost_what_they_cost_alone(small: Layout, monkeypatch: pytest.MonkeyPatch):
    priced = costs(small.program)
    rates = replace(FAST, memory_price=1.0)
    shared = Problem(small, 2, rates=rates, costs=priced)
    monkeypatch.setattr(meshloom.tensor_parallel.search.problem, "repeats_of", lambda *_: Repeats())
    alone = Problem(small, 2, rates=rates, costs=priced)
    assert sum(map(len, own_costs(alone))) > 1.8 * sum(map(len, own_costs(shared)))
    one, other = shared.solve()[1], alone.solve()[1]
    # separately, the first and last block adapt to their surroundings
    assert other <= one * (1 + 1e-9) and one <= 1.01 * other


class Scaled(nn.Module):
    """Linear layers, each with a buffer that its result is multiplied by. turned: from the last to the
    first."""

    def __init__(self, blocks: int, *, turned: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.ReLU(), Scale(64), nn.Linear(64, 16)) for _ in range(blocks)
        )
        self.turned = turned

    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks) if self.turned else self.blocks:
            x = block(x)
        return x


class Scale(nn.Module):
    """By a buffer [width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@pytest.mark.parametrize("turned", [False, True])
def test_eleven_blocks_with_buffers_share_the_unknowns_of_one(turned: bool):
    """`blocks.10` sorts before `blocks.2`, and the last block may be used first: representatives were
    looked up too early, so that no block was represented. DeepSeek's twelve had 1,892 options instead
    of 342, and the solver's time ran out."""
    counts = [
        len(
            Problem(
                layout_by_shapes(lambda n=n: Scaled(n, turned=turned), mean, normal(4, 16)), 2, rates=FAST
            ).formulation.decisions.options
        )
        for n in (2, 11)
    ]
    assert counts[0] == counts[1]


class Causal(nn.Module):
    """Convolutions over the past [samples, width, time], each padded at its beginning, and truncated at
    its end."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv1d(16, 16, 4, padding=3, groups=16) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)[:, :, : x.shape[2]]
        return x


def test_a_cut_with_an_axis_that_a_value_has_not_is_one_for_all_blocks():
    """Time and the padding of one block's convolution can be sharded together. For values between blocks,
    which have no padding, these cuts are equal, and yet were as many strategies as there are blocks:
    the first of Mamba's layers had fewer than the second, so that neither represented the other."""
    problems = [
        Problem(layout_by_shapes(lambda n=n: Causal(n), mean, normal(3, 16, 9)), 2, rates=FAST)
        for n in (3, 9)
    ]
    few, many = ([len(row) for row in problem.strategies.values()] for problem in problems)
    assert max(few) == max(many)


class Recurrent(nn.Module):
    """[samples, time, width]: a state that decays, as a loop, with all states stacked at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.keep, self.down = nn.Linear(16, 64), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        given, kept = self.up(x), torch.sigmoid(self.keep(x))
        state, states = torch.zeros_like(given[:, 0]), list[Tensor]()
        for step in range(x.shape[1]):
            state = kept[:, step] * state + given[:, step]
            states.append(state)
        return self.down(torch.stack(states, 1))


@pytest.mark.slow
def test_iterations_of_a_loop_share_the_unknowns_of_one():
    """Each of Mamba's 1,024 iterations had its own decisions: a gigabyte of tables, and no end in minutes."""
    found = [layout_by_shapes(Recurrent, mean, normal(4, length, 16)) for length in (8, 40)]
    rates = replace(FAST, flops_per_second=1e7, bytes_per_second=1e7)
    problems = [Problem(layout, 2, rates=rates, costs=costs(layout.program)) for layout in found]
    alone, other = map(own_costs, problems)
    assert len(alone) == len(other)
    choice = choose(found[0], 2, rates)
    assert {
        choice.strategies[node.name].work for node in found[0].program.nodes if node.operator == "mul.Tensor"
    } == {0.5}
    assert problems[0].solve()[1] <= total_cost([0] * len(alone), alone, problems[0].formulation.reshards)


def test_what_iterations_share_costs_what_they_cost_alone(monkeypatch: pytest.MonkeyPatch):
    layout = layout_by_shapes(Recurrent, mean, normal(4, 8, 16))
    rates = replace(FAST, flops_per_second=1e7, bytes_per_second=1e7)
    shared = Problem(layout, 2, rates=rates, costs=costs(layout.program)).solve()[1]
    monkeypatch.setattr(meshloom.tensor_parallel.search.problem, "repeats_of", lambda *_: Repeats())
    alone = Problem(layout, 2, rates=rates, costs=costs(layout.program)).solve()[1]
    # sums in another order; separately, the first and last step adapt to their surroundings
    assert alone * (1 - 1e-9) <= shared <= 1.01 * alone


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.one, y * self.other


class Crossed(nn.Module):
    """Gates, each of which gets the results of the one before the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gates = nn.Linear(16, 16), nn.ModuleList(Gate() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        for gate in self.gates:
            y, x = gate(x, y)
        return x.unsqueeze(-1) * y.unsqueeze(-2)


def test_blocks_that_use_two_axes_the_other_way_round_represent_themselves():
    """Each axis represented the other, and who represents both was looked for without end."""
    layout = layout_by_shapes(Crossed, mean, normal(4, 16))
    assert choose(layout, 2, FAST).is_proved


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_any_shards_that_are_held_can_be_computed_with(model: str, seed: int):
    """Those of a division drawn at random, where no cheapest one would have them: parameters are gathered if there is no other way."""

    def with_held(layout: Layout, num_ranks: int) -> DivisionChoice:
        held = partition(at_random(seed)(layout, num_ranks)).held
        found = choose(layout, num_ranks, RATES, held=held)
        assert partition(found).held == held
        return found

    compared = compare(subject_of(make_job(model, "sgd")), 2, with_held)
    assert compared.error < 1e-12, compared.what


def test_a_choice_travels_as_numbers(small: Layout):
    told: list[tuple[int, int]] = []
    choice = choose(small, 2, FAST, placements={"blocks.0.up": "row"}, told=lambda *count: told.append(count))
    every = len(small.program.nodes)
    assert told[:every] == [(done, every) for done in range(1, every + 1)]
    searched = told[every:]  # one round, which decides all variables
    assert searched == [(done, len(searched)) for done in range(1, len(searched) + 1)] and searched
    other = choice_of_numbers(small, 2, numbers_of_choice(choice), placements={"blocks.0.up": "row"})
    assert (other.strategies, other.input_placements) == (choice.strategies, choice.input_placements)


# Megatron's pattern (Shoeybi et al., 2019).


@pytest.mark.slow
def test_a_transformer_is_divided_as_megatron_does(benchmark: Layout):
    priced = costs(benchmark.program)
    for num_ranks in (2, 3):
        choice = choose(benchmark, num_ranks, priced=priced)
        found = shapes_of(choice)
        part, wide = gpt.SMALL.width // num_ranks, 4 * gpt.SMALL.width // num_ranks
        for block in range(gpt.SMALL.blocks):
            assert all(found[f"blocks.{block}.{each}.weight"] == (part, gpt.SMALL.width) for each in "qkv")
            assert found[f"blocks.{block}.out.weight"] == (gpt.SMALL.width, part)
            assert found[f"blocks.{block}.up.weight"] == (wide, gpt.SMALL.width) and found[
                f"blocks.{block}.down.weight"
            ] == (gpt.SMALL.width, wide)
        assert found["head.weight"][0] < gpt.SMALL.vocabulary and found["token.weight"] != (
            gpt.SMALL.vocabulary,
            gpt.SMALL.width,
        )
        assert divided_share(choice, "blocks.") > 0.99


def divided_share(choice: DivisionChoice, prefix: str) -> float:
    sizes = {
        name: each.meta.shape
        for name, each in choice.layout.program.parameters.items()
        if name.startswith(prefix)
    }
    found = shapes_of(choice)
    whole = sum(torch.Size(shape).numel() for shape in sizes.values())
    return sum(torch.Size(shape).numel() for name, shape in sizes.items() if found[name] != shape) / whole


class DroppingBlock(gpt.Block):
    """A block of the benchmark GPT with dropout before each sum."""

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (
            each(normed).unflatten(-1, (gpt.SMALL.heads, -1)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        found = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + F.dropout(found, 0.1, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))), 0.1, self.training)


class DroppingGPT(gpt.GPT):
    """The benchmark GPT with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DroppingBlock() for _ in range(gpt.SMALL.blocks))


@pytest.mark.slow
def test_sequences_are_divided_where_links_start_quickly():
    """Half of norms, dropout and sums is saved; scatters and gathers instead of all-reduces start twice as
    many collectives of the same volume."""
    batch = 16
    layout = layout_by_shapes(
        DroppingGPT, gpt_loss, {"x": torch.zeros(batch, gpt.SMALL.length + 1, dtype=torch.int64)}
    )
    priced = costs(layout.program)
    quick = replace(default_rates("cuda"), start_seconds=1e-6, latency_seconds=1e-7)
    slow = replace(quick, start_seconds=3e-5)
    size = batch * gpt.SMALL.length * gpt.SMALL.width * 4
    sent: dict[str, Counter[tuple[str, int]]] = {}
    choices = {
        name: choose(layout, 2, rates, priced=priced) for name, rates in (("quick", quick), ("slow", slow))
    }
    for name, choice in choices.items():
        program = partition(choice).programs[0]
        paths = {node.name: node.path for node in program.nodes}
        sent[name] = Counter(
            (each.collective, each.num_bytes)
            for each in sent_in_chunk(program, 0)
            if paths[each.node].startswith("blocks.2") and not each.backward
        )
    assert sent["slow"] == {("all_reduce", size): 2}
    assert sent["quick"] == {("all_gather", size // 2): 2, ("reduce_scatter", size): 2}
    norms = [node.name for node in layout.program.nodes if node.operator == "layer_norm"]
    assert {choices["quick"].strategies[name].work for name in norms[1:-1]} == {0.5}
    assert {choices["slow"].strategies[name].work for name in norms[1:-1]} == {1.0}
    problem = Problem(layout, 2, rates=quick, costs=priced)
    # sums in another order
    assert price_of(problem, choices["quick"]) == pytest.approx(choices["quick"].seconds, rel=1e-9)
    assert choices["quick"].seconds < price_of(problem, choices["slow"])


def price_of(problem: Problem, choice: DivisionChoice) -> float:
    """The cost of a choice made at other rates."""
    rows = (*problem.placements.values(), *problem.strategies.values())
    taken = {row[at][1] for row, at in zip(rows, choice.chosen[1:], strict=True)}
    values = [
        next(place for place, unknown in enumerate(row) if unknown in taken)
        for row in problem.formulation.decisions.options
    ]
    return total_cost(
        values,
        own_costs(problem),
        problem.formulation.reshards,
    )


def test_an_embedding_that_is_also_the_head_is_divided_by_vocabulary():
    layout = layout_by_shapes(lambda: GPT(tied=True), next_token, tokens())
    choice = choose(layout, 2, FAST)
    assert shapes_of(choice)["token.weight"] == (15, 16)
    loss = next(node for node in layout.program.nodes if node.operator == "cross_entropy_loss")
    assert choice.strategies[loss.name].work == 0.5  # each rank computes its shard of the classes


@pytest.mark.parametrize(("kv_heads", "num_ranks"), [(1, 2), (2, 4)])
def test_fewer_key_heads_than_ranks(kv_heads: int, num_ranks: int):
    layout = layout_by_shapes(lambda: GPT(heads=4, kv_heads=kv_heads), next_token, tokens())
    choice = choose(layout, num_ranks, FAST)
    found = shapes_of(choice)
    assert found["blocks.0.attention.q.weight"] == (16 // num_ranks, 16)
    assert torch.Size(found["blocks.0.attention.out.weight"]).numel() == 256 // num_ranks
    assert divided_share(choice, "blocks.") > 0.7


def test_convolutions_are_divided_by_channels():
    layout = layout_by_shapes(ConvNet, square, normal(4, 3, 8, 8))
    choice = choose(layout, 2, FAST)
    found = shapes_of(choice)
    assert found["first.weight"][0] == 6 and found["norm.weight"] == (6,) and found["second.weight"][1] == 6


# Pins.


@pytest.mark.parametrize(
    ("pins", "expected"),
    [
        ({"blocks.*.up": "row"}, {"blocks.1.up.weight": (64, 8), "blocks.1.up.bias": (64,)}),
        ({"blocks.*.down": "column"}, {"blocks.2.down.weight": (8, 64), "blocks.2.down.bias": (8,)}),
        (
            {"blocks.*.attention": "heads"},
            {"blocks.0.attention.q.weight": (8, 16), "blocks.0.attention.out.weight": (16, 8)},
        ),
        (
            {"blocks.*.attention": "replicated"},
            {"blocks.0.attention.q.weight": (16, 16), "blocks.0.attention.out.weight": (16, 16)},
        ),
        ({"token": "vocabulary", "head": "vocabulary"}, {"token.weight": (15, 16), "head.weight": (15, 16)}),
        ({"token": "dim1"}, {"token.weight": (30, 8)}),
        ({"blocks.1.up": "row"}, {"blocks.0.up.weight": (32, 16), "blocks.1.up.weight": (64, 8)}),
    ],
)
def test_pins_are_kept(small: Layout, pins: dict[str, str], expected: dict[str, tuple[int, ...]]):
    found = shapes_of(choose(small, 2, FAST, placements=pins))
    assert {name: found[name] for name in expected} == expected


def test_channels_are_pinned():
    layout = layout_by_shapes(ConvNet, square, normal(4, 3, 8, 8))
    found = shapes_of(choose(layout, 2, FAST, placements={"second": "channels", "first": "replicated"}))
    assert found["second.weight"] == (4, 12, 3, 3) and found["first.weight"] == (12, 3, 3, 3)


def test_a_pin_that_blocks_divided_alike_cannot_follow_is_followed_by_blocks_that_are_not():
    """An axis of one block represented another's, and values between them only had options for the first."""
    layout = subject_of(FAMILIES["mixer"].make_job(True)).layout
    pins = {"channels.1.0.weight": "dim1"}
    made = choose(layout, 2, RATES, placements=pins)
    pinned = layout.program.parameters["channels.1.0.weight"]
    pieces = made.pieces(pinned.value, made.input_placements[pinned.value])
    assert (
        pieces.local_shape(0)[0] == pinned.meta.shape[0] and pieces.local_shape(0)[1] < pinned.meta.shape[1]
    )
    again = choice_of_numbers(layout, 2, numbers_of_choice(made), placements=pins)
    assert (again.strategies, again.input_placements) == (made.strategies, made.input_placements)


@pytest.mark.slow
def test_a_tied_matrix_is_pinned_by_what_the_named_module_does():
    layout = layout_by_shapes(lambda: GPT(tied=True), next_token, tokens())
    assert shapes_of(choose(layout, 2, FAST, placements={"head": "row"}))["token.weight"] == (30, 8)
    assert shapes_of(choose(layout, 2, FAST, placements={"head": "column"}))["token.weight"] == (15, 16)


@pytest.mark.parametrize(
    ("pins", "num_ranks", "sentence"),
    [
        ({"blocks.*.upp": "row"}, 2, r"^tp_placements=blocks\.\*\.upp:row matches no module with parameters\. Did you mean blocks\.\d\.up\?$"),
        (
            {"blocks.*.up": "row", "blocks.1": "replicated"}, 2,
            r"^tp_placements=blocks\.\*\.up:row and blocks\.1:replicated both match blocks\.1\.up\.weight\. Leave one of them out\.$",
        ),
        (
            {"blocks.*.first": "row"}, 2,
            r"^tp_placements=blocks\.\*\.first:row is impossible: blocks\.0\.first\.weight has no in features where layer_norm uses it at .*choice_jobs\.py:\d+ "
            r"\(x = x \+ self\.attention\(self\.first\(x\)\)\)\. Leave that pin out, or use replicated\.$",
        ),
        ({"token": "dim2"}, 2, r"token\.weight has no dimension 2 where embedding uses it at .*choice_jobs\.py:\d+"),
        ({"token": "vocabulary"}, 40, r"^tp_placements=token:vocabulary is impossible: token\.weight has 30 vocabulary, fewer than tp=40\."),
    ],
)  # fmt: skip
def test_a_pin_that_cannot_be_says_why(small: Layout, pins: dict[str, str], num_ranks: int, sentence: str):
    with pytest.raises(PlanError, match=sentence):
        choose(small, num_ranks, FAST, placements=pins)


def test_an_operator_that_needs_all_of_a_parameter_is_named():
    layout = layout_by_shapes(lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6)), square, normal(2, 4))
    with pytest.raises(
        PlanError,
        match=r"^tp_placements=1:dim0 is impossible: layer_norm at .* needs all dimension 0 of 1\.weight\.",
    ):
        choose(layout, 2, FAST, placements={"1": "dim0"})


# Memory.


def test_memory_is_kept_under_the_limit():
    """Holding parameters costs nothing here and communication much, so that only the limit makes it shard
    them."""
    rates = replace(
        FAST, memory_price=0.0, link_bytes_per_second=1e6, bytes_per_second=1e12, flops_per_second=1e15
    )
    small = layout_by_shapes(
        lambda: nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)), square, normal(9, 16)
    )
    priced = costs(small.program)
    free = choose(small, 2, rates, priced=priced)
    assert shapes_of(free)["0.weight"] == (64, 16)
    sizes = sum(torch.Size(each.meta.shape).numel() for each in small.program.parameters.values()) * 4 * 4
    limited = choose(small, 2, rates, priced=priced, memory_bytes=0.8 * sizes)
    held_bytes = sum(torch.Size(shape).numel() for shape in shapes_of(limited).values()) * 4 * 4
    assert held_bytes <= 0.8 * sizes and limited.seconds >= free.seconds


def test_a_limit_that_cannot_be_met_says_what_is_needed(small: Layout):
    with pytest.raises(
        PlanError,
        match=r"^With tp=2 a rank holds [\d.]+ (KiB|MiB) or more of parameters, gradients, optimizer state and saved activations, "
        r"and the limit is 9\.77 KiB\. Use a larger tp, or smaller microbatches\.$",
    ):
        choose(small, 2, FAST, memory_bytes=1e4)


def test_placements_that_are_decided_are_kept(small: Layout):
    first = partition(choose(small, 2, FAST, placements={"blocks.*.up": "row"}))
    # pins apply to the first program
    again = choose(small, 2, FAST, held=first.held, placements={"blocks.*.up": "column"})
    assert shapes_of(again) == shapes_of(first.choice)


def test_partial_values_are_not_numbers_of_another_kind():
    """Partial sums of integers are never left to be summed later."""
    layout = layout_by_shapes(GPT, next_token, tokens())
    choice = choose(layout, 2, FAST)
    assert all(
        layout.metas[name][0].dtype.is_floating_point
        for name, each in choice.strategies.items()
        if each.output == PARTIAL
    )
