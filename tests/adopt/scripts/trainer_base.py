"""A base trainer with the loop, and one for classification which says what a loss is."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class BaseTrainer:
    def __init__(self, model, optimizer, device="cpu", max_epochs=2):
        self.model = model.to(device)
        self.optimizer = optimizer
        self.device = device
        self.max_epochs = max_epochs
        self.global_step = 0

    def compute_loss(self, batch):
        raise NotImplementedError

    def on_epoch_end(self, epoch):
        pass

    def train_epoch(self, loader):
        self.model.train()
        for batch in loader:
            batch = [each.to(self.device) for each in batch]
            loss = self.compute_loss(batch)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.global_step += 1

    def fit(self, loader, valid):
        for epoch in range(self.max_epochs):
            self.train_epoch(loader)
            self.on_epoch_end(epoch)
            accuracy = self.evaluate(valid)
            print(epoch, accuracy)

    def evaluate(self, valid):
        self.model.eval()
        correct = 0
        with torch.no_grad():
            for x, y in valid:
                correct += (self.model(x).argmax(1) == y).sum().item()
        return correct / len(valid.dataset)


class ClassificationTrainer(BaseTrainer):
    def __init__(self, model, optimizer, smoothing=0.0, **kwargs):
        super().__init__(model, optimizer, **kwargs)
        self.smoothing = smoothing
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)

    def compute_loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.model(x), y, label_smoothing=self.smoothing)

    def on_epoch_end(self, epoch):
        super().on_epoch_end(epoch)
        self.scheduler.step()


torch.manual_seed(3)
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
loader = DataLoader(TensorDataset(images[:900], labels[:900]), batch_size=30, shuffle=True)
valid = DataLoader(TensorDataset(images[900:1200], labels[900:1200]), batch_size=50)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
trainer = ClassificationTrainer(model, optimizer, smoothing=0.1, max_epochs=2)
trainer.fit(loader, valid)
