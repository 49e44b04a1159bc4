"""Hidden units of modules that run as written are divided along tp: experts each of which runs on the rows that are routed to it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.data.samples import first_batches
from meshloom.planner.describe import describe
from meshloom.planner.divided import divided
from meshloom.planner.readings import Readings
from meshloom.program.opaque.asked_of_units import AskedOfUnits
from meshloom.program.opaque.hidden_units import HiddenUnits
from meshloom.program.opaque.operator import call_of_node, is_opaque
from meshloom.program.store.captured_loss import CapturedLoss
from meshloom.verify.run import verify
from tests.opaque_jobs import WIDTH, Net, job_of

pytestmark = [pytest.mark.usefixtures("silent_export", "dear_memory")]

HIDDEN = 7


class Mlp(nn.Module):
    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Routed(nn.Module):
    """Experts that are modules, beside their router and a residual path. never: an expert that no row is routed to."""

    def __init__(self, hidden: int = HIDDEN, never: int | None = None) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(Mlp(hidden) for _ in range(4))
        if never is not None:
            self.register_buffer("blocked", torch.zeros(4).index_fill(0, torch.tensor([never]), -1e9))
        self.never = never

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        scores = self.gate(rows)
        scores = scores if self.never is None else scores + self.blocked
        weights, chosen = scores.softmax(-1).topk(2)
        result = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            if len(row) > 0:
                result.index_add_(0, row, expert(rows[row]) * weights[row, place, None])
        return x + result.view_as(x)


class Stacked(nn.Module):
    """Experts in tensors, as transformers has them in eager form: a loop over those that some row has chosen. side_by_side: each
    unit's gate lies beside its value."""

    def __init__(self, hidden: int = HIDDEN, *, side_by_side: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.gate_up = nn.Parameter(0.3 * torch.randn(4, 2 * hidden, WIDTH))
        self.down = nn.Parameter(0.3 * torch.randn(4, WIDTH, hidden))
        self.bias = nn.Parameter(torch.randn(4, 2 * hidden))
        self.side_by_side = side_by_side

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(rows).softmax(-1).topk(2)
        result = torch.zeros_like(rows)
        for expert in chosen.unique():
            row, place = torch.where(chosen == expert)
            h = F.linear(rows[row], self.gate_up[expert], self.bias[expert])
            gate, up = (h[:, ::2], h[:, 1::2]) if self.side_by_side else h.chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self.down[expert])
            result.index_add_(0, row, y * weights[row, place, None])
        return result.view_as(x)


class WithLosses(Routed):
    """Returns its router's scores, too, and leaves a loss."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.balance = self.gate(x).softmax(-1).square().mean()
        return y


class CheckedMlp(Mlp):
    """An `if` that only raises is no look at the units."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        if not torch.isfinite(h).all():
            raise ValueError("not finite")
        return self.down(h)


class UsesLosses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = WithLosses()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (1 + self.inner.balance)


class Frozen(Stacked):
    def __init__(self) -> None:
        super().__init__()
        self.down.requires_grad_(False)


DIVIDED: dict[str, Callable[[], nn.Module]] = {
    "modules": Routed,
    "modules, as many units as features": lambda: Routed(WIDTH),
    "modules, one never chosen": lambda: Routed(never=2),
    "modules, two units": lambda: Routed(2),
    "tensors": Stacked,
    "tensors, as many units as features": lambda: Stacked(WIDTH),
    "tensors, twice as many features as units": lambda: Stacked(WIDTH // 2),
    "tensors, as many units as experts": lambda: Stacked(4),
    "tensors, side by side": lambda: Stacked(side_by_side=True),
    "frozen": Frozen,
    "with losses": UsesLosses,
    "modules, checked": lambda: with_experts(CheckedMlp),
}


class NormedInside(Routed):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, HIDDEN), self.norm, nn.Linear(HIDDEN, WIDTH)) for _ in range(4))  # fmt: skip


class NormedAfter(Routed):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(super().forward(x), (WIDTH,))


def with_experts(kind: Callable[[], nn.Module]) -> Routed:
    routed = Routed()
    routed.experts = nn.ModuleList(kind() for _ in range(4))
    return routed


class SoftmaxInside(Stacked):
    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        if rows.sum().item() > 1e9:
            return x
        h = (rows @ self.gate_up[0].T).softmax(-1)[:, :HIDDEN]
        return (h @ self.down[1].T).view_as(x)


