"""`verify --blocks`: the same job with fewer of its repeated blocks, and what is said where one device is too small."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from meshloom.core.errors import DeviceError, JobError
from meshloom.core.plan import Plan
from meshloom.parameters.model import build_model
from meshloom.verify import reference_size
from meshloom.verify.fewer_blocks import with_fewer_blocks
from meshloom.verify.findings import Report
from meshloom.verify.reference_size import reference_bytes
from meshloom.verify.run import verify
from tests.jobs import GPT, make_job
from tests.reports import text_of

CPU = torch.device("cpu")


def gpt_job(layers: int = 5):
    return replace(make_job("gpt", "adamw"), model=partial(GPT, layers=layers))


def run(job, plan: str, blocks: int | None = None) -> Report:
    report = verify(job, Plan.parse(plan), devices="simulated", dtype=torch.float64, steps=2, blocks=blocks)
    assert report
    return report


@pytest.mark.long
def test_the_first_blocks_stay_with_values_by_convention():
    job = gpt_job()
    whole = dict(build_model(job, CPU, None).named_parameters())
    fewer = with_fewer_blocks(job, 2)
    kept, again = (dict(build_model(fewer.job, CPU, None).named_parameters()) for _ in range(2))
    assert [(each.path, each.num_blocks) for each in fewer.runs] == [("blocks", 5)]
    assert {
        name for name in whole if name.split(".")[0] != "blocks" or int(name.split(".")[1]) < 2
    } == kept.keys()
    assert all(torch.equal(again[name], each) and each.isfinite().all() for name, each in kept.items())


def test_values_of_files_are_left_out_and_the_sentence_says_so(tmp_path):
    fewer = with_fewer_blocks(replace(gpt_job(), weights=tmp_path, weight_names=str.upper), 2)
    assert fewer.job.weights is None and fewer.job.weight_names is None
    assert fewer.sentence.endswith("all else is the job's own, but the values of its files.")


@pytest.mark.long
@pytest.mark.parametrize(
    "plan",
    [
        "dp=2",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("dp=2,zero=3", "tp=2", "pp=2,microbatches=2")
        ),
    ],
)
@pytest.mark.slow
def test_a_plan_is_verified_with_fewer_blocks_and_the_report_says_so(plan):
    report = run(gpt_job(), plan, blocks=2)
    assert report.passed and report.records()[-1]["blocks"] == {"kept": 2, "of": {"blocks": 5}}
    names = {error.name for error in report.steps[0].errors}
    assert "blocks.1.up.weight" in names and "blocks.2.up.weight" not in names
    assert "NOT the whole model: of repeated blocks it has only the first 2, of 5 in blocks;" in text_of(
        report
    )
    assert (
        "EQUAL to one device that runs the same chunks: 2 steps, with 2 of the repeated blocks each"
        in text_of(report)
    )
    assert run(make_job("mlp", "sgd"), "dp=2").records()[-1]["blocks"] is None


def test_a_model_without_repeated_blocks_is_refused_with_a_sentence():
    with pytest.raises(
        JobError, match="and the model has none: no ModuleList or Sequential in it holds equal modules"
    ):
        with_fewer_blocks(make_job("mlp", "sgd"), 2)
    with pytest.raises(
        JobError, match="--blocks 5 leaves nothing out: blocks has 5 repeated blocks. Use --blocks 4"
    ):
        with_fewer_blocks(gpt_job(), 5)
    with pytest.raises(JobError, match="--blocks 0 must be 1 or more"):
        with_fewer_blocks(gpt_job(), 0)


@pytest.mark.long
def test_a_model_that_one_device_cannot_hold_is_refused_with_the_flag_that_verifies_it(monkeypatch):
    job = gpt_job()
    model = build_model(job, CPU, None)
    num_bytes = sum(each.nbytes for each in model.parameters())
    # parameters twice, gradients, two averages
    assert reference_bytes(job, model, None) - sum(each.nbytes for each in model.buffers()) == 5 * num_bytes
    monkeypatch.setattr(reference_size, "free_bytes", lambda: num_bytes)
    with pytest.raises(
        DeviceError, match="--blocks 2 verifies the same job with 2 of the 5 repeated blocks in blocks"
    ):
        run(job, "dp=2")
    monkeypatch.setattr(reference_size, "free_bytes", lambda: 1)
    with pytest.raises(DeviceError, match="Verify it where there is more memory"):
        run(make_job("cnn", "sgd"), "dp=2")
