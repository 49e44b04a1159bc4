"""Mixed samples: each batch with a permutation of itself, by a weight drawn from a beta distribution."""

import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

alpha, epochs, lr = 1.0, 2, 0.05
torch.manual_seed(3)
np.random.seed(3)
x, y = load_digits(return_X_y=True)
trainset = TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))
trainloader = DataLoader(trainset, batch_size=32, shuffle=True, drop_last=True)

net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)


def mixup_data(x, y, alpha=1.0):
    """Returns mixed inputs, pairs of targets, and lambda"""
    lam = np.random.beta(alpha, alpha) if alpha > 0 else 1
    index = torch.randperm(x.size(0))
    mixed_x = lam * x + (1 - lam) * x[index]
    y_a, y_b = y, y[index]
    return mixed_x, y_a, y_b, lam


def mixup_criterion(criterion, pred, y_a, y_b, lam):
    return lam * criterion(pred, y_a) + (1 - lam) * criterion(pred, y_b)


def adjust_learning_rate(optimizer, epoch):
    """decrease the learning rate at 100 and 150 epoch"""
    rate = lr
    if epoch >= 1:
        rate /= 10
    for param_group in optimizer.param_groups:
        param_group["lr"] = rate


for epoch in range(epochs):
    net.train()
    train_loss, total = 0, 0
    adjust_learning_rate(optimizer, epoch)
    for batch_idx, (inputs, targets) in enumerate(trainloader):
        inputs, targets_a, targets_b, lam = mixup_data(inputs, targets, alpha)
        outputs = net(inputs)
        loss = mixup_criterion(criterion, outputs, targets_a, targets_b, lam)
        train_loss += loss.item()
        total += targets.size(0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if batch_idx % 20 == 0:
            print(epoch, batch_idx, train_loss / (batch_idx + 1))
