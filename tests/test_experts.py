"""Mixtures of experts divided by expert, against one device: however tokens are sent to experts, and however
the model writes it."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.errors import PlanError
from meshloom.core.job import Job
from meshloom.tensor_parallel.layout.layout import Layout
from meshloom.tensor_parallel.layout.placement import Part
from meshloom.tensor_parallel.partition import Partition
from meshloom.tensor_parallel.search.choose import DivisionChoice, choose
from meshloom.tensor_parallel.sent_bytes import sent_in_chunk
from tests.division import RATES, Subject, compare, subject_of

EXPERTS, WIDTH, HIDDEN, TOKENS = 5, 7, 5, 11
TOLERANCE = 1e-12  # float64; sums over ranks in another order

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]


class LookedUp(nn.Module):
    """Every token's matrices are looked up. x [t, d], weights [t, k], ids [t, k] -> [t, d]."""

    # a norm has no derivative at zero: rows that are elsewhere must not be computed from zeros
    normed = False

    def __init__(self, experts: int = EXPERTS, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 2 * hidden))
        self.up_bias = nn.Parameter(torch.randn(experts, 2 * hidden))
        self.down = nn.Parameter(torch.randn(experts, hidden, WIDTH))

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        count = ids.shape[1]
        rows, slots = x.repeat_interleave(count, 0), ids.reshape(-1)
        gate, up = (torch.bmm(rows.unsqueeze(1), self.up[slots]).squeeze(1) + self.up_bias[slots]).chunk(
            2, -1
        )
        found = torch.bmm((F.silu(gate) * up).unsqueeze(1), self.down[slots]).squeeze(1)
        found = found / found.norm(dim=-1, keepdim=True) if self.normed else found
        return (found * weights.reshape(-1, 1)).view(len(x), count, -1).sum(1)


class Normed(LookedUp):
    """With a norm of what every expert makes."""

    normed = True


