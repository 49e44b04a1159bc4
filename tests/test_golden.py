"""What is exact stays as the files of `golden/` have it; a file that changes does so in a commit of its own, which says why for each value."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import meshloom as ml
from tests.golden.exact_jobs import JOBS
from tests.golden.exact_runs import PLANS, digest, divided_readily, newest, on_one_device, trained
from tests.golden.exactness import Exact
from tests.golden.files import differences, file_of, read
from tests.golden.names import VALUES
from tests.golden.operators import FILE, operators
from tests.processes import on_ranks

CHECKPOINT = (
    Path(__file__).parent / "checkpoints/exact"
)  # of "frozen" after 2 of its 4 steps, as dp=2,zero=1,microbatches=2 wrote it
ALONE = ("results", "traffic", FILE)  # each has a test below
MODULES = [plan for plan in PLANS if not ml.Plan.parse(plan).divides_loss]


def check(name: str, found: dict[str, str]) -> None:
    other = differences(read(name), found)
    assert not other, "\n".join(
        [*other, f"If that is meant: python -m tests.golden {name}, in a commit that says why."]
    )


@pytest.mark.covering(*(name for name in VALUES if name not in ALONE))
@pytest.mark.parametrize("name", [name for name in VALUES if name not in ALONE])
@pytest.mark.long
def test_what_is_exact_is_what_is_written(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.export warns about itself
        check(name, VALUES[name]())


def test_there_are_refusals_enough_and_each_is_a_sentence_of_our_own() -> None:
    found = read("refusals")
    assert len(found) >= 150
    assert not [each for each in found.values() if not each.endswith((".", "?")) or "\n" in each]


@pytest.mark.long
def test_operators_and_peaks_are_those_of_this_torch() -> None:
    if not file_of(FILE).exists():
        pytest.skip(f"golden/{FILE}.txt is not there; python -m tests.golden {FILE} writes it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(FILE, operators())


@pytest.mark.parametrize("job", JOBS)
def test_one_device_rounds_nowhere_and_comes_to_what_is_written(job: str) -> None:
    check_result(job, str(on_one_device(JOBS[job])))


def check_result(job: str, found: str) -> None:
    check("results", read("results") | {job: found})


CELLS = {f"{job}-{plan}": (job, plan) for job in JOBS for plan in PLANS}
# Three jobs under each plan that runs modules, one under each that captures.
IN_MAKE_TEST = [
    f"{job}-{plan}"
    for at, job in enumerate(JOBS)
    for number, plan in enumerate(PLANS)
    if (at + number) % (2 if plan in MODULES else len(JOBS)) == 0
]


@pytest.mark.covering(*IN_MAKE_TEST)
@pytest.mark.parametrize(("job", "plan"), CELLS.values(), ids=CELLS)
@pytest.mark.long
@pytest.mark.every
def test_a_plan_comes_to_the_exact_values_and_sends_what_is_written(
    job: str, plan: str, tmp_path: Path, silent_export: None
) -> None:
    with divided_readily():
        run = trained(JOBS[job], plan, tmp_path)
    check_result(job, str(run.result))
    own = {f"{job} under {plan}: bytes": run.bytes, f"{job} under {plan}: held": run.held}
    check("traffic", read("traffic") | own)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("job", "plan"), [("mlp", "dp=2,microbatches=2"), ("frozen", "dp=2,zero=2"), ("tied", "tp=2")]
)
def test_processes_come_to_the_exact_values_too(job: str, plan: str, tmp_path: Path) -> None:
    """Replicas have one copy of parameters and optimizer state there."""
    found, *_ = on_ranks(_on_a_rank, 2, job, plan, tmp_path)
    check_result(job, found)


def _on_a_rank(job: str, plan: str, out: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return str(trained(JOBS[job], plan, out, devices="cpu").result)


@pytest.mark.parametrize("plan", ["dp=4", "pp=2,microbatches=2", "dp=2,tp=2,zero=3"])
@pytest.mark.long
def test_a_checkpoint_of_today_goes_on_to_the_exact_values(
    plan: str, tmp_path: Path, silent_export: None
) -> None:
    with divided_readily():
        found = trained(JOBS["frozen"], plan, tmp_path, resume=CHECKPOINT).result
    losses, *tensors = read("results")["frozen"].splitlines()
    assert found.losses == [float(each) for each in losses.split()[1:]][2:]
    assert str(found).splitlines()[1:] == tensors
    assert newest(CHECKPOINT).name == "step-00000002"


@pytest.mark.parametrize(
    "compute",
    [
        lambda: torch.tensor([2.0**53]) + torch.tensor([1.0]),
        lambda: torch.ones(4, dtype=torch.float64) / 3,
        lambda: torch.full((4, 4), 2.0**-20) @ torch.full((4, 4), 1 + 2.0**-20),  # each is one of float32, sums of products are not
        lambda: torch.ones(4).exp(),
    ],
)  # fmt: skip
def test_what_may_round_is_not_taken_for_exact(compute) -> None:
    with pytest.raises(AssertionError, match=r"digits|powers of two|nobody has said"), Exact():
        compute()


def test_digests_tell_values_dtypes_and_shapes_apart() -> None:
    one = torch.arange(6.0).reshape(2, 3)
    assert len({digest(each) for each in (one, -one, one.reshape(3, 2), one.double(), one + 2.0**-20)}) == 5
    assert digest(torch.zeros(2)) == digest(-torch.zeros(2))  # which kernels are free to decide
