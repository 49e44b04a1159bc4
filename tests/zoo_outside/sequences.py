"""Text, speech and series: lists of tensors of other lengths, packed sequences, decoding inside the loss, attention that loops over time."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    pad_sequence,
)

from meshloom.core.job import Job
from tests.zoo import SAMPLES, integers, job_of, normal

log = logging.getLogger(__name__)
VOCABULARY = 13
LENGTHS = integers(351, 9, least=3)
WORDS = [
    (integers(352, VOCABULARY, 9, least=3)[i][: LENGTHS[i]], integers(353, 4)[i]) for i in range(SAMPLES)
]
FRAMES = [normal(354, 9, 6)[i][: LENGTHS[i]] for i in range(SAMPLES)]
UTTERANCES = [(FRAMES[i], integers(355, 7, 3, least=1)[i][: 1 + i % 3]) for i in range(SAMPLES)]


def _lists(samples: list[Any]) -> Any:
    return [words for words, _ in samples], torch.stack([label for _, label in samples])


class TextClassifier(nn.Module):
    """Packs what is not sorted, takes last hidden states of both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 9, num_layers=2, bidirectional=True, batch_first=True)
        self.fc = nn.Sequential(nn.Dropout(0.2), nn.Linear(18, 4))

    def forward(self, texts: list[Tensor]) -> Tensor:
        lengths = torch.tensor([len(t) for t in texts])
        padded = pad_sequence(texts, batch_first=True, padding_value=0)
        packed = pack_padded_sequence(self.embed(padded), lengths, batch_first=True, enforce_sorted=False)
        _, (h, _) = self.lstm(packed)
        return self.fc(torch.cat([h[-2], h[-1]], dim=1))


def texts_in_lists() -> Job:
    return job_of(
        TextClassifier, lambda m, b: F.cross_entropy(m(b[0]), b[1]), WORDS, collate=_lists, batch_size=7
    )


