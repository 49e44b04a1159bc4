"""An image trainer with mixup and an average of the weights as model libraries' own scripts have them."""

import argparse
import copy
import logging
import time
from collections import OrderedDict

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

_logger = logging.getLogger("train")
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--warmup-epochs", type=int, default=1)
parser.add_argument("-b", "--batch-size", type=int, default=40)
parser.add_argument("--mixup", type=float, default=0.2)
parser.add_argument("--smoothing", type=float, default=0.1)
parser.add_argument("--model-ema", action="store_true", default=True)
parser.add_argument("--model-ema-decay", type=float, default=0.95)
parser.add_argument("--clip-grad", type=float, default=None)
parser.add_argument("--seed", type=int, default=42)


class AverageMeter:
    def __init__(self):
        self.reset()

    def reset(self):
        self.val = 0
        self.avg = 0
        self.sum = 0
        self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


def accuracy(output, target, topk=(1,)):
    maxk = min(max(topk), output.size()[1])
    batch_size = target.size(0)
    _, pred = output.topk(maxk, 1, True, True)
    pred = pred.t()
    correct = pred.eq(target.reshape(1, -1).expand_as(pred))
    return [correct[: min(k, maxk)].reshape(-1).float().sum(0) * 100.0 / batch_size for k in topk]


class ModelEma(nn.Module):
    def __init__(self, model, decay=0.9999, device=None):
        super().__init__()
        self.module = copy.deepcopy(model)
        self.module.eval()
        self.decay = decay
        self.device = device

    def _update(self, model, update_fn):
        with torch.no_grad():
            for ema_v, model_v in zip(self.module.state_dict().values(), model.state_dict().values()):
                ema_v.copy_(update_fn(ema_v, model_v))

    def update(self, model):
        self._update(model, update_fn=lambda e, m: self.decay * e + (1.0 - self.decay) * m)


def one_hot(x, num_classes, on_value=1.0, off_value=0.0):
    x = x.long().view(-1, 1)
    return torch.full((x.size()[0], num_classes), off_value).scatter_(1, x, on_value)


def mixup_target(target, num_classes, lam=1.0, smoothing=0.0):
    off_value = smoothing / num_classes
    on_value = 1.0 - smoothing + off_value
    y1 = one_hot(target, num_classes, on_value=on_value, off_value=off_value)
    y2 = one_hot(target.flip(0), num_classes, on_value=on_value, off_value=off_value)
    return y1 * lam + y2 * (1.0 - lam)


class Mixup:
    def __init__(self, mixup_alpha=1.0, label_smoothing=0.1, num_classes=10):
        self.mixup_alpha = mixup_alpha
        self.label_smoothing = label_smoothing
        self.num_classes = num_classes

    def __call__(self, x, target):
        lam = float(np.random.beta(self.mixup_alpha, self.mixup_alpha))
        x_flipped = x.flip(0).mul(1.0 - lam)
        x = x * lam + x_flipped
        target = mixup_target(target, self.num_classes, lam, self.label_smoothing)
        return x, target


class SoftTargetCrossEntropy(nn.Module):
    def forward(self, x, target):
        loss = torch.sum(-target * F.log_softmax(x, dim=-1), dim=-1)
        return loss.mean()


def create_model(num_classes):
    return nn.Sequential(
        OrderedDict(
            stem=nn.Conv2d(1, 12, 3, padding=1, bias=False),
            bn=nn.BatchNorm2d(12),
            act=nn.ReLU(),
            pool=nn.AdaptiveAvgPool2d(2),
            flat=nn.Flatten(),
            head=nn.Linear(48, num_classes),
        )
    )


