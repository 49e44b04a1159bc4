"""Fine-tuning a causal language model of transformers: weights from a directory, texts of several lengths
padded by a collator, labels of -100."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshloom as ml

PAD = 0
Sample = dict[str, list[int]]


def save_pretrained(directory: Path, **settings: Any) -> None:
    """A small GPT-2 with odd sizes, or the model that `settings` describe, saved as published ones are."""
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {
        "model_type": "gpt2", "vocab_size": 43, "n_embd": 24, "n_inner": 35, "n_layer": 2, "n_head": 3, "n_positions": 32, "initializer_range": 0.2,
        "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    }  # fmt: skip
    torch.manual_seed(7)
    config = AutoConfig.for_model(
        **(settings or small), pad_token_id=PAD, bos_token_id=1, eos_token_id=2, use_cache=False
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def load(directory: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory)


class Conversations(torch.utils.data.Dataset[Sample]):
    """Questions and answers as token ids; only answers are learnt."""

    def __init__(self, count: int, seed: int, longest: int = 15, vocabulary: int = 43) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.samples: list[Sample] = []
        for length in torch.randint(5, longest + 1, (count,), generator=generator).tolist():
            ids = torch.randint(1, vocabulary, (length,), generator=generator).tolist()
            question = max(2, length // 3)
            self.samples.append({"input_ids": ids, "labels": [-100] * question + ids[question:]})

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]


def collate(samples: list[Sample], multiple: int = 8) -> dict[str, Tensor]:
    """Padded at the right to the longest text, rounded up: input_ids, attention_mask and labels [samples,
    length]."""
    length = -(-max(len(each["input_ids"]) for each in samples) // multiple) * multiple

    def padded(name: str, fill: int) -> Tensor:
        return torch.tensor([each[name] + [fill] * (length - len(each[name])) for each in samples])

    ids = padded("input_ids", PAD)
    mask = torch.tensor(
        [[1] * len(each["input_ids"]) + [0] * (length - len(each["input_ids"])) for each in samples]
    )
    return {"input_ids": ids, "attention_mask": mask, "labels": padded("labels", -100)}


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=5e-3, weight_decay=0.01)


def make_scheduler(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """Linear down to zero."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))


# --- The script's loop.


def mean_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Over the batch's labels that count."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


def script(
    model: nn.Module, data: Conversations, held_out: Conversations, batch_size: int, steps: int, every: int
) -> tuple[list[float], list[float]]:
    """Losses of the steps, and per-token losses of the evaluations."""
    optimizer = make_optimizer(model.parameters())
    scheduler = make_scheduler(optimizer, steps)
    batches = torch.utils.data.DataLoader(data, batch_size=batch_size, collate_fn=collate)
    losses, evaluations = [], []
    for step, batch in enumerate(batches):
        if step == steps:
            break
        model.train()
        loss = mean_loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % every == 0 or step + 1 == steps:
            model.eval()
            total, count = 0.0, 0
            with torch.no_grad():
                for batch in torch.utils.data.DataLoader(held_out, batch_size=batch_size, collate_fn=collate):
                    tokens = int((batch["labels"][:, 1:] != -100).sum())
                    total, count = total + float(mean_loss(model, batch)) * tokens, count + tokens
            evaluations.append(total / count)
    return losses, evaluations


# --- The job that it becomes: the loss says what its mean is over.


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Summed over the labels that count, and how many they are."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"), (
        labels != -100
    ).sum()


def job(
    directory: Path, data: Conversations, held_out: Conversations, batch_size: int, steps: int, every: int
) -> ml.Job:
    return ml.Job(
        model=lambda: load(directory),
        loss=loss,
        optimizer=make_optimizer,
        data=lambda: data,
        batch_size=batch_size,
        steps=steps,
        shuffle=False,
        collate=collate,
        scheduler=lambda optimizer: make_scheduler(optimizer, steps),
        clip_grad_norm=1.0,
        evaluate=ml.Evaluate(lambda: held_out, {"loss": loss}, every=every),
    )
