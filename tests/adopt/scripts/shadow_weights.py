"""A text classifier with an average of its weights in a dict, applied for the evaluation, and a class that stops early."""

import os
import re

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class EMA:
    def __init__(self, model, decay):
        self.model = model
        self.decay = decay
        self.shadow = {}
        self.backup = {}
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                self.shadow[name] = param.data.clone()

    def update(self):
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                self.shadow[name] = (1.0 - self.decay) * param.data + self.decay * self.shadow[name]

    def apply_shadow(self):
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                self.backup[name] = param.data
                param.data = self.shadow[name]

    def restore(self):
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                param.data = self.backup[name]
        self.backup = {}


class EarlyStopping:
    """Stops if the validation loss doesn't improve after a given patience."""

    def __init__(self, patience=7, delta=0.0, path="checkpoint.pt"):
        self.patience = patience
        self.delta = delta
        self.path = path
        self.counter = 0
        self.best = None
        self.early_stop = False

    def __call__(self, val_loss, model):
        if self.best is None or val_loss < self.best - self.delta:
            self.best = val_loss
            self.counter = 0
            torch.save(model.state_dict(), self.path)
        else:
            self.counter += 1
            self.early_stop = self.counter >= self.patience


class Lines(Dataset):
    def __init__(self, lines, max_length=20):
        self.lines, self.max_length = lines, max_length

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        line = self.lines[index]
        ids = [min(ord(letter), 127) for letter in line[: self.max_length]]
        ids += [0] * (self.max_length - len(ids))
        return {"input_ids": torch.tensor(ids), "label": int(re.match(r"\s", line) is not None)}


class Classifier(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embedding = nn.Embedding(128, width, padding_idx=0)
        self.lstm = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * width, 2)

    def forward(self, input_ids):
        hidden, _ = self.lstm(self.embedding(input_ids))
        return self.out(hidden.mean(dim=1))


def train_one_epoch(model, loader, criterion, optimizer, ema):
    model.train()
    total_loss = 0
    for batch in loader:
        logits = model(batch["input_ids"])
        loss = criterion(logits, batch["label"])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ema.update()
        total_loss += loss.item()
    return total_loss / len(loader)


@torch.no_grad()
def validate(model, loader, criterion):
    model.eval()
    losses, n_correct = [], 0
    for step, batch in enumerate(loader):
        logits = model(batch["input_ids"])
        loss = criterion(logits, batch["label"])
        losses.append(loss.item())
        n_correct += (logits.argmax(dim=1) == batch["label"]).float().sum().item()
    return sum(losses) / len(losses), n_correct / len(loader.dataset)


if __name__ == "__main__":
    torch.manual_seed(42)
    with open(os.__file__, encoding="utf-8") as text:
        lines = [line for line in text if len(line) > 8][:640]
    train_loader = DataLoader(Lines(lines[:512]), batch_size=16, shuffle=True)
    val_loader = DataLoader(Lines(lines[512:]), batch_size=16)
    model = Classifier()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ema = EMA(model, 0.9)
    early_stopping = EarlyStopping(patience=3)
    for epoch in range(10):
        train_loss = train_one_epoch(model, train_loader, criterion, optimizer, ema)
        ema.apply_shadow()
        valid_loss, valid_acc = validate(model, val_loader, criterion)
        ema.restore()
        print(epoch, train_loss, valid_loss, valid_acc)
        early_stopping(valid_loss, model)
        if early_stopping.early_stop:
            break
