"""Speech: CTC, transducers, masks along time, quantised targets, spectrograms in the loss, packed sequences."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from meshloom.core.job import Job
from tests.zoo import integers, job_of, normal

FRAMES, MELS, UNITS = 12, 6, 7
SPEECH = {
    "x": normal(71, FRAMES, MELS), "x_len": integers(72, FRAMES + 1, least=8), "y": integers(73, UNITS, 3, least=1),
    "y_len": integers(74, 4, least=1), "label": integers(75, 4),
}  # fmt: skip
WAVES = {"x": normal(76, 40), "y": normal(77, 2, 40)}


class Conformer(nn.Module):
    """Half a feed-forward, a gated depthwise convolution whose padding is masked, the other half."""

    def __init__(self, width: int = 9) -> None:
        super().__init__()
        self.ff = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 13), nn.SiLU(), nn.Linear(13, width))
        self.norm, self.pointwise = nn.LayerNorm(width), nn.Conv1d(width, 2 * width, 1)
        self.depthwise, self.bn = nn.Conv1d(width, width, 3, padding=1, groups=width), nn.BatchNorm1d(width)
        self.out = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = x + 0.5 * self.ff(x)
        y = F.glu(self.pointwise(self.norm(x).transpose(1, 2)), dim=1)
        y = y.masked_fill(padding.unsqueeze(1), 0.0)
        return x + self.out(F.silu(self.bn(self.depthwise(y)))).transpose(1, 2)


class CTCModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj, self.head = nn.Linear(MELS, 9), nn.Linear(9, UNITS)
        self.blocks = nn.ModuleList([Conformer() for _ in range(2)])

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        padding = torch.arange(x.size(1)).unsqueeze(0) >= lengths.unsqueeze(1)
        x = self.proj(x)
        for block in self.blocks:
            x = block(x, padding)
        return self.head(x)


def _ctc(model: Any, b: Any) -> Tensor:
    log_probs = F.log_softmax(model(b["x"], b["x_len"]), dim=-1).transpose(0, 1)
    return F.ctc_loss(
        log_probs, b["y"], b["x_len"], b["y_len"], blank=0, reduction="mean", zero_infinity=True
    )


def ctc_conformer() -> Job:
    return job_of(CTCModel, _ctc, SPEECH)


class SpecAugmented(CTCModel):
    """Stripes of time and of frequency are set to zero, in place, of widths that are drawn."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        if self.training:
            x = x.clone()
            for i in range(x.size(0)):
                width = int(torch.randint(0, 3, (1,)).item())
                start = int(torch.randint(0, FRAMES - width, (1,)))
                x[i, start : start + width, :] = 0
                f = torch.randint(0, MELS - 1, (1,)).item()
                x[i, :, f : f + 1] = x[i].mean()
        return super().forward(x, lengths)


def spec_augment_by_item() -> Job:
    return job_of(SpecAugmented, _ctc, SPEECH)


class NumpyMasked(CTCModel):
    """Spans of masked frames as numpy draws them, as in wav2vec2."""

    def __init__(self) -> None:
        super().__init__()
        self.mask_emb = nn.Parameter(torch.FloatTensor(MELS).uniform_())

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = np.full((x.size(0), x.size(1)), False)
        for i in range(x.size(0)):
            start = np.random.choice(x.size(1) - 2, 2, replace=False)
            indices = np.asarray([start[j] + offset for j in range(len(start)) for offset in range(2)])
            mask[i, np.unique(indices[indices < x.size(1)])] = True
        x = x.clone()
        x[torch.from_numpy(mask)] = self.mask_emb.to(x.dtype)
        return super().forward(x, lengths)


def spans_by_numpy() -> Job:
    return job_of(NumpyMasked, _ctc, SPEECH)


