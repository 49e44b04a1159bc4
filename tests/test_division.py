"""A divided loss is the loss of one device: outputs, every gradient and every buffer in float64, dropout on,
over parts of unequal sizes.

Divisions are those that a plan would have, and ones drawn at random, which use every way of computing an
operator and every change of placement. A fixed handful of families runs in the covering subset; the rest is
`slow`: each is read once, divided at random over 2, 3 and 4 ranks, once each, and as a plan would over one of
    these, in turn (choosing takes most of the time; docs/divided_families.md has it over 2 and over 3).
"""

from __future__ import annotations

import itertools

import pytest
import torch

from meshloom.core.job import Job
from tests.division import Decide, Subject, at_random, cheapest, compare, subject_of
from tests.families import FAMILIES
from tests.families.limits import NOT_READ
from tests.program_jobs import OWN

# float64; sums in another order. The largest seen is 8e-12, behind 52 batch norms over few pixels
TOLERANCE = 1e-10
# over how many ranks, as a plan would
CHOSEN = {"gpt2": 2, "resnet": 2, "lstm": 2, "u_net": 3, "diffusion": 2}
DRAWN = {"llama": 4, "mixtral": 3, "t5": 3, "xlnet": 4, "bamba": 3}  # at random
READ = [name for name in FAMILIES if name not in NOT_READ]

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:The tensor attributes? .* assigned during export:UserWarning"),
]


def own_subject(name: str) -> Subject:
    build, loss, batch = OWN[name]
    job = Job(
        model=build, loss=loss, optimizer=lambda named: torch.optim.SGD(named), data=list, batch_size=1, steps=1
    )  # fmt: skip
    return subject_of(
        job, batches=(batch(torch.Generator().manual_seed(0)), batch(torch.Generator().manual_seed(1)))
    )


@pytest.mark.covering("in_place", "slice_writes", "tied", "rotary", "average", "noise", "precisions")
@pytest.mark.parametrize("name", OWN)
def test_any_division_of_a_small_model_equals_one_device(name: str):
    subject = own_subject(name)
    for seed in range(3):
        check(subject, 2 + seed, f"seed {seed}", at_random(seed))


@pytest.mark.covering("lstm", "u_net")
@pytest.mark.parametrize(("name", "num_ranks"), CHOSEN.items())
def test_a_family_divided_as_a_plan_would_equals_one_device(name: str, num_ranks: int):
    check(subject_of(FAMILIES[name].make_job(True)), num_ranks, "as a plan would", cheapest)


@pytest.mark.covering("llama", "mixtral")
@pytest.mark.parametrize(("name", "num_ranks"), DRAWN.items())
def test_any_division_of_a_family_equals_one_device(name: str, num_ranks: int):
    subject = subject_of(FAMILIES[name].make_job(True))
    for seed in range(1):
        check(subject, num_ranks, f"seed {seed}", at_random(seed))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "chosen"), list(zip(READ, itertools.cycle((2, 3, 4)), strict=False)))
def test_every_family_equals_one_device(name: str, chosen: int):
    subject = subject_of(FAMILIES[name].make_job(True))
    check(subject, chosen, "as a plan would", cheapest)
    for seed, num_ranks in enumerate((2, 3, 4)):
        check(subject, num_ranks, f"seed {seed}", at_random(seed))


def check(subject: Subject, num_ranks: int, what: str, decide: Decide) -> None:
    compared = compare(subject, num_ranks, decide)
    assert compared.error <= TOLERANCE, (
        f"{num_ranks} ranks, {what}: {compared.what} differs by {compared.error:.1e}"
    )
