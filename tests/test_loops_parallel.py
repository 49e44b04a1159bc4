"""A loop of one's own has one device's results with every number of replicas."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import meshloom as ml
from meshloom.comm.objects import collect
from meshloom.core.errors import JobError, PlanError, TrainingError
from meshloom.core.modules.compiled import not_compiled
from meshloom.core.plan import Plan
from meshloom.loops.parallel import _check  # pyright: ignore[reportPrivateUsage]
from meshloom.loops.ranks import check_of_loops, leave_ranks, ranks
from meshloom.loops.taken_shares import TakenShare, share_sizes
from tests.loop_cases import CASES, all_cases, batches, entropy, made
from tests.processes import RankError, on_ranks

Found = dict[str, list[float]]


@pytest.fixture(scope="module")
def runs() -> dict[int, Found]:
    return {size: on_ranks(all_cases, size)[0] for size in (1, 2, 3)}


@pytest.mark.processes
@pytest.mark.parametrize("name", CASES)
def test_replicas_of_a_module_compute_what_one_device_does(runs: dict[int, Found], name: str):
    expected = runs[1][name]
    assert expected and all(each == each for each in expected)
    for size in (2, 3):
        assert runs[size][name] == pytest.approx(expected, rel=1e-9, abs=1e-12), f"dp={size}"


PLANS = ("dp=2,zero=1", "dp=2,zero=3", "tp=2", "pp=2,microbatches=2")
OF_A_PART, CALLED_PART = "LBFGS looks at whole parameters", "linear of"
# what the boundary does not allow under these plans, and what its sentence says
REFUSED = {
    "closure": dict.fromkeys(PLANS, OF_A_PART),
    "frozen_added_averaged_copied": {
        **dict.fromkeys(PLANS[:2], CALLED_PART), **dict.fromkeys(PLANS[2:], "The loss reads calls"),
    },
    "accumulated": dict.fromkeys(PLANS[2:], CALLED_PART),
    "penalty_on_gradients_of_inputs": {PLANS[3]: "create_graph=True"},
    "several_backwards": {PLANS[3]: "A second backward through one call"},
    "methods_that_step": dict.fromkeys(PLANS[2:], "are each called outermost in training"),
    "a_method_that_trains": dict.fromkeys(PLANS[2:], "whose own call has not run in training"),
    "two_models": {PLANS[3]: "can be cut at 0 places"},
}  # fmt: skip


@pytest.fixture(scope="module", params=PLANS)
def of_a_plan(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return request.param, on_ranks(all_cases, 2, request.param, timeout_seconds=200.0)[0]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", CASES)
def test_every_plan_computes_what_one_device_does_or_says_why_not(
    runs: dict[int, Found], of_a_plan: tuple[str, dict[str, Any]], name: str
):
    plan, found = of_a_plan
    if isinstance(found[name], str):  # a plan that divides nothing of so small a model computes all of them
        assert REFUSED[name][plan] in found[name]
    else:
        assert found[name] == pytest.approx(runs[1][name], rel=1e-9, abs=1e-12)


def _seeded() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def _mistakes() -> dict[str, str]:
    """Each with its sentence, on this rank."""
    found, here = dict[str, str](), ranks()

    def accumulates_always() -> None:
        model = ml.parallel(made())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = next(batches())
        with ml.accumulate(model):
            entropy(model, x, y).backward()
        optimizer.step()

    def rates_of_their_own() -> None:
        model = ml.parallel(made())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + here.replica)
        x, y = next(batches())
        entropy(model, x, y).backward()
        optimizer.step()

    def draws_of_their_own() -> None:
        optimizer = torch.optim.SGD(ml.parallel(made()).parameters(), lr=0.1)
        torch.rand(1 + here.replica)
        optimizer.step()

    def modules_of_their_own() -> None:
        ml.parallel(nn.Linear(2, 2 + here.replica))

    def another_plan() -> None:
        ml.parallel(made(), "dp=4")

    def file_that_cannot_be() -> None:
        ml.save({}, "/nowhere/at/all.pt")

    def two_weights() -> None:
        model = ml.parallel(made())
        (x, _), (longer, _) = batches(2)
        (model(x).sum() + model(longer).sum()).backward()

    def in_another_wrapper() -> None:
        model = nn.parallel.DistributedDataParallel(ml.parallel(made()))
        x, y = next(batches())
        entropy(model, x, y).backward()

    def gradients_of_gradients() -> None:
        model = ml.parallel(made())
        x, y = next(batches())
        entropy(model, x, y).backward(create_graph=True)

    def scheduler_first() -> None:
        optimizer = torch.optim.LBFGS(made().parameters())
        torch.optim.lr_scheduler.StepLR(optimizer, 2)
        ml.whole(optimizer)

    for mistake in (
        accumulates_always,
        rates_of_their_own,
        modules_of_their_own,
        another_plan,
        file_that_cannot_be,
        two_weights,
        in_another_wrapper,
        gradients_of_gradients,
        scheduler_first,
        draws_of_their_own,
    ):
        _seeded()
        try:
            mistake()
        except ml.MeshloomError as error:
            found[mistake.__name__] = str(error)
    with suppress(ml.MeshloomError):  # a rank that leaves ends what others wait for
        collect(here.everyone, None)
    leave_ranks(well=True)
    return found


@pytest.mark.processes
def test_mistakes_are_one_sentence_on_all_ranks():
    first, second = on_ranks(_mistakes, 2)
    sentences = {
        "accumulates_always": "Leave the last one before the step outside",
        "rates_of_their_own": "the learning rates is [1.1] on rank 1 and [0.1] on rank 0",
        "modules_of_their_own": "weight of Linear is [3, 2] torch.float32 on rank 1 and [2, 2] torch.float32 on rank 0",
        "another_plan": "run under dp=2, and parallel() is given dp=4",
        "file_that_cannot_be": "/nowhere/at/all.pt cannot be written",
        "two_weights": "calls of the module with shares of different sizes",
        "in_another_wrapper": "DistributedDataParallel is parallel already",
        "gradients_of_gradients": "is a mean over replicas, which has no second derivative",
        "scheduler_first": "before making the scheduler",
        "draws_of_their_own": "the state of torch's generator is",
    }
    for name, sentence in sentences.items():
        assert sentence in first[name] and sentence in second[name], name


def _half_a_loop() -> None:
    _seeded()
    model = ml.parallel(made())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (x, y) in enumerate(batches()):
        if number == 1 and ranks().replica == 1:
            continue  # as who skips a bad batch
        entropy(model, x, y).backward()
        optimizer.step()


def test_what_ranks_do_together_is_left_out_of_what_is_compiled_around_it():
    seen = list[bool]()

    @not_compiled
    def together(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return x + 1

    def around(x: torch.Tensor) -> torch.Tensor:
        return together(x) * 2

    assert torch.compile(around, backend="eager")(torch.ones(1)).item() == 4.0
    assert seen == [False]


@pytest.mark.processes
def test_a_rank_that_skips_a_step_is_named():
    with pytest.raises(RankError, match="Ranks disagree: the (number of|share of the newest call)"):
        on_ranks(_half_a_loop, 2)


def _steps_by_hand() -> None:
    _seeded()
    model = ml.parallel(made())
    for x, y in batches():
        slopes = torch.autograd.grad(entropy(model, x, y), [*model.parameters()])
        with torch.no_grad():
            for parameter, slope in zip(model.parameters(), slopes, strict=True):
                parameter -= 0.1 * slope


@pytest.mark.processes
def test_replicas_that_update_by_gradients_of_their_own_are_named():
    with pytest.raises(
        RankError, match="Ranks disagree: Net.first.weight is .*autograd.grad by parameters is this"
    ):
        on_ranks(_steps_by_hand, 2)


def test_one_process_is_left_alone(tmp_path: Path):
    model = nn.Linear(2, 2)
    assert ml.parallel(model) is model and type(model) is nn.Linear
    with ml.accumulate(model), ml.whole(model):
        pass
    assert (ml.mean(2.0), ml.sum(2), ml.mean(6.0, 4), ml.gather([1])) == (2.0, 2, 1.5, [1])
    ml.save(model.state_dict(), tmp_path / "a.pt")
    assert set(torch.load(tmp_path / "a.pt")) == {"weight", "bias"}


@pytest.mark.parametrize(
    ("plan", "named"),
    [
        ("dp=2,precision=bf16", "precision"),
        ("dp=2,exchange=local_sgd,local_steps=4", "exchange"),
        ("dp=2,compress=bf16", "compress"),
    ],
)
def test_what_a_loop_does_itself_is_no_setting_of_its_plan(plan: str, named: str):
    with pytest.raises(PlanError, match=f"takes no {named}="):
        check_of_loops(Plan.parse(plan))
    for each in ("dp=2,zero=3,overlap=false,reduce=bf16,sync_batch_norm=true", "dp=2,pp=2,tp=2,zero=2"):
        check_of_loops(Plan.parse(each))
    with pytest.raises(PlanError, match="zero=3 with dp alone"):
        check_of_loops(Plan.parse("dp=2,tp=2,zero=3"))


def test_several_ranks_need_a_start():
    with pytest.raises(PlanError, match="2 ranks, and this script is one process.*meshloom run"):
        ml.parallel(nn.Linear(2, 2), "dp=2")


def test_what_cannot_be_made_parallel_is_named():
    with pytest.raises(JobError, match="nn.ModuleList"):
        _check(nn.Tanh())
    with pytest.raises(JobError, match="is parallel already"):
        _check(nn.DataParallel(nn.Linear(2, 2)))
    with pytest.raises(JobError, match="not a int"):
        ml.parallel(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TrainingError, match="not a int"):
        ml.gather(3)


def test_shares_count_by_their_samples():
    shares = [TakenShare(share_sizes(7, 3), replica) for replica in range(3)]
    assert [(each.start, each.rows) for each in shares] == [(0, 3), (3, 2), (5, 2)]
    assert sum(each.weight for each in shares) == pytest.approx(3)
    empty = TakenShare(share_sizes(1, 2), 1)
    assert (empty.rows, empty.weight) == (1, 0.0)
