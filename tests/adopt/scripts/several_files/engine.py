"""The loop of an epoch."""

import torch
import torch.nn.functional as F


def compute_loss(net, batch, smoothing):
    images, targets = batch
    return F.cross_entropy(net(images), targets, label_smoothing=smoothing)


def train_one_epoch(net, data, opt, dev, smoothing=0.0):
    net.train()
    total = 0.0
    for images, targets in data:
        images, targets = images.to(dev), targets.to(dev)
        loss = compute_loss(net, (images, targets), smoothing)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item()
    return total / len(data)


@torch.no_grad()
def evaluate(net, data, dev):
    net.eval()
    return sum((net(x.to(dev)).argmax(1) == y.to(dev)).sum().item() for x, y in data) / len(data.dataset)