class Transducer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.embed = nn.GRU(MELS, 9, batch_first=True), nn.Embedding(UNITS, 9)
        self.predictor, self.joint = (
            nn.LSTM(9, 9, batch_first=True),
            nn.Sequential(nn.Tanh(), nn.Linear(9, UNITS)),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        f = self.encoder(x)[0]
        g = self.predictor(self.embed(F.pad(y, (1, 0))))[0]
        return self.joint(f.unsqueeze(2) + g.unsqueeze(1)).log_softmax(-1)


def _transducer(model: Any, b: Any) -> Tensor:
    """All paths through the lattice, by a list of lists of log-probabilities."""
    x, y = b["x"][:, :5], b["y"]
    lp = model(x, y)
    T, U = lp.size(1), lp.size(2)  # noqa: N806
    alpha: list[list[Any]] = [[None] * U for _ in range(T)]
    alpha[0][0] = torch.zeros_like(lp[:, 0, 0, 0])
    for t in range(T):
        for u in range(U):
            if t == 0 and u == 0:
                continue
            ways = []
            if t > 0:
                ways.append(alpha[t - 1][u] + lp[:, t - 1, u, 0])
            if u > 0:
                ways.append(alpha[t][u - 1] + lp[:, t, u - 1].gather(1, y[:, u - 1 : u]).squeeze(1))
            alpha[t][u] = torch.logsumexp(torch.stack(ways), dim=0)
    return -(alpha[-1][-1] + lp[:, -1, -1, 0]).mean()


def transducer() -> Job:
    return job_of(Transducer, _transducer, SPEECH)


class GumbelQuantizer(nn.Module):
    def __init__(self, inputs: int, groups: int = 2, entries: int = 5) -> None:
        super().__init__()
        self.groups, self.entries = groups, entries
        self.codevectors = nn.Parameter(torch.rand(1, groups * entries, 4))
        self.weight_proj = nn.Linear(inputs, groups * entries)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        b, t, _ = x.shape
        logits = self.weight_proj(x).view(b * t * self.groups, -1)
        hard = F.gumbel_softmax(logits, tau=2.0, hard=True).type_as(x).view(b * t, self.groups, -1)
        soft = torch.softmax(logits.view(b * t, self.groups, -1), dim=-1).mean(0)
        perplexity = torch.exp(-torch.sum(soft * torch.log(soft + 1e-7), dim=-1)).sum()
        per_group = hard.view(b * t, -1).unsqueeze(-1) * self.codevectors
        return per_group.view(b * t, self.groups, self.entries, -1).sum(-2).view(b, t, -1), perplexity


class Wav2Vec(nn.Module):
    """Features, masked ones told from others of the same utterance."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.quantizer = nn.Sequential(nn.Linear(MELS, 9), nn.GELU()), GumbelQuantizer(9)
        self.context = nn.Sequential(nn.Linear(9, 13), nn.GELU(), nn.Linear(13, 8))
        self.mask_embed = nn.Parameter(torch.zeros(9).uniform_())

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        q, perplexity = self.quantizer(x)
        mask = torch.zeros(x.shape[:2], dtype=torch.bool)
        mask[:, 1::3] = True
        x = x.clone()
        x[mask] = self.mask_embed
        c = self.context(x)[mask].view(x.size(0), -1, 8)
        positive = q[mask].view(x.size(0), -1, 8)
        n = positive.size(1)
        sampled = torch.randint(low=0, high=n - 1, size=(x.size(0), n, 3))
        own = torch.arange(n).view(1, n, 1)
        sampled[sampled >= own] += 1
        negatives = positive.unsqueeze(1).expand(-1, n, -1, -1).gather(2, sampled.unsqueeze(-1).expand(-1, -1, -1, 8))  # fmt: skip
        logits = torch.cosine_similarity(
            c.unsqueeze(2), torch.cat([positive.unsqueeze(2), negatives], 2), dim=-1
        )
        equal = (negatives == positive.unsqueeze(2)).all(-1)
        if equal.any():
            logits = torch.cat([logits[..., :1], logits[..., 1:].masked_fill(equal, float("-inf"))], -1)
        target = torch.zeros(logits.size(0) * n, dtype=torch.long)
        return F.cross_entropy(logits.view(-1, 4) / 0.3, target) + 0.1 * (10 - perplexity) / 10


def wav2vec_with_negatives() -> Job:
    return job_of(Wav2Vec, lambda m, b: m(b["x"]), SPEECH)


class WaveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.embed = nn.Conv1d(16, 7, 1), 16
        self.dilated = nn.ModuleList([nn.Conv1d(7, 14, 2, dilation=2**i) for i in range(3)])
        self.skip = nn.ModuleList([nn.Conv1d(7, 9, 1) for _ in range(3)])
        self.res = nn.ModuleList([nn.Conv1d(7, 7, 1) for _ in range(3)])
        self.end = nn.Conv1d(9, 16, 1)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.first(F.one_hot(codes, 16).transpose(1, 2).to(self.first.weight.dtype))
        skip: Any = 0
        for conv, s, r in zip(self.dilated, self.skip, self.res, strict=True):
            a, b = conv(x).chunk(2, 1)
            z = torch.tanh(a) * torch.sigmoid(b)
            out = s(z)
            try:
                skip = skip[:, :, -out.size(2) :]
            except TypeError:
                skip = 0
            skip = out + skip
            x = r(z) + x[:, :, -z.size(2) :]
        return self.end(F.relu(skip))


def _mu_law(model: Any, b: Any) -> Tensor:
    x = torch.tanh(b["x"])
    codes = ((torch.sign(x) * torch.log1p(255 * x.abs()) / math.log1p(255) + 1) / 2 * 15 + 0.5).long()
    y = model(codes[:, :-1])
    return F.cross_entropy(y, codes[:, -y.size(2) :])


def wavenet() -> Job:
    return job_of(WaveNet, _mu_law, WAVES)


class XVector(nn.Module):
    """Statistics of the valid frames of each utterance, loop over utterances."""

    def __init__(self) -> None:
        super().__init__()
        self.tdnn1, self.tdnn2 = nn.Conv1d(MELS, 9, 3, padding=1), nn.Conv1d(9, 7, 3, dilation=2, padding=2)
        self.fc = nn.Linear(14, 8)
        self.weight = nn.Parameter(torch.empty(4, 8))
        nn.init.xavier_normal_(self.weight)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = F.relu(self.tdnn2(F.relu(self.tdnn1(x.transpose(1, 2))))).transpose(1, 2)
        means, stds = [], []
        for i, length in enumerate(lengths):
            means.append(x[i, :length].mean(dim=0))
            stds.append(x[i, :length].std(dim=0))
        pooled = torch.cat([torch.stack(means), torch.stack(stds)], dim=-1)
        return F.linear(F.normalize(self.fc(pooled)), F.normalize(self.weight))


def _am_softmax(model: Any, b: Any) -> Tensor:
    cosine = model(b["x"], b["x_len"])
    delta = torch.zeros_like(cosine).scatter_(1, b["label"].view(-1, 1), 0.2)
    return F.cross_entropy(10.0 * (cosine - delta), b["label"])


def x_vectors() -> Job:
    return job_of(XVector, _am_softmax, SPEECH)


class TasNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Conv1d(1, 9, 4, stride=2, bias=False), nn.ConvTranspose1d(9, 1, 4, stride=2, bias=False)  # fmt: skip
        self.norm, self.mask = nn.GroupNorm(1, 9), nn.Sequential(nn.Conv1d(9, 11, 3, padding=1), nn.PReLU(), nn.Conv1d(11, 18, 1))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        w = F.relu(self.encoder(x.unsqueeze(1)))
        masks = torch.sigmoid(self.mask(self.norm(w))).view(x.size(0), 2, 9, -1)
        return self.decoder((w.unsqueeze(1) * masks).flatten(0, 1)).view(x.size(0), 2, -1)


def _pit(model: Any, b: Any) -> Tensor:
    """SI-SNR of the best permutation of each mixture."""
    y, wanted = model(b["x"]), b["y"]
    y, wanted = y - y.mean(-1, keepdim=True), wanted - wanted.mean(-1, keepdim=True)
    losses = []
    for perm in itertools.permutations(range(2)):
        p = y[:, list(perm)]
        s = (p * wanted).sum(-1, keepdim=True) * wanted / (wanted.pow(2).sum(-1, keepdim=True) + 1e-8)
        ratio = s.pow(2).sum(-1) / ((p - s).pow(2).sum(-1) + 1e-8)
        losses.append(-10 * torch.log10(ratio + 1e-8).mean(-1))
    return torch.stack(losses, 1).min(1)[0].mean()


def permutation_invariant_separation() -> Job:
    return job_of(TasNet, _pit, WAVES)


def _stft(model: Any, b: Any) -> Tensor:
    """Magnitudes of two resolutions, as vocoders are trained."""
    y, wanted = model(b["x"])[:, 0], b["y"][:, 0]
    loss: Any = 0.0
    for size, hop in ((8, 4), (12, 5)):
        window = torch.hann_window(size, dtype=y.dtype)
        one, two = (
            torch.sqrt(torch.clamp(s.real**2 + s.imag**2, min=1e-7))
            for s in (torch.stft(each, size, hop, size, window, return_complex=True) for each in (y, wanted))
        )
        loss += torch.norm(two - one, p="fro") / torch.norm(two, p="fro")
        loss += F.l1_loss(torch.log(one), torch.log(two))
    return loss / 2


def multi_resolution_stft() -> Job:
    return job_of(TasNet, _stft, WAVES)


class LengthRegulator(nn.Module):
    """FastSpeech: every unit repeated as often as its duration says."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder = nn.Embedding(UNITS, 9), nn.Linear(9, 9)
        self.duration, self.decoder = nn.Linear(9, 1), nn.GRU(9, 7, batch_first=True)
        self.head = nn.Linear(7, MELS)

    def forward(self, y: Tensor, durations: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.encoder(self.embed(y)))
        out = [torch.repeat_interleave(row, d, dim=0) for row, d in zip(x, durations, strict=True)]
        out = torch.stack([F.pad(each, (0, 0, 0, FRAMES - each.size(0))) for each in out])
        return self.head(self.decoder(out)[0]), self.duration(x.detach()).squeeze(-1)


def _fastspeech(model: Any, b: Any) -> Tensor:
    mel, logd = model(b["y"], b["durations"])
    mask = torch.arange(FRAMES)[None, :] < b["durations"].sum(1)[:, None]
    mel_loss = F.l1_loss(mel.masked_select(mask.unsqueeze(-1)), b["x"].masked_select(mask.unsqueeze(-1)))
    return mel_loss + F.mse_loss(logd, torch.log(b["durations"].to(logd.dtype)))


def length_regulator() -> Job:
    return job_of(LengthRegulator, _fastspeech, {**SPEECH, "durations": integers(78, 5, 3, least=1)})


class PackedBLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(MELS, 7, bidirectional=True, batch_first=True), nn.Linear(14, UNITS)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=x.size(1))
        return self.head(out)


def packed_lstm() -> Job:
    return job_of(PackedBLSTM, _ctc, SPEECH)
