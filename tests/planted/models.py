"""Models of which each has a part that a planted bug is about."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Wordy(nn.Module):
    """[batch, 7] -> [batch, 6]; one of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.brief, self.long = nn.Linear(7, 22), nn.Linear(22, 6), nn.Linear(22, 6)

    def forward(self, x: Tensor, briefly: bool) -> Tensor:
        h = torch.tanh(self.enter(x))
        return self.brief(h) if briefly else 2 * self.long(h)


class Cooling(nn.Module):
    """[batch, 7] -> [batch, 5]; every forward of an evaluation lowers a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(7, 21), nn.Linear(21, 5)
        self.register_buffer("temperature", torch.tensor(4.0))
        self.temperature: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.temperature = 0.8 * self.temperature + 0.1
        return self.head(torch.tanh(self.enter(x))) / self.temperature


class Normed(nn.Module):
    """[batch, 3, 8, 8] -> [batch, 5]; an instance norm that never moves its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 7, 3, padding=1, stride=2)
        self.inner = nn.InstanceNorm2d(7, momentum=None, track_running_stats=True)
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.conv(x)) - 0.3).mean((2, 3)))


class Finer(nn.Module):
    """[batch, 3, h, w] -> [batch, 3, 2h, 2w]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.up = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 24, 3, padding=1)
        self.finer, self.out = nn.PixelShuffle(2), nn.Conv2d(6, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.finer(self.up(torch.tanh(self.stem(x))))))


class Tagger(nn.Module):
    """Tokens [batch, length] -> [batch, length, 6]; masks between the layers of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(19, 11), nn.BatchNorm1d(11)
        self.rnn = nn.LSTM(11, 13, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(13, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.embed(x).transpose(1, 2)).transpose(1, 2)
        return self.head(self.rnn(h)[0])


class Tabled(nn.Module):
    """Tokens [batch, length] -> [batch, length, 19]; gradients of the table are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(19, 12, sparse=True), nn.Linear(12, 19)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(x)))


class TiedThrice(nn.Module):
    """Tokens [batch, length] -> [batch, length, 19]; a table is looked up, attended to, and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 12)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.head = nn.Linear(12, 19, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for number, block in enumerate(self.blocks):
            h = h + torch.tanh(block(h))
            if number == 1:
                h = h + 0.3 * torch.softmax(h @ self.embed.weight.T, -1) @ self.embed.weight
        return self.head(h)


class Padded(nn.Module):
    """Tokens [batch, length] -> [batch, length, 29]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 24, padding_idx=1)
        self.up, self.down, self.norm = nn.Linear(24, 48), nn.Linear(48, 24), nn.LayerNorm(24)
        self.head = nn.Linear(24, 29, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(F.gelu(self.up(x.cumsum(1))))
        return self.head(self.norm(x))


class Experts(nn.Module):
    """[batch, length, 12] -> the same; each row by one expert of five."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(12, 5, bias=False)
        self.up = nn.Parameter(torch.randn(5, 12, 16) * 0.2)
        self.down = nn.Parameter(torch.randn(5, 16, 12) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weight, pick = self.gate(rows).softmax(-1).max(-1)
        h = torch.bmm(F.gelu(torch.bmm(rows[:, None], self.up[pick])), self.down[pick])[:, 0]
        return (h * weight[:, None]).view_as(x)


class Routed(nn.Module):
    """[batch, 6, 5] -> [batch, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.experts, self.norm = nn.Linear(5, 12), Experts(), nn.RMSNorm(12)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        return self.head((x + self.experts(self.norm(x))).mean(1))


class Swapping(nn.Module):
    """[batch, 6, 5] -> [batch, 3]; tokens and channels in turn, with transposes between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.tokens, self.channels = nn.Linear(5, 5), nn.Linear(6, 6), nn.Linear(5, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.embed(x)).transpose(1, 2)
        x = torch.tanh(self.tokens(x)).transpose(1, 2) + 0.5 * x.transpose(1, 2)
        return self.head(torch.tanh(self.channels(x)).mean(1))
