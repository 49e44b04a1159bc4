"""Families of models divided over real processes equal one device: loss, gradients, norm, buffers and updated
parameters, dropout on, in float64."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from meshloom.core.plan import Plan
from meshloom.verify.findings import print_report
from meshloom.verify.run import verify
from tests.families import FAMILIES
from tests.processes import on_ranks

pytestmark = [
    pytest.mark.long,
    pytest.mark.processes,
    pytest.mark.usefixtures("silent_export"),
    pytest.mark.filterwarnings("ignore:The tensor attributes? .* assigned during export:UserWarning"),
]

# The models are tiny: where dividing a layer costs more than it saves it stays whole, so it is asked for. Odd
# sizes throughout: 29 of hidden, 3 heads, 7 channels.
PINS = {
    "llama": {
        "model.layers.*.self_attn.*": "heads",
        "model.layers.*.mlp.gate_proj": "column",
        "lm_head": "vocabulary",
    },
    "t5": {"*.SelfAttention.q": "heads", "*.EncDecAttention.q": "heads", "*.DenseReluDense.wi": "column"},
    "vit": {"vit.layers.*.attention.q_proj": "heads", "vit.layers.*.mlp.fc1": "column"},
    "convnext": {"*.pwconv1": "column", "classifier": "row"},
    "mixtral": {
        "model.layers.*.self_attn.q_proj": "heads",
        "model.embed_tokens": "dim1",
        "lm_head": "vocabulary",
    },
    "mamba": {"backbone.layers.*.mixer.out_proj": "row", "backbone.embeddings": "vocabulary"},
}


def _verified(name: str, plan: str) -> str | None:
    report = verify(
        FAMILIES[name].make_job(True), Plan.parse(plan), devices="cpu", steps=2, dtype=torch.float64
    )
    if report is None:
        return None
    stream = io.StringIO()
    print_report(report, Console(file=stream, width=160))
    assert max(report.owned) < 0.97, f"nothing was divided: {report.owned}"
    return "EQUAL" if report.passed else stream.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name == "llama" else pytest.param(name, marks=pytest.mark.slow) for name in PINS]
)
def test_a_family_on_two_processes_equals_one_device(name: str):
    plan = str(Plan(tp=2, tp_placements=PINS[name]))
    assert on_ranks(_verified, 2, name, plan, timeout_seconds=200.0)[0] == "EQUAL"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "vit"])
def test_a_family_on_two_by_two_processes_equals_one_device(name: str):
    plan = str(Plan(dp=2, tp=2, tp_placements=PINS[name]))
    assert on_ranks(_verified, 4, name, plan, timeout_seconds=300.0)[0] == "EQUAL"
