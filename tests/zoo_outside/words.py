"""Language models: layers that are reused, masked words, rotations, preferences, linear recurrences."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshloom.core.job import Job
from tests.zoo import integers, job_of, normal, sgd, uniform
from tests.zoo_outside.sequences import VOCABULARY


class Albert(nn.Module):
    """One layer run several times, a factorised embedding, a decoder tied by assignment with a bias of its own, reentrant checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.up = nn.Embedding(VOCABULARY, 5, padding_idx=0), nn.Linear(5, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 11, dropout=0.1, batch_first=True)
        self.down, self.decoder = nn.Linear(8, 5), nn.Linear(5, VOCABULARY, bias=False)
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))
        self.decoder.weight = self.word.weight
        self.decoder.bias = self.bias
        self.register_buffer("position_ids", torch.arange(9).expand((1, -1)), persistent=False)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.up(self.word(ids))
        for _ in range(3):
            if self.training and x.requires_grad:
                x = checkpoint(self.layer, x, None, mask, use_reentrant=True)
            else:
                x = self.layer(x, src_key_padding_mask=mask)
        return self.decoder(F.gelu(self.down(x)))


def _masked_words(model: Any, b: Any) -> tuple[Tensor, Tensor]:
    """BERT's: of 40 % that are chosen, most become a mask, some another word; a mean over those that were chosen."""
    ids, labels = b["x"].clone(), b["x"].clone()
    padding = torch.arange(ids.size(1)) >= b["len"].unsqueeze(1)
    prob = torch.full(labels.shape, 0.4).masked_fill_(padding, 0.0)
    chosen = torch.bernoulli(prob).bool()
    labels[~chosen] = -100
    replaced = torch.bernoulli(torch.full(labels.shape, 0.8)).bool() & chosen
    ids[replaced] = 1
    other = torch.bernoulli(torch.full(labels.shape, 0.5)).bool() & chosen & ~replaced
    words = torch.randint(VOCABULARY, labels.shape, dtype=torch.long)
    ids[other] = words[other]
    logits = model(ids, padding)
    return F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1), reduction="sum"), (
        labels != -100
    ).sum()


def albert_with_masked_words() -> Job:
    data = {"x": integers(363, VOCABULARY, 9, least=2), "len": integers(364, 10, least=6)}
    return job_of(Albert, _masked_words, data, optimizer=sgd, batch_size=7)


class RoPE(nn.Module):
    """Tables of cosines that are cached on the module, and grown if a longer text comes; complex rotations; keys shared by groups."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.dim, self.freqs = heads, width // heads, None
        self.q, self.kv, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * self.dim, bias=False), nn.Linear(width, width, bias=False)  # fmt: skip
        self.w1, self.w2, self.w3 = (
            nn.Linear(width, 11, bias=False),
            nn.Linear(11, width, bias=False),
            nn.Linear(width, 11, bias=False),
        )
        self.g1, self.g2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))

    def rms(self, x: Tensor, g: Tensor) -> Tensor:
        return (
            (x.float() if x.dtype == torch.half else x)
            * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            * g
        )

    def _rotate(self, x: Tensor) -> Tensor:
        t = x.size(1)
        if self.freqs is None or self.freqs.size(0) < t:
            f = torch.outer(
                torch.arange(t), 1.0 / (100.0 ** (torch.arange(0, self.dim, 2)[: self.dim // 2] / self.dim))
            )
            self.freqs = torch.polar(torch.ones_like(f), f)
        z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
        f = self.freqs[:t].to(z.dtype).view(1, t, 1, -1)
        return torch.view_as_real(z * f).flatten(3).type_as(x)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        y = self.rms(x, self.g1)
        q = self._rotate(self.q(y).view(b, t, self.heads, self.dim)).transpose(1, 2)
        k, v = self.kv(y).view(b, t, 2, 1, self.dim).unbind(2)
        k = self._rotate(k).transpose(1, 2).repeat_interleave(self.heads, 1)
        v = (
            v.transpose(1, 2)[:, :, None]
            .expand(b, 1, self.heads, t, self.dim)
            .reshape(b, self.heads, t, self.dim)
        )
        x = x + self.o(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        )
        y = self.rms(x, self.g2)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok, self.layers, self.head = nn.Embedding(VOCABULARY, 8), nn.ModuleList(RoPE() for _ in range(2)), nn.Linear(8, VOCABULARY, bias=False)  # fmt: skip

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _preferences(model: Any, b: Any) -> Tensor:
    """Direct preferences against a reference, which is the model itself with its answers' gradients stopped."""
    both = model(torch.cat([b["win"], b["lose"]])[:, :-1]).log_softmax(-1)
    ids = torch.cat([b["win"], b["lose"]])[:, 1:]
    logp = both.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    mask = torch.arange(ids.size(1)) >= 2
    logp = (logp * mask).sum(-1)
    win, lose = logp.split([len(b["win"]), len(b["lose"])])
    margin = win - lose - (b["ref_win"] - b["ref_lose"])
    rewards = 0.1 * margin.detach()
    accuracy = (rewards > 0).float().mean().item()
    assert 0 <= accuracy <= 1, accuracy
    return -F.logsigmoid(0.1 * margin).mean() - 0.05 * win.mean()