class Sorted(LookedUp):
    """Tokens are sorted by expert, and multiplied in groups."""

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        importlib.import_module("transformers.integrations.moe")  # which makes the operator
        count, product = ids.shape[1], torch.ops.transformers.grouped_mm_fallback
        slots, order = ids.reshape(-1).sort()
        ends = torch.histc(slots.float(), self.up.shape[0], 0, self.up.shape[0] - 1).cumsum(
            0, dtype=torch.int32
        )
        gate, up = (product(x[order // count], self.up, ends) + self.up_bias[slots]).chunk(2, -1)
        found = product(F.silu(gate) * up, self.down, ends) * weights.reshape(-1)[order].unsqueeze(-1)
        return found[order.argsort()].view(len(x), count, -1).sum(1)


class Dense(LookedUp):
    """Every expert reads every token, and counts as much as the router says."""

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        weights = torch.zeros(len(x), self.up.shape[0], dtype=x.dtype).scatter(1, ids, weights)
        gate, up = (torch.einsum("td,edf->etf", x, self.up) + self.up_bias.unsqueeze(1)).chunk(2, -1)
        return torch.einsum("etd,te->td", torch.bmm(F.silu(gate) * up, self.down), weights)


class Mixture(nn.Module):
    """A router and its experts, between two linear layers."""

    def __init__(self, experts: nn.Module, num_experts: int, chosen: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.first, self.router, self.experts = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, num_experts),
            experts,
        )
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        x = self.first(x)
        weights, found = self.router(x).softmax(-1).topk(self.chosen)
        return self.last(x + self.drop(self.experts(x, weights, found if ids is None else ids)))


def routed(model: Any, batch: Any) -> Tensor:
    """The router sends tokens to experts."""
    return model(batch["x"].flatten(0, 1)).square().mean()


def told(model: Any, batch: Any) -> Tensor:
    """The batch says which expert reads a token."""
    return model(batch["x"].flatten(0, 1), batch["ids"].flatten().unsqueeze(1)).square().mean()


def job_of(
    experts: type[LookedUp],
    *,
    chosen: int = 2,
    num_experts: int = EXPERTS,
    hidden: int = HIDDEN,
    only: int | None = None,
) -> Job:
    """only: the expert that reads all tokens; the router says otherwise."""
    made = torch.Generator().manual_seed(1)
    data = [
        {"x": torch.randn(TOKENS, WIDTH, generator=made), "ids": torch.full((TOKENS,), only or 0)}
        for _ in range(12)
    ]
    return Job(
        model=lambda: Mixture(experts(num_experts, hidden), num_experts, chosen), loss=routed if only is None else told,
        optimizer=lambda named: torch.optim.AdamW([each for _, each in named], lr=1e-2), data=lambda: data, batch_size=4, steps=3, clip_grad_norm=0.1,
    )  # fmt: skip


def held(choice: DivisionChoice) -> dict[str, list[tuple[int, ...]]]:
    """Shapes of the experts' parameters, rank by rank."""
    pieces = {
        name: choice.pieces(each.value, choice.input_placements[each.value])
        for name, each in choice.layout.program.parameters.items()
        if name.startswith("experts.")
    }
    return {
        name.removeprefix("experts."): [each.local_shape(rank) for rank in range(choice.num_ranks)]
        for name, each in pieces.items()
    }


def divided(
    subject: Subject, num_ranks: int, up: str = "experts", down: str = "experts"
) -> tuple[float, Partition]:
    def decide(layout: Layout, count: int) -> DivisionChoice:
        return choose(layout, count, RATES, placements={"experts.up": up, "experts.down": down})

    compared = compare(subject, num_ranks, decide)
    return compared.error, compared.partition


KINDS = {
    "looked up": job_of(LookedUp),
    "looked up, one each": job_of(LookedUp, chosen=1),
    "normed": job_of(Normed),
    "sorted": job_of(Sorted),
    "dense": job_of(Dense),
    "all to the first": job_of(LookedUp, chosen=1, only=0),
    "all to the last": job_of(Sorted, chosen=1, only=EXPERTS - 1),
    "counted from the end": job_of(LookedUp, chosen=1, only=-2),
}


@pytest.mark.covering("normed", "looked up", "sorted", "all to the last")
@pytest.mark.parametrize("kind", KINDS)
def test_experts_divided_by_expert_equal_one_device(kind: str):
    """Five experts on 2, 3 and 4 ranks; where one reads all tokens, the other ranks have no row."""
    subject = subject_of(KINDS[kind])
    for num_ranks, counts in ((2, [3, 2]), (3, [2, 2, 1]), (4, [2, 1, 1, 1])):
        error, part = divided(subject, num_ranks)
        assert error <= TOLERANCE
        found = held(part.choice)
        assert [shape[0] for shape in found["up"]] == counts
        assert [shape[1:] for shape in found["up"]] == [(WIDTH, 2 * HIDDEN)] * num_ranks
        assert [shape[0] for shape in found["down"]] == counts


def test_a_rank_works_on_the_rows_that_are_sent_to_its_experts():
    """Of what lies between the two products, ranks together have every row once."""
    subject = subject_of(KINDS["looked up"])
    rows: list[tuple[int, int]] = []
    compare(
        subject, 3, lambda layout, count: choose(layout, count, RATES, placements={"experts": "experts"}),
        visit=lambda rank, node, value: rows.append((rank, len(value))) if node.operator == "silu" else None,
    )  # fmt: skip
    with torch.no_grad():
        model = subject.model
        ids = (
            model.get_submodule("router")(
                model.get_submodule("first")(subject.batch["x"].double().flatten(0, 1))
            )
            .topk(2)
            .indices
        )
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS).tolist()
    assert sorted(rows) == [(0, sum(counts[:2])), (1, sum(counts[2:4])), (2, counts[4])]


def test_dividing_by_expert_sends_no_more_than_dividing_each_expert():
    """Rows are not sent around: what experts make is summed, as after a layer that is split by rows."""
    subject = subject_of(KINDS["looked up"])
    sent = []
    for up, down in (("experts", "experts"), ("dim2", "dim1")):
        error, part = divided(subject, 2, up, down)
        assert error <= TOLERANCE
        sent.append(sum(each.num_bytes for each in sent_in_chunk(part.programs[0], 0)))
    assert sent[0] <= sent[1]


@pytest.mark.slow
def test_experts_are_divided_by_expert_where_that_is_more_even():
    """A hidden unit more than two ranks can share evenly costs one of them a half more; four experts are two
    each. And the other way round."""
    for kind in (LookedUp, Sorted):
        odd = choose(subject_of(job_of(kind, num_experts=4, hidden=3)).layout, 2, RATES)
        assert {shape[0] for shape in held(odd)["down"]} == {2}
        even = choose(subject_of(job_of(kind, num_experts=3, hidden=8)).layout, 2, RATES)
        assert {shape[0] for shape in held(even)["down"]} == {3}


def test_a_rank_is_expected_to_have_its_share_of_rows():
    layout = subject_of(KINDS["looked up"]).layout
    choice = choose(layout, 2, RATES, placements={"experts": "experts"})
    products = [choice.strategies[node.name] for node in layout.program.nodes if node.operator == "bmm"]
    assert [each.work for each in products] == [3 / 5, 3 / 5]
    assert all(isinstance(each.output, Part) for each in products)


def test_more_ranks_than_experts_cannot_have_one_each():
    layout = subject_of(job_of(LookedUp, num_experts=3)).layout
    with pytest.raises(PlanError, match="has 3 experts, fewer than tp=4"):
        choose(layout, 4, RATES, placements={"experts.up": "experts"})


def test_a_layer_without_experts_says_so():
    layout = subject_of(KINDS["dense"]).layout
    with pytest.raises(PlanError, match=r"first.weight has no experts where linear uses it"):
        choose(layout, 2, RATES, placements={"first": "experts"})
