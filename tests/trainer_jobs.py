"""Trainers of transformers, small and without dropout, for the tests of `from_transformers`; what they do by `train()`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from meshloom.core.job import Job
from meshloom.replica.replica_state import full_state
from meshloom.telemetry.progress import QUIET
from meshloom.train.trainer import Trainer as JobTrainer

LENGTH, WORDS, CLASSES = 7, 19, 3


@dataclass(frozen=True, kw_only=True)
class Trained:
    """losses: of each step. evaluations: by name. logged: of each step."""

    losses: list[float]
    weights: dict[str, Tensor]
    evaluations: list[dict[str, float]]
    logged: list[dict[str, float]]


class Words(torch.utils.data.Dataset[dict[str, Any]]):
    """Sequences of 3 to 7 tokens, padded to 7 unless `ragged`; labels: the tokens, but the first two."""

    def __init__(self, num_samples: int, seed: int = 1, *, ragged: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, LENGTH + 1, (num_samples,), generator=generator)
        self._rows = [torch.randint(1, WORDS, (int(each),), generator=generator) for each in lengths]
        self._length = 0 if ragged else LENGTH

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return padded(self._rows[index].tolist(), self._length)


class Classified(Words):
    """The same with a class for each."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "labels": int(self._rows[index].sum()) % CLASSES}


class WordStream(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Sequences one after another, others in each epoch."""

    def __init__(self, num_samples: int, *, has_length: bool = False) -> None:
        self._num_samples, self._epoch = num_samples, 0
        if has_length:
            self.__class__ = type("SizedWordStream", (WordStream,), {"__len__": lambda self: num_samples})

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        words = Words(self._num_samples, seed=10 + self._epoch)
        return (words[index] for index in range(self._num_samples))


def padded(row: list[int], length: int) -> dict[str, Any]:
    """The sample of a sequence, padded to at least `length`."""
    missing = max(0, length - len(row))
    return {
        "input_ids": row + [0] * missing,
        "attention_mask": [1] * len(row) + [0] * missing,
        "labels": [-100, -100, *row[2:]] + [-100] * missing,
    }


def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pads to the longest of the samples."""
    length = max(len(each["input_ids"]) for each in samples)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}

    def value(name: str, given: Any) -> Any:
        return given if isinstance(given, int) else given + [fill[name]] * (length - len(given))

    return {name: torch.tensor([value(name, each[name]) for each in samples]) for name in samples[0]}


def classifier(trial: Any = None) -> nn.Module:
    """A BERT, whose loss is a mean over samples."""
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=17, max_position_embeddings=LENGTH,
            num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    ).double()  # fmt: skip


def language_model(trial: Any = None) -> nn.Module:
    """A GPT-2, whose loss is divided by the labels of a step; it is computed in float32."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS, n_positions=LENGTH, n_embd=12, n_layer=2, n_head=3, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )
    ).double()  # fmt: skip


class OwnModel(nn.Module):
    """A model that is none of transformers', and returns a mean over its labels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 11)
        self.norm = nn.LayerNorm(11)
        self.mix = nn.Linear(11, 11)
        self.head = nn.Linear(11, WORDS)
        self.double()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.mix(self.norm(self.embed(input_ids)))))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def summed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A loss function of the user's, divided by the number of items."""
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return loss / num_items_in_batch


def accuracy(given: Any) -> dict[str, float]:
    return {"accuracy": float((given.predictions.argmax(-1) == given.label_ids).mean())}


def arguments(directory: Path | str, **given: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "output_dir": str(directory), "report_to": "none", "disable_tqdm": True, "per_device_train_batch_size": 4, "num_train_epochs": 2, "log_level": "error",
        "logging_strategy": "no", "save_strategy": "no", "learning_rate": 1e-2, "use_cpu": True,
    }  # fmt: skip
    return TrainingArguments(**{**settings, **given})


def by_train(trainer: Trainer) -> Trained:
    """What `train()` does."""
    losses: list[float] = []
    open_step: list[float] = []
    evaluations: list[dict[str, float]] = []
    training_step = trainer.training_step

    def step(*arguments: Any) -> Tensor:
        loss = training_step(*arguments)
        open_step.append(float(loss))
        return loss

    class Notes(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            losses.append(sum(open_step))
            open_step.clear()

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **more: Any) -> None:
            evaluations.append(dict(metrics))

    trainer.training_step = step
    trainer.add_callback(Notes())
    trainer.train()
    weights = {name: each.detach().clone() for name, each in trainer.model.state_dict().items()}
    return Trained(losses=losses, weights=weights, evaluations=evaluations, logged=[])


def by_job(job: Job, plan: str = "dp=1") -> Trained:
    """What the job does by `fit()`, in float64."""
    losses: list[float] = []
    logged: list[dict[str, float]] = []
    evaluations: list[dict[str, float]] = []

    def step(progress: Any) -> None:
        losses.append(progress.loss)
        logged.append(dict(progress.logged))

    listener = replace(QUIET, step=step, evaluated=lambda number, metrics: evaluations.append(metrics))
    with JobTrainer(job, plan, devices="simulated", dtype=torch.float64, listener=listener) as trainer:
        trainer.fit()
        weights = {name: each.clone() for name, each in trainer.together(full_state)[0].items()}
    return Trained(losses=losses, weights=weights, evaluations=evaluations, logged=logged)


def agree(found: Trained, expected: Trained, tolerance: float) -> None:
    """Of losses, parameters, and what both evaluated."""
    assert len(found.losses) == len(expected.losses) >= 3
    torch.testing.assert_close(
        torch.tensor(found.losses), torch.tensor(expected.losses), rtol=tolerance, atol=tolerance
    )
    trained = {name: each for name, each in found.weights.items() if name in expected.weights}
    assert len(trained) > 3
    for name, value in trained.items():
        torch.testing.assert_close(
            value, expected.weights[name], rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )  # fmt: skip
    for ours, theirs in zip(found.evaluations, expected.evaluations, strict=False):
        torch.testing.assert_close(
            ours, {name: theirs[name] for name in ours}, rtol=tolerance, atol=tolerance
        )


Make = Callable[[Path], Trainer]
