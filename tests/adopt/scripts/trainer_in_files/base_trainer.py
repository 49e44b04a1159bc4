"""What every trainer of the project does."""

import torch
from progress import shown


class BaseTrainer:
    """Subclasses say what a loss and a score are."""

    def __init__(self, net, train_loader, valid_loader, lr=1e-3, weight_decay=0.0, max_norm=None):
        self.net = net
        self.train_loader = train_loader
        self.valid_loader = valid_loader
        self.max_norm = max_norm
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=weight_decay)
        self.epoch = 0

    def loss_of(self, batch):
        raise NotImplementedError

    def score_of(self, batch):
        raise NotImplementedError

    def fit(self, epochs):
        for self.epoch in range(epochs):
            self.net.train()
            for batch in shown(self.train_loader):
                self.optimizer.zero_grad()
                loss = self.loss_of(batch)
                loss.backward()
                if self.max_norm is not None:
                    torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.max_norm)
                self.optimizer.step()
            score = self.validate()
            print(f"epoch {self.epoch}: {score:.4f}")

    @torch.no_grad()
    def validate(self):
        self.net.eval()
        score, count = 0.0, 0
        for batch in self.valid_loader:
            score += self.score_of(batch) * len(batch[0])
            count += len(batch[0])
        return score / count
