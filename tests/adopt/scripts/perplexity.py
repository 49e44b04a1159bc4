"""A language model on the text of Python's own library: its loss is a mean over tokens, and its best perplexity is kept."""

import math
import os
from contextlib import nullcontext

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

# hyperparameters
context_length = 16
batch_size = 12
max_steps = 150
eval_interval = 15
learning_rate = 3e-3
device = "cuda" if torch.cuda.is_available() else "cpu"
amp_ctx = torch.autocast(device_type="cpu", dtype=torch.bfloat16) if device == "cpu" else nullcontext()


class Characters(Dataset):
    def __init__(self, ids, length):
        self.ids, self.length = ids, length

    def __len__(self):
        return (len(self.ids) - 1) // self.length

    def __getitem__(self, i):
        chunk = self.ids[i * self.length : i * self.length + self.length + 1]
        return chunk[:-1], chunk[1:]


class LanguageModel(nn.Module):
    def __init__(self, vocab_size, n_embd=24):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, n_embd)
        self.rnn = nn.GRU(n_embd, n_embd, batch_first=True)
        self.head = nn.Linear(n_embd, vocab_size)

    def forward(self, idx):
        hidden, _ = self.rnn(self.tokens(idx))
        return self.head(hidden)


def count_tokens(targets):
    return (targets != 0).sum()


torch.manual_seed(1337)
with open(os.__file__, encoding="utf-8") as f:
    text = f.read()[:12000]
chars = sorted(set(text))
ids = torch.tensor([chars.index(ch) for ch in text])
split = int(0.85 * len(ids))
train_loader = DataLoader(Characters(ids[:split], context_length), batch_size=batch_size, shuffle=True)
valid_loader = DataLoader(Characters(ids[split:], context_length), batch_size=batch_size)

model = LanguageModel(len(chars)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))


def estimate(model):
    model.eval()
    total_loss, total_tokens = 0.0, 0
    with torch.no_grad(), amp_ctx:
        for inputs, targets in valid_loader:
            inputs, targets = inputs.to(device), targets.to(device)
            logits = model(inputs)
            mask = (targets != 0).float()
            losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
            total_loss += (losses * mask).sum().item()
            total_tokens += count_tokens(targets).item()
    model.train()
    return math.exp(total_loss / total_tokens)


best_ppl = float("inf")
step = 0
while step < max_steps:
    for inputs, targets in train_loader:
        inputs, targets = inputs.to(device), targets.to(device)
        with amp_ctx:
            logits = model(inputs)
            loss = F.cross_entropy(logits.transpose(1, 2), targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        step += 1
        if step % eval_interval == 0:
            val_ppl = estimate(model)
            best_ppl = min(best_ppl, val_ppl)
            print(f"step {step}: loss {loss.item():.4f}, val ppl {val_ppl:.2f}, best {best_ppl:.2f}")
        if step >= max_steps:
            break
