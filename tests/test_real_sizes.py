"""Published models at the sizes that people train equal one device, and mistakes as small as one token are
found at these sizes.

What is trained is in `tests/real_sizes.py`. In float32, with real data, dropout on, on processes.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import tests.real_sizes
from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.verify.findings import print_report
from meshloom.verify.reference.reference import Reference
from meshloom.verify.run import verify
from meshloom.verify.tolerances.gradient_errors import GradientErrors
from tests.processes import on_ranks
from tests.real_sizes import built, job_of, next_words

PLANS = {"dp=2": 2, "tp=2": 2, "pp=2,microbatches=2": 2, "dp=2,pp=2,tp=2": 8}
MODELS = ("gpt2", "bert", "vit", "resnet", "t5", "whisper", "wav2vec2", "segformer")


def _verified(name: str, plan: str, steps: int, batch_size: int) -> str | None:
    job = replace(getattr(tests.real_sizes, name)(), batch_size=batch_size)
    report = verify(
        job,
        Plan.parse(plan),
        devices="cpu",
        steps=steps,
        dtype=torch.float32,
        timeout_seconds=3000.0,
        oversubscribe=True,
    )
    if report is None:
        return None
    stream = io.StringIO()
    print_report(report, Console(file=stream, width=160))
    return "EQUAL" if report.passed else stream.getvalue()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_a_published_model_equals_one_device(name: str, plan: str):
    """Three steps of two samples each."""
    assert on_ranks(_verified, PLANS[plan], name, plan, 3, 2, timeout_seconds=3500.0)[0] == "EQUAL"


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "plan", "ranks"),
    [
        ("gpt2_short", "pp=2,tp=2", 4),
        pytest.param("bert_short", "dp=2,tp=2", 4, marks=pytest.mark.campaign),  # minutes
    ],
)
def test_two_layers_at_full_length_equal_one_device(name: str, plan: str, ranks: int):
    """One step of as few samples as the plan has chunks; the two plans have all three axes between them."""
    assert (
        on_ranks(_verified, ranks, name, plan, 1, Plan.parse(plan).num_chunks, timeout_seconds=500.0)[0]
        == "EQUAL"
    )


def _gradients(attention: str, loss: Callable[[Any, Any], Tensor] | None = None) -> Reference:
    """Of one sample of 1,024 tokens, on two layers of GPT-2's width, without dropout; attention is computed
    as `attention` says."""
    off = dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0)
    words: dict[str, Any] = {"vocab_size": 4096, "bos_token_id": 0, "eos_token_id": 0}
    model = partial(
        built, "GPT2LMHeadModel", n_layer=2, use_cache=False, attn_implementation=attention, **off, **words
    )
    job: Job = replace(job_of(model, partial(next_words, 1024, 4096), loss), batch_size=1)
    reference = Reference(job, Plan())
    reference.run()
    return reference


def _without_one_token(model: Any, batch: dict[str, Tensor]) -> Tensor:
    labels = batch["labels"].clone()
    labels[:, 700] = -100
    return model(input_ids=batch["input_ids"], labels=labels).loss * 1022 / 1023


def _wrong_at_a_seam(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """As if the labels had been divided in two halves, and each had been shifted by itself."""
    labels = batch["labels"].clone()
    labels[:, 512] = labels[:, 511]
    return model(input_ids=batch["input_ids"], labels=labels).loss


@pytest.mark.slow
def test_at_1024_tokens_rounding_is_far_below_the_tolerance_and_the_smallest_mistakes_are_above_it():
    """Rounding is another kernel for attention, which adds up otherwise: 0.11 of the tolerance. Each mistake is
    more than a thousand times it, in all 28 tensors."""
    errors = GradientErrors(_gradients("sdpa").gradients, 0)
    other = _gradients("eager").gradients
    assert (
        max(
            each.error / each.tolerance
            for each in (errors.compare(name, gradient) for name, gradient in other.items())
        )
        < 0.5
    )
    for name, gradient in other.items():
        assert gradient is not None
        assert not errors.compare(name, (1 + 1e-5) * gradient).passed, (
            f"{name}, a hundred thousandth too large"
        )
    for wrong in (_without_one_token, _wrong_at_a_seam):
        of_wrong = _gradients("eager", wrong).gradients
        assert not any(errors.compare(name, gradient).passed for name, gradient in of_wrong.items()), (
            wrong.__name__
        )
