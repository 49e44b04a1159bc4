"""Scripts written as people write them, converted: verified, and trained with evaluations between the steps,
they are what the script is on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.random import model_seed, preserved_draws, seed_everything
from meshloom.replica.replica_state import full_state
from meshloom.telemetry.progress import QUIET
from meshloom.train.trainer import Trainer
from meshloom.verify.run import verify
from tests.scripts import by_lightning_rules, fine_tuning, mixed_images, small_gpt

pytestmark = pytest.mark.usefixtures("silent_export")
PLANS = ["dp=2", "tp=2", "pp=2"]


@pytest.fixture(autouse=True)
def no_progress_bars() -> Iterator[None]:
    """`from_pretrained` draws one, with a thread that stays."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@dataclass(frozen=True, kw_only=True)
class Script:
    """job: what it became. alone: its own loop, of a model: losses and evaluations; None where it draws at
    random."""

    job: Job
    alone: Callable[[Any], tuple[list[float], list[float]]] | None = None


@dataclass(frozen=True, kw_only=True)
class Trained:
    losses: list[float]
    evaluations: list[dict[str, float]]
    weights: dict[str, Tensor]


def the_small_gpt(directory: Path) -> Script:
    config, path = small_gpt.Settings(), directory / "train.bin"
    small_gpt.write_tokens(path, config)
    return Script(job=small_gpt.job(path, config), alone=lambda model: small_gpt.script(path, config, model))


def fine_tuned(directory: Path) -> Script:
    fine_tuning.save_pretrained(directory)
    data, held_out = fine_tuning.Conversations(30, seed=1), fine_tuning.Conversations(11, seed=2)
    return Script(
        job=fine_tuning.job(directory, data, held_out, batch_size=6, steps=5, every=2),
        alone=lambda model: fine_tuning.script(model, data, held_out, batch_size=6, steps=5, every=2),
    )


def images(directory: Path) -> Script:
    return Script(job=mixed_images.job())


def by_lightning_rules_(directory: Path) -> Script:
    return Script(
        job=by_lightning_rules.job(),
        alone=lambda model: by_lightning_rules.script(model, 8, 5, 2, torch.float64),
    )


SCRIPTS: dict[str, Callable[[Path], Script]] = {
    "small_gpt": the_small_gpt, "fine_tuning": fine_tuned, "mixed_images": images, "by_lightning_rules": by_lightning_rules_,
}  # fmt: skip
LONG = {
    ("small_gpt", "tp=2"),
    ("fine_tuning", "dp=2"),
    ("by_lightning_rules", "pp=2"),
    ("mixed_images", "dp=2"),
}
PAIRS = [
    pytest.param(name, plan, marks=pytest.mark.long if (name, plan) in LONG else pytest.mark.slow)
    for name in SCRIPTS
    for plan in PLANS
]


def built(job: Job) -> nn.Module:
    """The model as every run of the job starts from it, in float64."""
    with preserved_draws():
        seed_everything(model_seed(job.seed))
        return job.model().double().train()


def fitted(job: Job, plan: str) -> Trained:
    """By `fit()`."""
    losses: list[float] = []
    evaluations: list[dict[str, float]] = []
    listener = replace(
        QUIET,
        step=lambda progress: losses.append(progress.loss),
        evaluated=lambda step, metrics: evaluations.append(metrics),
    )
    with Trainer(job, plan, devices="simulated", dtype=torch.float64, listener=listener) as trainer:
        trainer.fit()
        weights = trainer.together(full_state)[0]
    return Trained(losses=losses, evaluations=evaluations, weights=weights)


def on_one_device(script: Script, plan: str) -> Trained:
    """By the script's own loop; where it draws, by a run of the same chunks on one device."""
    if script.alone is None:
        return fitted(script.job, f"microbatches={Plan.parse(plan).num_chunks},keyed_draws=true")
    model = built(script.job)
    losses, evaluations = script.alone(model)
    return Trained(
        losses=losses, evaluations=[{"loss": each} for each in evaluations], weights=dict(model.state_dict())
    )


