"""Every family of the test bed trains, repeats itself, equals one device under a data-parallel plan, and is
exported or says why not.

A fixed handful, one of each way of computing, runs in the covering subset; the rest is `slow`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshloom.core.errors import JobError
from meshloom.core.plan import Plan
from tests.families import FAMILIES, REFUSED, Family
from tests.families.limits import FLOAT32_ONLY, NOT_EXPORTED
from tests.families.measure import operators, start, step, verified

COVERING = {"gpt2", "llama", "bert", "t5", "resnet", "mamba", "mixtral", "clip", "lstm", "u_net", "diffusion"}
ROOT = Path(__file__).parents[1]

# What the families' own code or torch says of itself when it is exported.
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings(
        "ignore:The tensor attributes? .* assigned during export:UserWarning",
    ),
]
every = pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=() if name in COVERING else pytest.mark.slow, id=name)
        for name, each in FAMILIES.items()
    ],
)


def test_the_bed_is_broad():
    kinds = {family.kind for family in FAMILIES.values()}
    assert len(FAMILIES) >= 40
    assert set(FAMILIES) >= COVERING and set(NOT_EXPORTED) | set(FLOAT32_ONLY) <= set(FAMILIES)
    assert kinds == {
        "decoder", "encoder", "encoder-decoder", "vision", "segmentation", "speech", "state-space", "experts", "multimodal", "torch.nn", "own",
    }  # fmt: skip


def test_the_table_lists_every_family():
    lines = (ROOT / "docs/families.md").read_text().splitlines()
    listed = [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| ")][1:]
    assert listed == [*FAMILIES, *REFUSED], "run python -m tests.families.table"


@every
def test_a_step_is_finite_and_repeats_itself(family: Family):
    for dropout in (False, True):
        job = family.make_job(dropout)
        losses, gradients = zip(*(step(*start(job)) for _ in range(2)), strict=True)
        assert torch.isfinite(losses[0]) and torch.equal(*losses)
        one, other = gradients
        used = [name for name, each in one.items() if each is not None]
        assert used == [name for name, each in other.items() if each is not None]
        assert all(torch.isfinite(one[name]).all() and torch.equal(one[name], other[name]) for name in used)
        # gradients that are nothing would be compared with nothing
        assert sum(bool(one[name].any()) for name in used) > 0.8 * len(used)


@every
@pytest.mark.long
def test_the_loss_is_exported_or_refused_for_the_known_reason(family: Family):
    module, batch = start(family.make_job(False))
    if family.name not in NOT_EXPORTED:
        assert 2 < len(operators(module, batch)) < 80
        return
    with pytest.raises(Exception, match=NOT_EXPORTED[family.name][1]):
        operators(module, batch)


@pytest.mark.parametrize("family", REFUSED.values(), ids=list(REFUSED))
@pytest.mark.long
def test_a_loss_function_of_several_losses_is_refused_in_one_sentence(family: Family):
    with pytest.raises(JobError, match="A job of several losses"):
        verified(family, Plan(dp=2))
