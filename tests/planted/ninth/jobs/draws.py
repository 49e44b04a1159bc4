"""Random draws under recomputation and in the turns of two losses; texts in batches."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import meshloom as ml


def vectors(rows=40, width=9, top=6, seed=9):
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(rows, width, generator=g), torch.randint(0, top, (rows,), generator=g))


def class_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def sgd(named):
    return torch.optim.SGD(named, lr=0.2, momentum=0.9)


def _job(model, loss, data, optimizer=sgd, batch_size=12, steps=5, **more):
    return ml.Job(
        model=model, loss=loss, optimizer=optimizer, data=data, batch_size=batch_size, steps=steps, **more
    )


class NoisyBlock(nn.Module):
    """Noise between two dropouts, of which backward needs nothing."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(17, 33), nn.Linear(33, 17)

    def forward(self, x):
        u = F.dropout(torch.tanh(self.a(x)), 0.3, self.training)
        side = x + 0.1 * torch.randn_like(x) + 0.2 * torch.rand_like(x)
        return side + self.b(F.dropout(torch.sin(u), 0.3, self.training))


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(9, 17), nn.Linear(17, 6)
        self.blocks = nn.ModuleList(NoisyBlock() for _ in range(3))

    def forward(self, x):
        h = torch.tanh(self.first(x))
        for block in self.blocks:
            h = block(h)
        return self.head(h)


noisy = _job(Noisy, class_loss, vectors, sgd)


def gan():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.g = nn.Sequential(nn.Linear(9, 19), nn.Tanh(), nn.Dropout(0.3), nn.Linear(19, 9))
            self.d = nn.Sequential(nn.Linear(9, 18), nn.Tanh(), nn.Dropout(0.3), nn.Linear(18, 1))

    def of_d(model, batch):
        return (
            F.softplus(-model.d(batch[0])).mean()
            + F.softplus(model.d(model.g(batch[0].flip(1)).detach())).mean()
        )

    def of_g(model, batch):
        return F.softplus(-model.d(model.g(batch[0].flip(1)))).mean()

    return ml.Job(
        model=Both,
        losses={
            "d": ml.Objective(
                loss=of_d, optimizer=sgd, parameters="d", updates=2, every=2, clip_grad_norm=0.5
            ),
            "g": ml.Objective(loss=of_g, optimizer=sgd, parameters="g"),
        },
        data=vectors,
        batch_size=12,
        steps=5,
    )


LONG = (
    "Translate the following rows of numbers into classes, as the examples before have shown, and answer with the class alone. "
    * 2
)


def worded():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(9, 22), nn.Linear(22, 6), nn.Linear(22, 6)

        def forward(self, x, text):
            h = torch.tanh(self.a(x))
            return self.b(h) if text.endswith("briefly.") else self.c(h) * 2

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, i):
            x, y = vectors().tensors
            return x[i], y[i], i

    def collate(samples):
        x, y, i = zip(*samples, strict=False)
        return {
            "x": torch.stack(x),
            "y": torch.stack(y),
            "text": LONG + ("briefly." if (min(i) // 12) % 2 else "at length."),
        }

    return ml.Job(
        model=Words,
        loss=lambda model, batch: F.cross_entropy(model(batch["x"], batch["text"]), batch["y"]),
        optimizer=sgd,
        data=Rows,
        collate=collate,
        batch_size=12,
        steps=5,
        shuffle=False,
    )
