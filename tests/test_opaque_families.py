"""Every family of the test bed with one of its layers made opaque by force, drawn by the family's name: it equals one
device, and the rest of its program is as it was."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from torch import nn

from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.data.samples import first_batches
from meshloom.program.capture.opaque_runs import recorded_calls
from meshloom.program.ir.program import Program
from meshloom.program.opaque.stand_ins import OpaqueError
from meshloom.program.store.captured_loss import CapturedLoss
from meshloom.program.trace.precision import build_model
from tests.families import FAMILIES, Family
from tests.families.limits import NOT_EXPORTED, NOT_READ
from tests.families.measure import verified

COVERING = {"lstm"}
PLANS = ["tp=2", "pp=2,microbatches=2", "dp=2,pp=2,tp=2"]

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:The tensor attributes? .* assigned during export:UserWarning"),
    pytest.mark.usefixtures("silent_export", "dear_memory"),
]
every = pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=() if name in COVERING else pytest.mark.slow, id=name)
        for name, each in FAMILIES.items()
        if name not in NOT_EXPORTED and name not in NOT_READ
    ],
)


def with_one_opaque(job: Job, name: str) -> tuple[Job, str]:
    """The job with a drawn module opaque, one that is called and whose calls are operators."""
    model = build_model(job, None, training=True)
    batches = first_batches(job, 2, 3)
    source = random.Random(name)
    paths = [path for path, each in model.named_modules() if path and not _is_container(each)]
    for path in source.sample(paths, len(paths)):
        try:
            if recorded_calls(model, job.loss, batches, [path]):
                return replace(job, opaque=[path]), path
        except OpaqueError:
            continue
    raise AssertionError(f"{name} has no module that could be opaque")


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def outside(program: Program, path: str) -> Counter[str]:
    """How often each operator occurs outside of a module."""
    inside = [node for node in program.nodes if node.path == path or node.path.startswith(f"{path}.")]
    return Counter(node.operator for node in program.nodes) - Counter(node.operator for node in inside)


@every
def test_a_family_with_an_opaque_layer_is_read(family: Family) -> None:
    job, path = with_one_opaque(family.make_job(True), family.name)
    program = CapturedLoss(job).capture(first_batches(job, 2, 3))
    assert list(program.opaque) == [path]
    whole = CapturedLoss(replace(job, opaque=())).capture(first_batches(job, 2, 3))
    gone = outside(whole, path) - outside(program, path)
    # views and sizes that only the layer used may be gone, and nothing else
    assert not {each for each in gone if "linear" in each or "conv" in each or "attention" in each}


@every
def test_a_family_with_an_opaque_layer_equals_one_device(family: Family) -> None:
    job, _ = with_one_opaque(family.make_job(False), family.name)
    plan = PLANS[sum(map(ord, family.name)) % len(PLANS)]
    report = verified(replace(family, make_job=lambda dropout: job), Plan.parse(plan))
    assert report.passed, f"{job.opaque} under {plan}: {report}"


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_in_eager_form_are_parts_of_their_own(name: str, plan: str) -> None:
    """A loop over the experts that some token has chosen: which they are depends on values."""
    job = FAMILIES[name].make_job(False)

    def model() -> nn.Module:
        built = job.model()
        built.config._experts_implementation = "eager"  # type: ignore[union-attr]
        return built

    eager = replace(job, model=model)
    program = CapturedLoss(eager).capture(first_batches(eager, 2, 3))
    assert program.opaque
    assert all(path.endswith("mlp.experts") for path in program.opaque)
    report = verified(replace(FAMILIES[name], make_job=lambda dropout: eager), Plan.parse(plan))
    assert report.passed, str(report)