WHOLE: dict[str, Callable[[], nn.Module]] = {
    "normed inside": NormedInside,
    "normed after": NormedAfter,
    "softmax": SoftmaxInside,
    "draws": lambda: nn.Sequential(Routed(), _Drops()),
}


class _Drops(nn.Module):
    """Dropout of hidden units, which draws for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(F.gelu(self.mlp.up(x)), 0.3)
        return self.mlp.down(h) if h.sum().item() < 1e9 else h


def pinned(plan: str, name: str) -> str:
    """The plan with the units divided, whatever it costs."""
    if "tp=" not in plan or (
        "two units" in name and "tp=2" not in plan
    ):  # a unit for each rank, or the plan decides
        return plan
    pin = "parts.0.down:dim2" if name.startswith("tensors") or name == "frozen" else "parts.*.down.weight:row"
    return f"{plan},tp_placements={pin}"


def job(part: Callable[[], nn.Module]) -> Job:
    return job_of(lambda: Net([part()], "r0r"), opaque=[f"parts.0{'.inner' if part is UsesLosses else ''}"])


def units_of(job: Job) -> list[HiddenUnits | None]:
    program = CapturedLoss(job).capture(first_batches(job, 2, 8))
    return [call_of_node(node).units for node in program.nodes if is_opaque(node)]


def equal(job: Job, plan: str, steps: int = 2) -> bool:
    report = verify(job, Plan.parse(plan), devices="simulated", steps=steps, dtype=torch.float64)
    assert report is not None
    return report.passed


def check_divided(name: str) -> None:
    (units,) = units_of(job(DIVIDED[name]))
    assert units is not None
    assert units.rest < 0.34
    part = divided(Readings(job(DIVIDED[name])), Plan.parse(pinned("tp=2", name))).part
    down = re.compile(r"parts\.0\..*down(?!.*bias)")
    held = [
        pieces.num_elements(0) / math.prod(pieces.shape)
        for name, pieces in part.parameters.items()
        if down.match(name)
    ]
    assert held and max(held) < 0.7


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(DIVIDED))
def test_experts_of_every_kind_are_divided(name: str) -> None:
    check_divided(name)


@pytest.mark.covering("with losses")
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "plan"),
    [("modules, one never chosen", "tp=3"), ("tensors", "dp=2,pp=2,tp=2"), ("with losses", "tp=2")],
)
@pytest.mark.slow
def test_divided_experts_equal_one_device(name: str, plan: str) -> None:
    assert equal(job(DIVIDED[name]), pinned(plan, name))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(WHOLE))
def test_what_is_no_sum_over_units_stays_whole(name: str) -> None:
    assert units_of(job(WHOLE[name])) == [None]
    assert equal(job(WHOLE[name]), "tp=2")


def test_what_is_asked_of_units_is_seen() -> None:
    up, router = torch.randn(3, 4), torch.randn(3, 4)
    x = torch.randn(5, 4)

    def asks(code: Callable[[], Any]) -> bool:
        asked = AskedOfUnits([up])
        with asked.watching():
            code()
        return asked.has_asked

    def written_in_place() -> float:
        rows = torch.zeros(5, 3)
        rows[1] += x[1] @ up.T
        return float(rows[2, 2])

    def only_raises() -> None:
        if (x @ up.T).isnan().any():
            raise AssertionError

    def hooked() -> None:
        h = x.clone().requires_grad_() @ up.T.clone().requires_grad_()
        h.register_hook(lambda g: g * 0.5 if g.norm() > 3 else g)
        (h @ up).sum().backward()

    assert asks(lambda: bool((x @ up.T).norm() > 60))
    assert asks(lambda: (x @ up.T).relu().tolist())
    assert asks(lambda: (x @ up.T).numpy())
    assert asks(lambda: (x @ up.T).nonzero())
    assert asks(written_in_place)
    assert asks(hooked)
    assert not asks(only_raises)
    assert not asks(lambda: bool((x @ router.T).norm() > 60) or x @ up.T)
    assert not asks(lambda: (x @ up.T)[(x @ router.T).argmax(-1) == 1])


@pytest.mark.slow
def test_describe_says_how_much_belongs_to_units() -> None:
    (note,) = describe(Readings(job(Stacked))).opaque
    assert note.startswith("parts.0 runs as written, as one operator of which tp divides the hidden units: ")
    assert "belong to hidden units." in note