def train_one_epoch(
    epoch, model, loader, optimizer, loss_fn, args, device, lr_scheduler, model_ema=None, mixup_fn=None
):
    batch_time_m = AverageMeter()
    losses_m = AverageMeter()
    model.train()
    end = time.time()
    num_updates = epoch * len(loader)
    for batch_idx, (input, target) in enumerate(loader):
        input, target = input.to(device), target.to(device)
        if mixup_fn is not None:
            input, target = mixup_fn(input, target)
        output = model(input)
        loss = loss_fn(output, target)
        losses_m.update(loss.item(), input.size(0))
        optimizer.zero_grad()
        loss.backward()
        if args.clip_grad is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        optimizer.step()
        if model_ema is not None:
            model_ema.update(model)
        num_updates += 1
        batch_time_m.update(time.time() - end)
        if batch_idx % 10 == 0:
            lrl = [param_group["lr"] for param_group in optimizer.param_groups]
            lr = sum(lrl) / len(lrl)
            _logger.info(
                f"Train: {epoch} [{batch_idx:>4d}/{len(loader)}] Loss: {losses_m.val:#.4g} LR: {lr:.3e}"
            )
        end = time.time()
    return OrderedDict([("loss", losses_m.avg)])


def validate(model, loader, loss_fn, args, device, log_suffix=""):
    losses_m = AverageMeter()
    top1_m = AverageMeter()
    top5_m = AverageMeter()
    model.eval()
    with torch.no_grad():
        for batch_idx, (input, target) in enumerate(loader):
            input = input.to(device)
            target = target.to(device)
            output = model(input)
            loss = loss_fn(output, target)
            acc1, acc5 = accuracy(output, target, topk=(1, 5))
            reduced_loss = loss.data
            losses_m.update(reduced_loss.item(), input.size(0))
            top1_m.update(acc1.item(), output.size(0))
            top5_m.update(acc5.item(), output.size(0))
    return OrderedDict([("loss", losses_m.avg), ("top1", top1_m.avg), ("top5", top5_m.avg)])


def main():
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    device = torch.device("cpu")
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(labels)
    loader_train = DataLoader(
        TensorDataset(images[:1200], labels[:1200]), batch_size=args.batch_size, shuffle=True, drop_last=True
    )
    loader_eval = DataLoader(TensorDataset(images[1200:1500], labels[1200:1500]), batch_size=args.batch_size)
    model = create_model(10).to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=1e-4
    )
    model_ema = None
    if args.model_ema:
        model_ema = ModelEma(model, decay=args.model_ema_decay)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=args.warmup_epochs)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    lr_scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer, [warmup, cosine], milestones=[args.warmup_epochs]
    )
    mixup_fn = None
    if args.mixup > 0:
        mixup_fn = Mixup(mixup_alpha=args.mixup, label_smoothing=args.smoothing, num_classes=10)
    train_loss_fn = (
        SoftTargetCrossEntropy()
        if mixup_fn is not None
        else nn.CrossEntropyLoss(label_smoothing=args.smoothing)
    )
    validate_loss_fn = nn.CrossEntropyLoss()
    best_metric = None
    best_epoch = None
    for epoch in range(args.epochs):
        train_metrics = train_one_epoch(
            epoch,
            model,
            loader_train,
            optimizer,
            train_loss_fn,
            args,
            device,
            lr_scheduler,
            model_ema=model_ema,
            mixup_fn=mixup_fn,
        )
        eval_metrics = validate(model, loader_eval, validate_loss_fn, args, device)
        if model_ema is not None:
            ema_eval_metrics = validate(
                model_ema.module, loader_eval, validate_loss_fn, args, device, log_suffix=" (EMA)"
            )
            eval_metrics = ema_eval_metrics
        lr_scheduler.step()
        if best_metric is None or eval_metrics["top1"] > best_metric:
            best_metric, best_epoch = eval_metrics["top1"], epoch
            torch.save(model.state_dict(), "model_best.pth.tar")
    if best_metric is not None:
        _logger.info(f"*** Best metric: {best_metric} (epoch {best_epoch})")


if __name__ == "__main__":
    main()
