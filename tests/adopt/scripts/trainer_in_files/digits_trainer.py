"""The trainer of the digits."""

import torch.nn.functional as F
from base_trainer import BaseTrainer

SMOOTHING = 0.05


class DigitsTrainer(BaseTrainer):
    def __init__(self, net, train_loader, valid_loader, **settings):
        super().__init__(net, train_loader, valid_loader, weight_decay=0.02, **settings)
        self.smoothing = SMOOTHING

    def loss_of(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x), y, label_smoothing=self.smoothing)

    def score_of(self, batch):
        x, y = batch
        return (self.net(x).argmax(1) == y).float().mean().item()
