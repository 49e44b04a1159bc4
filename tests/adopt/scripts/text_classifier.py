"""Fine-tuning in the style of scripts around transformers: dicts, groups without decay, accumulation, a linear schedule."""

import argparse
import logging
import os
import re
from types import SimpleNamespace

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

logger = logging.getLogger(__name__)


class Lines(Dataset):
    """Lines of a module of the standard library; the label is whether they are indented."""

    def __init__(self, max_length):
        with open(os.__file__, encoding="utf-8") as text:
            self.lines = [line for line in text if len(line) > max_length][:512]
        self.max_length = max_length

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        line = self.lines[index]
        ids = [min(ord(letter), 127) for letter in line[: self.max_length]]
        return {"input_ids": ids, "label": int(re.match(r"\s", line) is not None)}


class Model(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embeddings = nn.Embedding(128, width)
        self.LayerNorm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.classifier = nn.Linear(width, 2)
        self.dropout = nn.Dropout(0.1)

    def forward(self, input_ids, labels=None):
        hidden = self.LayerNorm(self.embeddings(input_ids))
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        logits = self.classifier(self.dropout(hidden.mean(dim=1)))
        loss = nn.functional.cross_entropy(logits, labels) if labels is not None else None
        return SimpleNamespace(loss=loss, logits=logits)


def collate(features):
    return {
        "input_ids": torch.tensor([each["input_ids"] for each in features]),
        "labels": torch.tensor([each["label"] for each in features]),
    }


def get_linear_schedule_with_warmup(optimizer, num_warmup_steps, num_training_steps):
    def lr_lambda(current_step):
        if current_step < num_warmup_steps:
            return current_step / max(1, num_warmup_steps)
        return max(0.0, (num_training_steps - current_step) / max(1, num_training_steps - num_warmup_steps))

    return LambdaLR(optimizer, lr_lambda)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    parser.add_argument("--num_warmup_steps", type=int, default=2)
    parser.add_argument("--output_dir", type=str, default=None)
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def main():
    args = parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(args.seed)
    device = torch.device("cpu")
    model = Model()
    train_dataset = Lines(12)
    train_dataloader = DataLoader(
        train_dataset, shuffle=True, collate_fn=collate, batch_size=args.per_device_train_batch_size
    )

    # Optimizer: split weights in two groups, one with weight decay and the other not.
    no_decay = ["bias", "LayerNorm.weight"]
    optimizer_grouped_parameters = [
        {
            "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
            "weight_decay": args.weight_decay,
        },
        {
            "params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)],
            "weight_decay": 0.0,
        },
    ]
    optimizer = torch.optim.AdamW(optimizer_grouped_parameters, lr=args.learning_rate)
    max_train_steps = args.num_train_epochs * (len(train_dataloader) // args.gradient_accumulation_steps)
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, args.num_warmup_steps, max_train_steps)
    model.to(device)

    logger.info("***** Running training *****")
    completed_steps = 0
    for epoch in range(args.num_train_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            batch = {k: v.to(device) for k, v in batch.items()}
            outputs = model(**batch)
            loss = outputs.loss
            loss = loss / args.gradient_accumulation_steps
            loss.backward()
            if (step + 1) % args.gradient_accumulation_steps == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                completed_steps += 1
            if completed_steps >= max_train_steps:
                break
        logger.info("epoch %d: %f", epoch, loss.item())
    if args.output_dir is not None:
        torch.save(model.state_dict(), os.path.join(args.output_dir, "model.pt"))


if __name__ == "__main__":
    main()
