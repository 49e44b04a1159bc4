"""A divided loss is the loss of one device: outputs, every gradient and every buffer in float64, dropout on, over parts of unequal sizes.

Divisions are those that a plan would have, and ones drawn at random, which use every way of computing an operator and every change of
placement. A fixed handful of families runs in the covering subset; the rest is `slow`.
"""

from __future__ import annotations

import pytest
import torch

from meshloom.job import Job
from tests.division import Subject, at_random, cheapest, compare, subject_of
from tests.families import FAMILIES
from tests.families.limits import NOT_READ
from tests.program_jobs import OWN

TOLERANCE = 1e-10  # float64; sums in another order. The largest seen is 6e-13, of a bias before a norm, whose gradient is nearly nothing
COVERING = {"gpt2": 3, "llama": 4, "resnet": 2, "mixtral": 3, "t5": 2, "lstm": 2, "u_net": 4, "diffusion": 3}  # and over how many ranks

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:The tensor attributes? .* assigned during export:UserWarning"),
]


def own_subject(name: str) -> Subject:
    build, loss, batch = OWN[name]
    job = Job(
        model=build, loss=loss, optimizer=lambda named: torch.optim.SGD(named), data=list, batch_size=1, steps=1
    )  # fmt: skip
    return subject_of(job, batches=(batch(torch.Generator().manual_seed(0)), batch(torch.Generator().manual_seed(1))))


@pytest.mark.parametrize("name", OWN)
def test_any_division_of_a_small_model_equals_one_device(name: str):
    subject = own_subject(name)
    for seed in range(12):
        compared = compare(subject, 2 + seed % 3, at_random(seed))
        assert compared.error <= TOLERANCE, f"seed {seed}: {compared.what} differs by {compared.error:.1e}"


@pytest.mark.parametrize(("name", "num_ranks"), COVERING.items())
def test_a_family_divided_as_a_plan_would_and_at_random_equals_one_device(name: str, num_ranks: int):
    _check(name, [num_ranks], range(2))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in NOT_READ])
def test_every_family_equals_one_device(name: str):
    _check(name, [2, 3, 4], range(4))


def _check(name: str, counts: list[int], seeds: range) -> None:
    subject = subject_of(FAMILIES[name].make_job(True))
    for num_ranks in counts:
        for what, decide in {"cheapest": cheapest, **{f"seed {seed}": at_random(seed) for seed in seeds}}.items():
            compared = compare(subject, num_ranks, decide)
            assert compared.error <= TOLERANCE, f"{num_ranks} ranks, {what}: {compared.what} differs by {compared.error:.1e}"
