"""Models of transformers that `save_pretrained` has written: `from_pretrained` in the job's model function, and
`weights=DIRECTORY`, start every plan from the same values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.replica.replica_state import full_state
from meshloom.telemetry.progress import Listener
from meshloom.train.trainer import Trainer
from meshloom.verify.run import verify
from tests.jobs import Samples
from tests.processes import on_ranks

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]

LENGTH = 6


@pytest.fixture(autouse=True)
def _no_progress_bars(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Which leave a thread."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def small(kind: str) -> PreTrainedModel:
    if kind == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=31,
                n_positions=LENGTH,
                n_embd=12,
                n_layer=2,
                n_head=3,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=31, hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=LENGTH,
        )
    )  # fmt: skip


def saved(kind: str, directory: Path) -> str:
    """The directory of a model whose weights no seed of the job gives, in several files."""
    torch.manual_seed(77)
    small(kind).save_pretrained(directory, max_shard_size="5KB")
    assert (directory / "model.safetensors.index.json").exists()
    return str(directory)


def job_of(kind: str, directory: str, how: str) -> Job:
    tokens = torch.randint(31, (8, LENGTH), generator=torch.Generator().manual_seed(3))
    build = type(small(kind)).from_pretrained

    def loss(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
        return model(input_ids=batch["x"], labels=batch["x"], use_cache=False).loss

    return Job(
        model=(lambda: small(kind)) if how == "weights" else (lambda: build(directory)),
        weights=directory if how == "weights" else None,
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        data=lambda: Samples(x=tokens),
        batch_size=4,
        steps=2,
    )


def at_the_start(job: Job, plan: str) -> dict[str, Tensor]:
    quiet = Listener(lambda text: None, note=lambda text: None)
    with Trainer(job, plan, devices="simulated", listener=quiet) as trainer:
        return {name: each.clone() for name, each in trainer.together(full_state)[0].items()}


def equal(job: Job, plan: str, devices: str) -> bool | None:
    """Of the report, on the rank that has it."""
    report = verify(job, Plan.parse(plan), devices=devices, steps=2, dtype=torch.float64)
    return report.passed if report else None


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("gpt2", "dp=2"),
        ("llama", "tp=2,tp_placements=*.mlp.gate_proj:column"),
        ("gpt2", "pp=2"),
        ("llama", "dp=2,pp=2,microbatches=2"),
        ("gpt2", "tp=2"),
    ],
)
@pytest.mark.slow
def test_a_saved_model_starts_every_plan_and_equals_one_device(kind: str, plan: str, tmp_path: Path) -> None:
    directory = saved(kind, tmp_path)
    expected = type(small(kind)).from_pretrained(directory).state_dict()
    found = at_the_start(job_of(kind, directory, "weights"), plan)
    assert len(found) > 20 and all(
        torch.equal(each, expected[name]) for name, each in found.items() if name in expected
    )
    assert equal(job_of(kind, directory, "from_pretrained"), plan, "simulated")


def _on_a_rank(kind: str, directory: str, how: str, plan: str) -> bool | None:
    logging.disable_progress_bar()
    return equal(job_of(kind, directory, how), plan, "cpu")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "how", "plan"),
    [
        ("gpt2", "weights", "dp=2"),
        ("llama", "from_pretrained", "pp=2"),
        ("llama", "weights", "tp=2,tp_placements=*.mlp.gate_proj:column"),
        ("gpt2", "from_pretrained", "dp=2"),
        ("gpt2", "from_pretrained", "tp=2"),
    ],
)
@pytest.mark.slow
def test_processes_start_from_the_saved_values_and_equal_one_device(
    kind: str, how: str, plan: str, tmp_path: Path
) -> None:
    assert on_ranks(_on_a_rank, 2, kind, saved(kind, tmp_path), how, plan, timeout_seconds=120.0)[0]


@pytest.mark.slow
def test_a_trained_checkpoint_loads_into_transformers(tmp_path: Path) -> None:
    directory = saved("gpt2", tmp_path / "before")
    quiet = Listener(lambda text: None, note=lambda text: None)
    job = job_of("gpt2", directory, "weights")
    with Trainer(job, "pp=2", devices="simulated", listener=quiet, out=tmp_path / "run") as trainer:
        checkpoint = trainer.fit().checkpoint
        trained = trainer.together(full_state)[0]
    (checkpoint / "config.json").write_text((tmp_path / "before/config.json").read_text())
    again = GPT2LMHeadModel.from_pretrained(checkpoint)
    assert all(torch.equal(again.state_dict()[name], each) for name, each in trained.items())
    before = GPT2LMHeadModel.from_pretrained(directory)
    assert not torch.equal(
        again.state_dict()["transformer.wte.weight"], before.state_dict()["transformer.wte.weight"]
    )
