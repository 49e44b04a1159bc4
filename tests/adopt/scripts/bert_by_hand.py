"""A transformers' model with a loop by hand: dicts as batches, get_linear_schedule_with_warmup."""

import torch
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm
from transformers import BertConfig, BertForSequenceClassification, get_scheduler

torch.manual_seed(0)


class Reviews(Dataset):
    def __init__(self, size, seed):
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(5, 90, (size, 12), generator=g)
        self.labels = (self.ids.float().mean(1) > 47).long()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, idx):
        return {
            "input_ids": self.ids[idx],
            "attention_mask": torch.ones(12, dtype=torch.long),
            "labels": self.labels[idx],
        }


train_dataloader = DataLoader(Reviews(96, 0), shuffle=True, batch_size=8)
eval_dataloader = DataLoader(Reviews(32, 1), batch_size=8)
config = BertConfig(
    vocab_size=96,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=48,
    max_position_embeddings=16,
    num_labels=2,
)
model = BertForSequenceClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
num_epochs = 2
num_training_steps = num_epochs * len(train_dataloader)
lr_scheduler = get_scheduler(
    "linear", optimizer=optimizer, num_warmup_steps=2, num_training_steps=num_training_steps
)
device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
model.to(device)
progress_bar = tqdm(range(num_training_steps))
model.train()
for epoch in range(num_epochs):
    for batch in train_dataloader:
        batch = {k: v.to(device) for k, v in batch.items()}
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        progress_bar.update(1)

model.eval()
correct = total = 0
for batch in eval_dataloader:
    batch = {k: v.to(device) for k, v in batch.items()}
    with torch.no_grad():
        outputs = model(**batch)
    predictions = torch.argmax(outputs.logits, dim=-1)
    correct += (predictions == batch["labels"]).sum().item()
    total += len(batch["labels"])
print("accuracy", correct / total)