class SortedAttention(nn.Module):
    """Sorts by length, packs, runs on the packed data itself, pads again, pools by attention under a mask, and unsorts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru = nn.Embedding(VOCABULARY, 8), nn.GRU(9, 7, bidirectional=True)
        self.proj, self.query, self.out = nn.Linear(8, 9), nn.Linear(14, 1, bias=False), nn.Linear(14, 4)

    def forward(self, texts: list[Tensor]) -> Tensor:
        lengths, order = torch.sort(torch.tensor([t.size(0) for t in texts]), descending=True)
        packed = pack_sequence([texts[i] for i in order])
        data = torch.tanh(self.proj(self.embed(packed.data)))
        states, _ = self.gru(PackedSequence(data, packed.batch_sizes))
        x, lengths = pad_packed_sequence(states, batch_first=True)
        scores = self.query(x).squeeze(2)
        mask = torch.arange(x.size(1))[None, :] < lengths[:, None]
        scores[~mask] = float("-inf")
        pooled = torch.bmm(F.softmax(scores, 1).unsqueeze(1), x).squeeze(1)
        return self.out(pooled[order.argsort()])


def sorted_and_packed() -> Job:
    return job_of(SortedAttention, lambda m, b: F.cross_entropy(m(b[0]), b[1]), WORDS, collate=_lists)


@dataclass
class Utterances:
    frames: list[Tensor]
    targets: Tensor
    target_lengths: Tensor

    def __len__(self) -> int:
        return len(self.frames)


def _utterances(samples: list[Any]) -> Utterances:
    return Utterances(
        [x for x, _ in samples],
        torch.cat([y for _, y in samples]),
        torch.tensor([len(y) for _, y in samples]),
    )


class PyramidalEncoder(nn.Module):
    """Halves time between recurrent layers, drops an odd last frame."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = (
            nn.LSTM(6, 7, batch_first=True),
            nn.LSTM(14, 9, batch_first=True),
            nn.Linear(9, 8),
        )

    def forward(self, frames: list[Tensor]) -> tuple[Tensor, Tensor]:
        lengths = torch.as_tensor([f.shape[0] for f in frames])
        packed = pack_padded_sequence(
            pad_sequence(frames, True), lengths, batch_first=True, enforce_sorted=False
        )
        x, lengths = pad_packed_sequence(self.one(packed)[0], batch_first=True)
        if x.shape[1] % 2:
            x = x[:, :-1]
        x = x.contiguous().view(x.size(0), x.size(1) // 2, -1)
        lengths = torch.div(lengths, 2, rounding_mode="floor").clamp(min=1)
        return self.out(self.two(x)[0]), lengths


def _greedy(log_probs: Tensor, lengths: Tensor) -> list[list[int]]:
    decoded = []
    for row, n in zip(log_probs.argmax(-1).t(), lengths, strict=True):
        best = torch.unique_consecutive(row[:n])
        decoded.append([int(i) for i in best if i != 0])
    return decoded


def _ctc_with_targets_in_a_row(model: Any, b: Utterances) -> Tensor:
    logits, lengths = model(b.frames)
    log_probs = F.log_softmax(logits.transpose(0, 1), dim=-1)
    loss = F.ctc_loss(log_probs, b.targets, lengths, b.target_lengths, reduction="none", zero_infinity=True)
    errors = sum(
        len(d) != n
        for d, n in zip(_greedy(log_probs.detach(), lengths), b.target_lengths.tolist(), strict=True)
    )
    log.debug("errors %d of %d, loss %.3f", errors, len(b), loss.mean().item())
    return loss.mean()


def pyramid_with_ctc() -> Job:
    return job_of(PyramidalEncoder, _ctc_with_targets_in_a_row, UTTERANCES, collate=_utterances)


class Tacotron(nn.Module):
    """Location-sensitive attention whose weights add up in a loop, a prenet whose dropout never stops, zoneout by masks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.memory = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 7, bias=False)
        self.prenet, self.attention_rnn = (
            nn.ModuleList([nn.Linear(6, 9, bias=False), nn.Linear(9, 7, bias=False)]),
            nn.LSTMCell(7 + 8, 9),
        )
        self.query, self.v = nn.Linear(9, 7, bias=False), nn.Linear(7, 1, bias=False)
        self.location, self.location_dense = (
            nn.Conv1d(2, 3, 3, padding=1, bias=False),
            nn.Linear(3, 7, bias=False),
        )
        self.projection, self.gate = nn.Linear(9 + 8, 6), nn.Linear(17, 1)

    def _pre(self, x: Tensor) -> Tensor:
        for linear in self.prenet:
            x = F.dropout(F.relu(linear(x)), p=0.5, training=True)
        return x

    def forward(self, text: Tensor, lengths: Tensor, mels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        memory = self.embed(text)
        processed = self.memory(memory)
        mask = torch.arange(text.size(1)) >= lengths.unsqueeze(1)
        b, t = text.shape
        h, c = memory.new_zeros(b, 9), memory.new_zeros(b, 9)
        weights, cumulated, context = memory.new_zeros(b, t), memory.new_zeros(b, t), memory.new_zeros(b, 8)
        frames = torch.cat([mels.new_zeros(b, 1, 6), mels[:, :-1]], 1)
        outs, gates, alignments = [], [], []
        while len(outs) < frames.size(1):
            x = self._pre(frames[:, len(outs)])
            h2, c = self.attention_rnn(torch.cat((x, context), -1), (h, c))
            keep = torch.rand_like(h2) < 0.1
            h = torch.where(keep, h, h2) if self.training else 0.1 * h + 0.9 * h2
            location = self.location_dense(
                self.location(torch.stack([weights, cumulated], 1)).transpose(1, 2)
            )
            energies = self.v(torch.tanh(self.query(h.unsqueeze(1)) + location + processed)).squeeze(-1)
            energies.data.masked_fill_(mask, -float("inf"))
            weights = F.softmax(energies, dim=1)
            context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
            cumulated += weights
            hc = torch.cat((h, context), dim=1)
            outs += [self.projection(hc)]
            gates += [self.gate(hc).squeeze(1)]
            alignments += [weights]
        return torch.stack(outs, 1), torch.stack(gates, 1), torch.stack(alignments, 1)


SYNTHESIS = {"text": integers(356, VOCABULARY, 7), "len": integers(357, 8, least=4), "mel": normal(358, 5, 6)}


def _tacotron(model: Any, b: Any) -> Tensor:
    mel, gate, align = model(b["text"], b["len"], b["mel"])
    target = torch.zeros_like(gate)
    target[:, -1] = 1
    n, t = b["len"].to(mel).view(-1, 1, 1), torch.arange(gate.size(1)).to(mel).view(1, -1, 1) / gate.size(1)
    guide = 1 - torch.exp(-((torch.arange(align.size(2)).to(mel).view(1, 1, -1) / n - t) ** 2) / 0.32)
    return (
        F.mse_loss(mel, b["mel"]) + F.binary_cross_entropy_with_logits(gate, target) + (guide * align).mean()
    )


def tacotron() -> Job:
    return job_of(Tacotron, _tacotron, SYNTHESIS, clip_grad_norm=1.0)


class Captioner(nn.Module):
    """Self-critical training: a sampled sentence against a greedy one, both of a decoder in a loop that stops when all have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.embed, self.cell, self.out = (
            nn.Linear(5, 9),
            nn.Embedding(VOCABULARY, 9),
            nn.GRUCell(9, 9),
            nn.Linear(9, VOCABULARY),
        )
        self.out.bias.data[0] = 1.0

    def decode(self, features: Tensor, sample: bool) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.image(features))
        word = torch.ones(len(features), dtype=torch.long)
        words, log_probs = [], []
        unfinished = torch.ones(len(features), dtype=torch.bool)
        for _ in range(6):
            h = self.cell(self.embed(word), h)
            log_p = F.log_softmax(self.out(h), 1)
            if sample:
                word = torch.multinomial(log_p.detach().exp(), 1).squeeze(1)
            else:
                word = log_p.max(1)[1]
            chosen = log_p.gather(1, word.unsqueeze(1)).squeeze(1)
            word = word * unfinished.type_as(word)
            words.append(word)
            log_probs.append(chosen * unfinished)
            unfinished = unfinished & (word > 0)
            if unfinished.sum() == 0:
                break
        return torch.stack(words, 1), torch.stack(log_probs, 1)


