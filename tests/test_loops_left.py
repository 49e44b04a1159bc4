"""What forwards set on their modules, which tp and pp run as programs: it is as on one device, or an error names it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from meshloom.core.errors import CaptureError, MeshloomError, TrainingError
from meshloom.core.plan import Plan
from meshloom.launch.opening import open_world
from meshloom.loops.divided_module import DividedModule
from meshloom.loops.ranks import LoopRanks
from tests.test_loops_divided import Call, check, on_ranks, seeded

pytestmark = pytest.mark.long
PLANS = ["tp=2", "pp=2,microbatches=2"]


class Left(nn.Module):
    """leave: what it does in each forward besides computing."""

    def __init__(self, leave: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.one, self.other, self.leave = nn.Linear(6, 64), nn.Linear(64, 64), leave
        self.number: float = 2
        self.cached: int | None = None
        self.table: Tensor | None = None
        self.shown = torch.zeros(())
        self.seen, self.sizes = list[Any](), dict[str, Any]()

    def forward(self, x: Tensor) -> Tensor:
        y = self.other(torch.tanh(self.one(x)))
        scale = self.leave(self, y)
        return y if scale is None else y * scale


class Outer(nn.Module):
    def __init__(self, leave: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.head = nn.Sequential(Left(leave)), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


def rows(count: int) -> Tensor:
    return torch.linspace(-1, 1, count * 6, dtype=torch.float64).reshape(count, 6)


def from_shapes(module: Any, y: Tensor) -> int:
    module.number = y.shape[0] // 2  # 2 before, and of the first batch
    module.cached = y.shape[1] + 1
    module.added = y.shape[0]  # was not there before
    module.sizes = {"training": module.training, "shape": [*y.shape]}
    return module.cached


@pytest.mark.parametrize("plan", [PLANS[0], pytest.param(PLANS[1], marks=pytest.mark.slow)])
def test_plain_values_that_follow_from_shapes_are_those_of_one_device(plan: str) -> None:
    def script(models: list[nn.Module], calls: list[Call], replica: int) -> Any:
        inner: Any = models[0].get_submodule("inner.0")
        seen = list[Any]()
        for number, count in enumerate([4, 4, 6, 4, 5]):
            models[0].train(number < 3)
            results = calls[0](rows(count))
            results.sum().backward()
            seen += [
                results.detach().sum(),
                inner.number,
                inner.cached,
                inner.sizes["shape"],
                inner.sizes["training"],
                inner.added,
            ]
        return seen

    check(plan, seeded(lambda: [Outer(from_shapes)]), script)


def appends(module: Left, y: Tensor) -> None:
    module.seen.append(y.shape[0])


def fills(module: Left, y: Tensor) -> None:
    module.sizes["rows"] = y.shape[0]


def reads_values(module: Left, y: Tensor) -> None:
    module.number = y.detach().mean().item()


def shows(module: Left, y: Tensor) -> None:
    module.shown = y.detach().mean()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("leave", "read", "name"),
    [
        (appends, lambda module: len(module.seen), "seen"),
        (fills, lambda module: module.sizes["rows"], "sizes"),
        (reads_values, lambda module: module.number + 1, "number"),
        (reads_values, lambda module: f"{module.number}", "number"),
        (shows, lambda module: module.shown.item(), "shown"),
    ],
)
def test_what_follows_from_more_than_shapes_is_refused_when_it_is_read(
    plan: str, leave: Any, read: Callable[[Any], Any], name: str
) -> None:
    def script(models: list[nn.Module], calls: list[Call], replica: int) -> Any:
        for count in (4, 6):
            calls[0](rows(count)).sum().backward()
        return read(models[0].get_submodule("inner.0"))

    read(_run_alone(leave))
    with pytest.raises(TrainingError, match=f"Left.{name} is set by the forward"):
        on_ranks(plan, seeded(lambda: [Outer(leave)]), script)


def _run_alone(leave: Any) -> Left:
    module = Left(leave).double()
    module(rows(4))
    return module


def counts(module: Left, y: Tensor) -> None:
    module.number += 1


def keeps_the_first(module: Left, y: Tensor) -> Any:
    if module.cached is None:
        module.cached = y.shape[0]
    return module.cached


def keeps_the_width(module: Left, y: Tensor) -> Any:
    if module.cached is None:
        module.cached = y.shape[1]
    return module.cached


def reads_in_evaluation(module: Left, y: Tensor) -> Any:
    if not module.training:
        return module.cached or 1
    module.cached = y.shape[0]
    return None


@pytest.mark.parametrize("plan", ["tp=2", pytest.param("pp=2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("leave", "sentence"),
    [
        (counts, "number at .* changes it: it was 2, and is 3 after a batch"),
        (keeps_the_first, "Left.cached, which an earlier call has set"),
        (reads_in_evaluation, "Left.cached, which an earlier call has set"),
    ],
)
def test_a_forward_that_goes_by_what_earlier_ones_have_left_is_refused(
    plan: str, leave: Any, sentence: str
) -> None:
    def script(models: list[nn.Module], calls: list[Call], replica: int) -> Any:
        for number, count in enumerate([4, 6, 4]):
            models[0].train(number < 2)
            calls[0](rows(count)).sum().backward()

    with pytest.raises(MeshloomError, match=sentence):
        on_ranks(plan, seeded(lambda: [Left(leave)]), script)


def caches(module: Left, y: Tensor) -> Tensor:
    if module.cached != y.shape[1]:
        module.cached = y.shape[1]
        module.table = torch.arange(y.shape[1], dtype=y.dtype)
    assert module.table is not None
    return module.table


@pytest.mark.parametrize("plan", [PLANS[0], pytest.param(PLANS[1], marks=pytest.mark.slow)])
def test_caches_and_what_the_script_sets_are_read(plan: str) -> None:
    def cached(models: list[nn.Module], calls: list[Call], replica: int) -> Any:
        return [calls[0](rows(count)).detach().sum() for count in (4, 6, 4)]

    def set_anew(models: list[nn.Module], calls: list[Call], replica: int) -> Any:
        module: Any = models[0]
        before = calls[0](rows(4)).detach().sum()
        module.cached = 3
        return [before, *(calls[0](rows(4)).detach().sum() for _ in range(2))]

    check(plan, seeded(lambda: [Left(caches)]), cached)
    check(plan, seeded(lambda: [Left(keeps_the_width)]), set_anew)


def test_rows_of_which_the_first_call_keeps_the_number_are_not_cut() -> None:
    with pytest.raises(CaptureError, match="their rows depend on each other"):
        on_ranks(
            PLANS[1],
            seeded(lambda: [Left(keeps_the_first)]),
            lambda models, calls, replica: calls[0](rows(4)).sum().backward(),
        )


def test_copies_and_whole_modules_run_as_written() -> None:
    parsed = Plan.parse("tp=2")
    expected = _make()(rows(4)).detach()
    with open_world(parsed.mesh, "simulated") as world:

        def of_rank(own: Any) -> None:
            model = _make()
            divided = DividedModule(model, LoopRanks(parsed, world, own))
            divided.call(model.__call__, [rows(4)], {}).sum().backward()
            with pytest.raises(TrainingError, match="Left.table is set by the forward"):
                torch.sum(cast(Tensor, model.table))
            with divided.whole():
                of_copy = copy.deepcopy(model)(rows(4)).detach()
                of_whole = divided.call(model.__call__, [rows(4)], {})
            torch.testing.assert_close([of_copy, of_whole], [expected, expected], rtol=1e-13, atol=1e-13)

        world.turns.run([lambda own=own: of_rank(own) for own in world.local])


def _make() -> Left:
    torch.manual_seed(0)
    return Left(caches).double()


def scaled_by_first_batch(module: Left, y: Tensor) -> Tensor:
    if module.table is None:
        module.table = y.detach().std()
    return 1 / module.table


def scaled_by_first_weights(module: Left, y: Tensor) -> Tensor:
    if module.table is None:
        module.table = module.other.weight.detach().sum(0)
    return module.table


def keeps_the_first_rows(module: Left, y: Tensor) -> Tensor:
    if module.table is None:
        module.table = torch.full((64,), y.shape[0], dtype=y.dtype)
    return module.table


def fills_by_first_batch(module: Left, y: Tensor) -> Tensor:
    if "scale" not in module.sizes:
        module.sizes["scale"] = y.detach().abs().max()
    return module.sizes["scale"]


@pytest.mark.parametrize("plan", ["tp=2", "pp=2"])
@pytest.mark.parametrize(
    ("leave", "name"),
    [
        (scaled_by_first_batch, "table"),
        (scaled_by_first_weights, "table"),
        (fills_by_first_batch, "sizes"),
        (keeps_the_first_rows, "table"),
    ],
)
def test_a_forward_that_goes_by_what_the_first_has_computed_is_refused(
    plan: str, leave: Any, name: str
) -> None:
    def script(models: list[nn.Module], calls: list[Call], replica: int) -> Any:
        for count in (4, 6):
            calls[0](rows(count)).sum().backward()

    with pytest.raises(CaptureError, match=f"goes by Left.{name} of an earlier call"):
        on_ranks(plan, seeded(lambda: [Left(leave)]), script)


def makes_a_table(module: Left, y: Tensor) -> Tensor:
    if module.table is None or len(module.table) < y.shape[0]:
        module.table = torch.arange(y.shape[0], dtype=y.dtype)[:, None]
    return module.table[: y.shape[0]]


def keeps_results(module: Left, y: Tensor) -> None:
    module.seen.append(y.detach())


@pytest.mark.parametrize("leave", [makes_a_table, keeps_results])
def test_a_table_of_shapes_and_what_nobody_reads_change_nothing(leave: Any) -> None:
    def script(models: list[nn.Module], calls: list[Call], replica: int) -> Any:
        return [calls[0](rows(count)).detach().sum() for count in (4, 6, 4)]

    check("tp=2", seeded(lambda: [Left(leave)]), script)
