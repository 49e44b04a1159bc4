"""A class of one's own with fit(), train_epoch() and validate()."""

import torch
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


class MLP(nn.Module):
    def __init__(self, in_features, hidden, classes):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(in_features, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, classes)
        )

    def forward(self, x):
        return self.net(x)


class Trainer:
    def __init__(self, model, train_loader, val_loader, lr=1e-3, device="cpu", max_norm=1.0):
        self.device = device
        self.model = model.to(device)
        self.train_loader = train_loader
        self.val_loader = val_loader
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = optim.Adam(self.model.parameters(), lr=lr)
        self.scheduler = optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.max_norm = max_norm
        self.best_acc = 0.0
        self.history = []

    def train_epoch(self, epoch):
        self.model.train()
        running = 0.0
        for i, (inputs, targets) in enumerate(self.train_loader):
            inputs, targets = inputs.to(self.device), targets.to(self.device)
            self.optimizer.zero_grad()
            outputs = self.model(inputs)
            loss = self.criterion(outputs, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
            self.optimizer.step()
            running += loss.item()
        return running / len(self.train_loader)

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        correct = total = 0
        for inputs, targets in self.val_loader:
            inputs, targets = inputs.to(self.device), targets.to(self.device)
            correct += (self.model(inputs).argmax(1) == targets).sum().item()
            total += targets.size(0)
        return correct / total

    def save(self, path):
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, path)

    def fit(self, epochs):
        for epoch in range(epochs):
            loss = self.train_epoch(epoch)
            acc = self.validate()
            self.scheduler.step()
            self.history.append((loss, acc))
            print(f"[{epoch + 1}/{epochs}] loss={loss:.4f} val_acc={acc:.4f}")
            if acc > self.best_acc:
                self.best_acc = acc
                self.save("best.pt")


if __name__ == "__main__":
    torch.manual_seed(42)
    digits = load_digits()
    X = torch.tensor(digits.data, dtype=torch.float32) / 16.0
    y = torch.tensor(digits.target, dtype=torch.long)
    train_loader = DataLoader(TensorDataset(X[:1400], y[:1400]), batch_size=64, shuffle=True)
    val_loader = DataLoader(TensorDataset(X[1400:], y[1400:]), batch_size=128)
    model = MLP(64, 32, 10)
    trainer = Trainer(model, train_loader, val_loader, lr=2e-3)
    trainer.fit(epochs=3)