def _self_critical(model: Any, b: Any) -> Any:
    model.eval()
    with torch.no_grad():
        greedy, _ = model.decode(b["x"], sample=False)
    model.train()
    words, log_p = model.decode(b["x"], sample=True)

    def score(ids: Tensor) -> Tensor:
        return torch.tensor(
            [len(set(row) & set(ref)) for row, ref in zip(ids.tolist(), b["ref"].tolist(), strict=True)]
        )

    reward = (score(words) - score(greedy)).to(log_p).unsqueeze(1)
    mask = (words > 0).to(log_p)
    mask = torch.cat([mask.new_ones(mask.size(0), 1), mask[:, :-1]], 1)
    return (-log_p * reward * mask).sum(), mask.sum()


def self_critical_captions() -> Job:
    return job_of(Captioner, _self_critical, {"x": normal(359, 5), "ref": integers(360, VOCABULARY, 5)})


class Viterbi(nn.Module):
    """A semi-Markov tagger: the partition over segments in loops, and the best path by pointers, whose accuracy is kept."""

    def __init__(self, tags: int = 4) -> None:
        super().__init__()
        self.embed, self.conv = nn.Embedding(VOCABULARY, 8), nn.Conv1d(8, 9, 3, padding=1)
        self.out, self.transitions, self.tags = (
            nn.Linear(9, tags),
            nn.Parameter(torch.randn(tags, tags) * 0.1),
            tags,
        )
        self.register_buffer("correct", torch.zeros(()))

    def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
        e = self.out(F.relu(self.conv(self.embed(ids).transpose(1, 2)).transpose(1, 2)))
        alpha, best, pointers = e[:, 0], e[:, 0].detach(), []
        score = e[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for t in range(1, e.size(1)):
            alpha = torch.logsumexp(alpha.unsqueeze(2) + self.transitions, 1) + e[:, t]
            score = (
                score
                + self.transitions[tags[:, t - 1], tags[:, t]]
                + e[:, t].gather(1, tags[:, t : t + 1]).squeeze(1)
            )
            with torch.no_grad():
                best, index = (best.unsqueeze(2) + self.transitions).max(1)
                best = best + e[:, t]
                pointers.append(index)
        paths = []
        for b in range(len(ids)):
            path = [int(best[b].argmax())]
            for index in reversed(pointers):
                path.append(int(index[b][path[-1]]))
            paths.append(path[::-1])
        self.correct.mul_(0.9).add_(0.1 * (torch.tensor(paths) == tags).to(e).mean())
        return (torch.logsumexp(alpha, 1) - score).mean()


def crf_with_viterbi() -> Job:
    return job_of(
        Viterbi, lambda m, b: m(b["x"], b["y"]), {"x": integers(361, VOCABULARY, 6), "y": integers(362, 4, 6)}
    )