def rotary_with_preferences() -> Job:
    data = {
        "win": integers(365, VOCABULARY, 7),
        "lose": integers(366, VOCABULARY, 7),
        "ref_win": -uniform(367) * 9,
        "ref_lose": -uniform(368) * 9,
    }
    return job_of(Llama, _preferences, data)


class LRU(nn.Module):
    """A linear recurrent unit: complex diagonal, complex parameters as pairs and as such, a scan by doubling, a convolution by FFT."""

    def __init__(self, width: int = 6, state: int = 5) -> None:
        super().__init__()
        u, v = torch.rand(state), torch.rand(state)
        self.nu_log = nn.Parameter(torch.log(-0.5 * torch.log(u * 0.5 + 0.4)))
        self.theta_log = nn.Parameter(torch.log(2 * math.pi * v + 0.1))
        self.b = nn.Parameter(torch.randn(state, width, 2) / math.sqrt(2 * width))
        self.c = nn.Parameter(torch.randn(width, state, 2) / math.sqrt(state))
        self.d, self.norm = nn.Parameter(torch.randn(width)), nn.LayerNorm(width)
        self.kernel = nn.Parameter(torch.randn(width, 4) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        modulus = torch.exp(-torch.exp(self.nu_log))
        lam = torch.complex(
            modulus * torch.cos(torch.exp(self.theta_log)), modulus * torch.sin(torch.exp(self.theta_log))
        )
        gamma = torch.sqrt(1 - modulus**2)
        h = y.to(lam.dtype) @ torch.view_as_complex(self.b).t() * gamma
        n, shift, power = x.size(1), 1, lam
        while shift < n:
            h = torch.cat([h[:, :shift], h[:, shift:] + power * h[:, :-shift]], 1)
            power, shift = power * power, 2 * shift
        out = (h @ torch.view_as_complex(self.c).t()).real + self.d * y
        k = torch.fft.rfft(self.kernel, n=2 * n)
        conv = torch.fft.irfft(torch.fft.rfft(y.transpose(1, 2), n=2 * n) * k, n=2 * n)[..., :n].transpose(
            1, 2
        )
        return x + F.gelu(out) + conv


class StateSpace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc, self.layers, self.head = nn.Linear(3, 6), nn.Sequential(LRU(), LRU()), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.enc(x)).mean(1))


def linear_recurrent_units() -> Job:
    return job_of(
        StateSpace, lambda m, b: F.mse_loss(m(b["x"]), b["y"]), {"x": normal(369, 7, 3), "y": normal(370, 2)}
    )
