import torch
import torch.nn.functional as F


def train_epoch(model, loader, optimizer, device, clip, log_every, epoch):
    model.train()
    total = 0.0
    for i, (x, y) in enumerate(loader):
        x, y = x.to(device), y.to(device)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        total += loss.item()
        if i % log_every == 0:
            print(f"epoch {epoch} step {i} loss {loss.item():.4f}")
    return {"loss": total / len(loader)}


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    correct, loss_sum, n = 0, 0.0, 0
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        logits = model(x)
        loss_sum += F.cross_entropy(logits, y, reduction="sum").item()
        correct += (logits.argmax(-1) == y).sum().item()
        n += y.numel()
    return {"loss": loss_sum / n, "acc": correct / n}
