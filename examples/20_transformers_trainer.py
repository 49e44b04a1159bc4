"""A script around transformers' `Trainer`, which runs under a plan as it stands (docs/transformers.md).

python examples/20_transformers_trainer.py                                 # one process
meshloom run    examples/20_transformers_trainer.py --plan dp=2            # two replicas, half of each batch on each
meshloom run    examples/20_transformers_trainer.py --plan tp=2            # matrices on two ranks
meshloom verify examples/20_transformers_trainer.py --plan dp=2,zero=3     # its first steps: those of one process?
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import EvalPrediction, GPT2Config, GPT2LMHeadModel, TrainingArguments

import meshloom as ml

LENGTH = 32


def lines_of_bytes(last: bool) -> list[dict[str, torch.Tensor]]:
    """Pieces of this file; every fifth is held out."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    pieces = [each for each in text.split(LENGTH) if len(each) == LENGTH]
    return [{"input_ids": each, "labels": each} for i, each in enumerate(pieces) if (i % 5 == 4) == last]


def accuracy(predicted: EvalPrediction) -> dict[str, float]:
    """Of the byte that comes next."""
    return {
        "accuracy": float((predicted.predictions[:, :-1].argmax(-1) == predicted.label_ids[:, 1:]).mean())
    }


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--steps", type=int, default=60)
    words.add_argument("--out", default="byte_model")
    given = words.parse_args()

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
        )
    )
    arguments = TrainingArguments(
        output_dir=given.out,
        max_steps=given.steps,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=20,
        save_strategy="no",
        report_to=[],
    )
    trainer = ml.transformers.Trainer(
        model,
        arguments,
        train_dataset=lines_of_bytes(last=False),
        eval_dataset=lines_of_bytes(last=True),
        compute_metrics=accuracy,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
