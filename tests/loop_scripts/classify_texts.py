"""Fine-tuning of a small BERT with accelerate, in the shape of transformers' scripts without a Trainer."""

import argparse
import math
import os
import random

import torch
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import BertConfig, BertForSequenceClassification, get_scheduler

from meshloom.accelerate import Accelerator

logger = get_logger(__name__)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("output_dir")
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args()


def make_texts(count):
    """Sentences of numbers, whose label is whether the first is among the others."""
    draws = random.Random(3)
    texts = []
    for _ in range(count):
        words = [draws.randrange(3, 40) for _ in range(draws.randrange(4, 12))]
        texts.append({"input_ids": words, "labels": int(words[0] in words[1:])})
    return texts


def pad(texts):
    longest = max(len(each["input_ids"]) for each in texts)
    ids = [each["input_ids"] + [0] * (longest - len(each["input_ids"])) for each in texts]
    masks = [[1] * len(each["input_ids"]) + [0] * (longest - len(each["input_ids"])) for each in texts]
    labels = [each["labels"] for each in texts]
    return {
        "input_ids": torch.tensor(ids),
        "attention_mask": torch.tensor(masks),
        "labels": torch.tensor(labels),
    }


def main():
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(args.seed)
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)
    accelerator.wait_for_everyone()

    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24, max_position_embeddings=16,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip
    with accelerator.main_process_first():
        train_texts, eval_texts = make_texts(45), make_texts(21)
    train_dataloader = DataLoader(
        train_texts, shuffle=True, collate_fn=pad, batch_size=args.per_device_train_batch_size
    )
    eval_dataloader = DataLoader(eval_texts, collate_fn=pad, batch_size=args.per_device_eval_batch_size)

    no_decay = ["bias", "LayerNorm.weight"]
    groups = [
        {
            "params": [
                p for n, p in model.named_parameters() if any(each in n for each in no_decay) is not decays
            ],
            "weight_decay": 0.1 if decays else 0.0,
        }
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate)
    steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    max_train_steps = args.num_train_epochs * steps_per_epoch
    lr_scheduler = get_scheduler(
        name="linear",
        optimizer=optimizer,
        num_warmup_steps=1 * accelerator.num_processes,
        num_training_steps=max_train_steps * accelerator.num_processes,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    total = args.per_device_train_batch_size * accelerator.num_processes * args.gradient_accumulation_steps
    logger.info(f"batches of {total} in all")
    progress_bar = tqdm(range(max_train_steps), disable=not accelerator.is_local_main_process)
    for epoch in range(args.num_train_epochs):
        model.train()
        total_loss = 0.0
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                outputs = model(**batch)
                loss = outputs.loss
                total_loss += float(accelerator.reduce(loss.detach(), "mean"))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                progress_bar.update(1)

        model.eval()
        right, losses = [], []
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions, references = accelerator.gather_for_metrics(
                (outputs.logits.argmax(dim=-1), batch["labels"])
            )
            right.append(predictions == references)
            repeated = outputs.loss.repeat(args.per_device_eval_batch_size)
            losses.append(accelerator.gather_for_metrics(repeated))
        accuracy, eval_loss = torch.cat(right).float().mean(), torch.cat(losses).mean()
        accelerator.print(
            f"epoch {epoch}: loss {total_loss / len(train_dataloader):.10f}, accuracy {accuracy:.6f} of {len(torch.cat(right))}, "
            f"evaluated {eval_loss:.10f} of {len(torch.cat(losses))}"
        )

    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        args.output_dir, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    accelerator.save_state(os.path.join(args.output_dir, "state"))


if __name__ == "__main__":
    main()
