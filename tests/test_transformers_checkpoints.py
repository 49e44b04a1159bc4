"""transformers reads the checkpoints of its models as they are, whatever plan they were saved under."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshloom.checkpoint.writing.config_files import config_files_of
from meshloom.core.job import Job
from meshloom.telemetry.progress import QUIET
from meshloom.train.trainer import Trainer
from tests.jobs import Samples

WORDS = torch.arange(12 * 7).view(12, 7) % 31


def gpt2() -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=31, n_embd=12, n_layer=2, n_head=3, n_positions=9, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return model(input_ids=batch["x"], labels=batch["x"], use_cache=False).loss


@pytest.mark.parametrize("plan", ["tp=2", "pp=2", "dp=2,zero=1"])
@pytest.mark.slow
def test_from_pretrained_of_a_checkpoint_gives_equal_outputs(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tqdm
    import transformers

    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # a thread that would stay
    job = Job(
        model=gpt2, loss=loss, data=lambda: Samples(x=WORDS), batch_size=6, steps=2,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
    )  # fmt: skip
    with Trainer(job, plan, devices="simulated", out=tmp_path, listener=QUIET) as trainer:
        path = trainer.fit().checkpoint
    assert path is not None
    with Trainer(job, "dp=1", steps=3, resume=tmp_path, listener=QUIET) as trainer:
        ours = trainer.replicas[0].model.eval()
        theirs = transformers.AutoModelForCausalLM.from_pretrained(path)
        assert (
            isinstance(theirs, transformers.GPT2LMHeadModel)
            and theirs.lm_head.weight is theirs.transformer.wte.weight
        )
        with torch.no_grad():
            assert torch.equal(theirs(WORDS).logits, ours(WORDS).logits)
    moved = gpt2().state_dict()["transformer.wte.weight"] - theirs.transformer.wte.weight
    assert float(moved.detach().abs().max()) > 1e-3  # it was trained


def test_a_model_without_such_a_configuration_has_no_config_files() -> None:
    model = nn.Linear(2, 2)
    assert config_files_of(model) == {}
    model.config = {"width": 2}  # type: ignore[assignment]
    assert config_files_of(model) == {}
