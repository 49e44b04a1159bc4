"""A transformers model with labels, padding by batch, groups by names, a schedule, an average of the weights."""

import torch
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

import meshloom as ml

torch.manual_seed(42)
config = BertConfig(
    vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, max_position_embeddings=16,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
)  # fmt: skip
samples = [{"ids": torch.randint(1, 60, (5 + i % 6,)), "label": i % 3} for i in range(40)]


def collate(items):
    longest = max(len(each["ids"]) for each in items)
    ids = torch.zeros(len(items), longest, dtype=torch.long)
    for row, each in enumerate(items):
        ids[row, : len(each["ids"])] = each["ids"]
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "labels": torch.tensor([each["label"] for each in items]),
    }


train_dataloader = ml.loader(DataLoader(samples, shuffle=True, collate_fn=collate, batch_size=9))
eval_dataloader = DataLoader(samples[:12], collate_fn=collate, batch_size=6)
model = ml.parallel(BertForSequenceClassification(config))
no_decay = ["bias", "LayerNorm.weight"]
groups = [
    {
        "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
        "weight_decay": 0.01,
    },
    {
        "params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)],
        "weight_decay": 0.0,
    },
]
optimizer = AdamW(groups, lr=1e-3)
lr_scheduler = get_linear_schedule_with_warmup(optimizer, 1, 8)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
for _ in range(2):
    model.train()
    for batch in train_dataloader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    model.eval()
    with torch.no_grad():
        right = sum((model(**batch).logits.argmax(-1) == batch["labels"]).sum() for batch in eval_dataloader)
if ml.main:
    print(f"{int(right)} of 12")
