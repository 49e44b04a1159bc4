"""A small residual network on images that are mixed in pairs, with a moving average of its weights that
evaluations use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import meshloom as ml

DECAY = 0.8
ALPHA = 0.4


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return self.relu(out)


class ResNet(nn.Module):
    """[batch, 3, size, size] -> [batch, 7]."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.stage1 = nn.Sequential(Residual(width, width, 1), Residual(width, width, 1))
        self.stage2 = nn.Sequential(Residual(width, 2 * width, 2), Residual(2 * width, 2 * width, 1))
        self.fc = nn.Linear(2 * width, 7)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage2(self.stage1(self.stem(x)))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class Pictures(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Seven noisy patterns; flipped at random where the set is for training."""

    def __init__(self, count: int, seed: int, size: int = 9, *, flips: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        patterns = torch.randn(7, 3, size, size, generator=torch.Generator().manual_seed(0))
        self.labels = torch.randint(7, (count,), generator=generator)
        self.images = patterns[self.labels] + 0.7 * torch.randn(count, 3, size, size, generator=generator)
        self.flips = flips

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        if self.flips and torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image, int(self.labels[index])


def mixup_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Every image is mixed with another of its batch, and answers for both labels."""
    images, labels = batch
    share = torch.distributions.Beta(ALPHA, ALPHA).sample().to(images)
    other = torch.randperm(len(images), device=images.device)
    out = model(share * images + (1 - share) * images[other])
    return share * F.cross_entropy(out, labels) + (1 - share) * F.cross_entropy(out, labels[other])


def plain_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def accuracy(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).double().mean()


def averaged(model: nn.Module) -> AveragedModel:
    """The moving average of `model`'s parameters; `update_parameters` after every step."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))


def job(batch_size: int = 12, steps: int = 5, *, width: int = 5, size: int = 9) -> ml.Job:
    return ml.Job(
        model=lambda: ResNet(width),
        loss=mixup_loss,
        optimizer=lambda named: torch.optim.SGD(
            named, lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4
        ),
        data=lambda: Pictures(31, seed=1, size=size, flips=True),
        batch_size=batch_size,
        steps=steps,
        drop_last=True,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.1, total_steps=steps + 1
        ),
        evaluate=ml.Evaluate(
            lambda: Pictures(19, seed=2, size=size, flips=False),
            {"loss": plain_loss, "accuracy": accuracy},
            every=2,
        ),
    )


@contextmanager
def with_averages(models: list[nn.Module], averages: list[AveragedModel]) -> Iterator[None]:
    """`models` have their averages' parameters for a while."""
    own = [[each.detach().clone() for each in model.parameters()] for model in models]
    with torch.no_grad():
        for model, average in zip(models, averages, strict=True):
            for mine, theirs in zip(model.parameters(), average.module.parameters(), strict=True):
                mine.copy_(theirs)
        try:
            yield
        finally:
            for model, kept in zip(models, own, strict=True):
                for mine, value in zip(model.parameters(), kept, strict=True):
                    mine.copy_(value)
