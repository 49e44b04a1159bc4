"""Digits, with a learning rate that falls where the validation loss no longer does."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(7)
digits = load_digits()
dataset = TensorDataset(torch.tensor(digits.data / 16).float(), torch.tensor(digits.target))
train_set, val_set = random_split(dataset, [1024, 773], generator=torch.Generator().manual_seed(1))
train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
val_loader = DataLoader(val_set, batch_size=128)

net = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Dropout(0.1), nn.Linear(96, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
scheduler = ReduceLROnPlateau(optimizer, mode="min", factor=0.2, patience=2, min_lr=1e-5)


def validate(net, loader):
    net.eval()
    total, hits = 0.0, 0
    with torch.no_grad():
        for images, labels in loader:
            scores = net(images)
            total += F.cross_entropy(scores, labels, reduction="sum").item()
            hits += (scores.argmax(dim=1) == labels).sum().item()
    return total / len(loader.dataset), 100.0 * hits / len(loader.dataset)


best_loss = float("inf")
for epoch in range(30):
    net.train()
    running = 0.0
    for images, labels in train_loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()
        running += loss.item()

    val_loss, accuracy = validate(net, val_loader)
    scheduler.step(val_loss)
    if val_loss < best_loss:
        best_loss = val_loss
        torch.save(net.state_dict(), "best.pt")
    print(
        f"epoch {epoch}: train {running / len(train_loader):.4f} val {val_loss:.4f} acc {accuracy:.1f} lr {scheduler.get_last_lr()[0]:g}"
    )