def agree(found: Trained, expected: Trained) -> None:
    """rtol 1e-9: float64, sums in other orders, amplified by five steps and their normalisation."""
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(expected.losses), rtol=1e-9, atol=0.0)
    torch.testing.assert_close(found.evaluations, expected.evaluations, rtol=1e-9, atol=0.0)
    assert found.weights
    for name, value in found.weights.items():
        torch.testing.assert_close(
            value,
            expected.weights[name],
            rtol=1e-9,
            atol=1e-10,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.covering("fine_tuning", "mixed_images")
@pytest.mark.parametrize(("name", "plan"), PAIRS)
def test_a_converted_script_is_verified(name: str, plan: str, tmp_path: Path):
    report = verify(
        SCRIPTS[name](tmp_path).job, Plan.parse(plan), devices="simulated", dtype=torch.float64, steps=3
    )
    assert report is not None and report.passed, (report.first_wrong, report.causes)


@pytest.mark.covering("fine_tuning", "mixed_images")
@pytest.mark.parametrize(("name", "plan"), PAIRS)
def test_a_converted_script_trains_as_it_did_alone(name: str, plan: str, tmp_path: Path):
    script = SCRIPTS[name](tmp_path)
    found = fitted(script.job, f"{plan},keyed_draws=true" if script.alone is None else plan)
    agree(found, on_one_device(script, plan))
    assert len(found.losses) == 5 and len(found.evaluations) == 3 and len(set(found.losses)) == 5


# --- A moving average of the weights, in a loop of one's own: it is kept of what each rank holds, and
# evaluated in place of the weights.


def with_moving_average(plan: str) -> Trained:
    """Losses, evaluations of the averages, and the averages."""
    losses: list[float] = []
    evaluations: list[dict[str, float]] = []
    with Trainer(
        mixed_images.job(), plan, devices="simulated", dtype=torch.float64, listener=QUIET
    ) as trainer:
        models = [replica.model for replica in trainer.replicas]
        averages = [mixed_images.averaged(model) for model in models]
        for batch in trainer.batches():
            losses.append(trainer.step(batch))
            for model, average in zip(models, averages, strict=True):
                average.update_parameters(model)
            if trainer.next_step % 2 == 0:
                with mixed_images.with_averages(models, averages):
                    evaluations.append(trainer.evaluate())
        with mixed_images.with_averages(models, averages):
            weights = {name: each.clone() for name, each in trainer.together(full_state)[0].items()}
    return Trained(losses=losses, evaluations=evaluations, weights=weights)


@pytest.mark.parametrize(
    "plan",
    [pytest.param(plan, marks=pytest.mark.long if plan == "dp=2" else pytest.mark.slow) for plan in PLANS],
)
def test_a_moving_average_of_the_weights_is_one_device_s(plan: str):
    found = with_moving_average(f"{plan},keyed_draws=true")
    agree(found, with_moving_average(f"microbatches={Plan.parse(plan).num_chunks},keyed_draws=true"))
    own = fitted(mixed_images.job(), f"{plan},keyed_draws=true")
    assert found.losses == own.losses, "evaluating the averages changed the training"
    assert found.evaluations[-1] != own.evaluations[1] and not torch.equal(
        found.weights["fc.weight"], own.weights["fc.weight"]
    )


# --- Real lengths.


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_a_small_gpt_of_300_tokens_is_verified(plan: str, tmp_path: Path):
    config, path = (
        small_gpt.Settings(block_size=300, vocab_size=509, n_embd=48, n_head=4, batch_size=4),
        tmp_path / "train.bin",
    )
    small_gpt.write_tokens(path, config, count=3000)
    report = verify(
        small_gpt.job(path, config), Plan.parse(plan), devices="simulated", dtype=torch.float64, steps=2
    )
    assert report is not None and report.passed, (report.first_wrong, report.causes)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_a_llama_that_is_fine_tuned_on_300_tokens_is_verified(plan: str, tmp_path: Path):
    fine_tuning.save_pretrained(
        tmp_path, model_type="llama", vocab_size=211, hidden_size=40, intermediate_size=75, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=320, initializer_range=0.1,
    )  # fmt: skip
    data = fine_tuning.Conversations(12, seed=1, longest=300, vocabulary=211)
    job = replace(
        fine_tuning.job(tmp_path, data, data, batch_size=4, steps=3, every=2),
        collate=lambda samples: fine_tuning.collate(samples, multiple=304),
    )
    report = verify(job, Plan.parse(plan), devices="simulated", dtype=torch.float64, steps=2)
    assert report is not None and report.passed, (report.first_wrong, report.causes)
