"""Fine-tuning by hand as in transformers' no_trainer examples, without accelerate."""

import argparse
import logging
import math

import torch
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import BertConfig, BertForSequenceClassification, get_scheduler, set_seed

logger = logging.getLogger(__name__)


def parse_args():
    parser = argparse.ArgumentParser(description="Finetune a model on a text classification task")
    parser.add_argument("--max_length", type=int, default=16)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=16)
    parser.add_argument("--learning_rate", type=float, default=5e-4)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--max_train_steps", type=int, default=None)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--lr_scheduler_type", default="linear")
    parser.add_argument("--num_warmup_steps", type=int, default=3)
    parser.add_argument("--output_dir", type=str, default=None)
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()
    return args


def preprocess(num, max_length, seed):
    generator = torch.Generator().manual_seed(seed)
    examples = []
    for _ in range(num):
        length = int(torch.randint(5, max_length + 1, (), generator=generator))
        ids = torch.randint(1, 60, (length,), generator=generator)
        examples.append(
            {
                "input_ids": ids.tolist(),
                "attention_mask": [1] * length,
                "labels": int(ids.float().mean() > 30),
            }
        )
    return examples


class DataCollatorWithPadding:
    def __call__(self, features):
        longest = max(len(each["input_ids"]) for each in features)
        batch = {}
        for key in ("input_ids", "attention_mask"):
            batch[key] = torch.tensor([each[key] + [0] * (longest - len(each[key])) for each in features])
        batch["labels"] = torch.tensor([each["labels"] for each in features])
        return batch


def main():
    args = parse_args()
    logging.basicConfig(level=logging.INFO)
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    if args.seed is not None:
        set_seed(args.seed)
    config = BertConfig(
        vocab_size=60,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=32,
        num_labels=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    train_dataset = preprocess(160, args.max_length, 0)
    eval_dataset = preprocess(48, args.max_length, 1)
    data_collator = DataCollatorWithPadding()
    train_dataloader = DataLoader(
        train_dataset, shuffle=True, collate_fn=data_collator, batch_size=args.per_device_train_batch_size
    )
    eval_dataloader = DataLoader(
        eval_dataset, collate_fn=data_collator, batch_size=args.per_device_eval_batch_size
    )

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

    overrode_max_train_steps = False
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    if args.max_train_steps is None:
        args.max_train_steps = args.num_train_epochs * num_update_steps_per_epoch
        overrode_max_train_steps = True

    lr_scheduler = get_scheduler(
        name=args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=args.num_warmup_steps,
        num_training_steps=args.max_train_steps,
    )
    if overrode_max_train_steps:
        args.max_train_steps = args.num_train_epochs * num_update_steps_per_epoch
    args.num_train_epochs = math.ceil(args.max_train_steps / num_update_steps_per_epoch)
    model.to(device)

    logger.info("***** Running training *****")
    logger.info(f"  Num examples = {len(train_dataset)}")
    progress_bar = tqdm(range(args.max_train_steps))
    completed_steps = 0
    starting_epoch = 0
    for epoch in range(starting_epoch, args.num_train_epochs):
        model.train()
        total_loss = 0
        for step, batch in enumerate(train_dataloader):
            batch = {k: v.to(device) for k, v in batch.items()}
            outputs = model(**batch)
            loss = outputs.loss
            total_loss += loss.detach().float()
            loss = loss / args.gradient_accumulation_steps
            loss.backward()
            if (
                step % args.gradient_accumulation_steps == args.gradient_accumulation_steps - 1
                or step == len(train_dataloader) - 1
            ):
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                progress_bar.update(1)
                completed_steps += 1
            if completed_steps >= args.max_train_steps:
                break

        model.eval()
        samples_seen = 0
        correct = 0
        for step, batch in enumerate(eval_dataloader):
            batch = {k: v.to(device) for k, v in batch.items()}
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            correct += (predictions == batch["labels"]).sum().item()
            samples_seen += len(predictions)
        logger.info(f"epoch {epoch}: accuracy {correct / samples_seen}")

    if args.output_dir is not None:
        model.save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()
