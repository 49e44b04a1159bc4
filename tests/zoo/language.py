"""Language models: masks from lengths, loops over tokens, trees, taggers, adapters of frozen weights."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.zoo import SAMPLES, integers, job_of, normal

VOCABULARY, LENGTH, WIDTH = 19, 7, 12
TOKENS, LABELS = integers(41, VOCABULARY, LENGTH, least=1), integers(42, 3)
LENGTHS = integers(43, LENGTH + 1, least=2)


def _classify(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["ids"], batch["lengths"]), batch["label"])


TEXTS = {"ids": TOKENS, "lengths": LENGTHS, "label": LABELS}


def sequence_mask(lengths: Tensor, maximum: int) -> Tensor:
    return torch.arange(maximum, device=lengths.device)[None, :] < lengths[:, None]


class EncoderLayer(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = 3) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.attn: Tensor | None = None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        if mask is not None:
            att = att.masked_fill(mask.unsqueeze(1) == 0, -1e9)
        att = F.softmax(att, dim=-1)
        self.attn = att.detach()
        x = self.norm1(x + self.out((att @ v).transpose(1, 2).contiguous().view(b, t, c)))
        return self.norm2(x + self.fc2(F.gelu(self.fc1(x))))


class Encoder(nn.Module):
    def __init__(self, layer: Any = EncoderLayer) -> None:
        super().__init__()
        self.embed, self.position = (
            nn.Embedding(VOCABULARY, WIDTH, padding_idx=0),
            nn.Embedding(LENGTH, WIDTH),
        )
        self.layers, self.head = nn.ModuleList([layer() for _ in range(2)]), nn.Linear(WIDTH, 3)

    def embedded(self, ids: Tensor) -> Tensor:
        return self.embed(ids) + self.position.weight[: ids.size(1)]

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        mask = sequence_mask(lengths, ids.size(1))
        x = self.embedded(ids * mask)
        for layer in self.layers:
            x = layer(x, mask.unsqueeze(1))
        mask = mask.unsqueeze(-1).to(x.dtype)
        return self.head((x * mask).sum(1) / mask.sum(1).clamp(min=1e-9))


def masks_from_lengths() -> Job:
    return job_of(Encoder, _classify, TEXTS)


class DropsLayers(Encoder):
    """LayerDrop as HuBERT and BART have it, by numpy's or Python's own draw."""

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedded(ids)
        hidden = (x,)
        for layer in self.layers:
            dropout_probability = random.uniform(0, 1)
            if self.training and dropout_probability < 0.4:
                continue
            x = layer(x)
            hidden = (*hidden, x)
        return self.head(hidden[-1].mean(1))


def layer_drop() -> Job:
    return job_of(DropsLayers, _classify, TEXTS)


class LayerDropTorch(Encoder):
    """LayerDrop as wav2vec2 has it, by torch's draw."""

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedded(ids)
        for layer in self.layers:
            skip = self.training and torch.rand([]) < 0.4
            if not skip:
                x = F.dropout(layer(x), 0.1, self.training)
        return self.head(x.mean(1))


def layer_drop_by_torch() -> Job:
    return job_of(LayerDropTorch, _classify, TEXTS)


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, r: int = 2, alpha: int = 4) -> None:
        super().__init__()
        self.base = base
        for p in self.base.parameters():
            p.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(r, base.in_features) * 0.3)
        self.lora_B = nn.Parameter(torch.randn(base.out_features, r) * 0.1)
        self.scaling, self.lora_dropout = alpha / r, nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_dropout(x) @ self.lora_A.T @ self.lora_B.T * self.scaling


def lora() -> Job:
    def model() -> nn.Module:
        net = Encoder()
        for name, p in net.named_parameters():
            p.requires_grad = "head" in name
        for layer in net.layers:
            layer.qkv, layer.fc1 = LoRALinear(layer.qkv), LoRALinear(layer.fc1)
        return net

    return job_of(model, _classify, TEXTS)


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)
        nn.init.normal_(self.up.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(F.relu(self.down(x)))


def adapters_by_hooks() -> Job:
    """Adapters whose outputs replace those of frozen layers, by forward hooks."""

    def model() -> nn.Module:
        net = Encoder()
        net.requires_grad_(False)
        net.adapters = nn.ModuleList([Adapter() for _ in net.layers])
        for layer, adapter in zip(net.layers, net.adapters, strict=True):
            layer.register_forward_hook(lambda module, args, out, adapter=adapter: adapter(out))
        net.head.requires_grad_(True)
        return net

    return job_of(model, _classify, TEXTS)


class PrefixTuned(Encoder):
    def __init__(self) -> None:
        super().__init__()
        for p in self.parameters():
            p.requires_grad = False
        self.prefix = nn.Parameter(torch.randn(3, WIDTH) * 0.3)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH))

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        prefix = self.mlp(self.prefix).unsqueeze(0).expand(ids.shape[0], -1, -1)
        x = torch.cat([prefix, self.embedded(ids)], dim=1)
        mask = torch.cat(
            [torch.ones(ids.shape[0], 3, dtype=torch.bool), sequence_mask(lengths, ids.size(1))], 1
        )
        for layer in self.layers:
            x = layer(x, mask[:, None, :])
        return self.head(x[:, 0])


def prefix_tuning() -> Job:
    return job_of(PrefixTuned, _classify, TEXTS)


class CRFTagger(nn.Module):
    def __init__(self, tags: int = 5) -> None:
        super().__init__()
        self.embed, self.lstm = (
            nn.Embedding(VOCABULARY, 9),
            nn.LSTM(9, 6, bidirectional=True, batch_first=True),
        )
        self.emit = nn.Linear(12, tags)
        self.start, self.end = nn.Parameter(0.1 * torch.randn(tags)), nn.Parameter(0.1 * torch.randn(tags))
        self.transitions = nn.Parameter(0.1 * torch.randn(tags, tags))

    def forward(self, ids: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        emissions = self.emit(self.lstm(self.embed(ids))[0]).transpose(0, 1)
        tags, mask = tags.transpose(0, 1), mask.transpose(0, 1)
        rows = torch.arange(tags.size(1))
        score = self.start[tags[0]] + emissions[0, rows, tags[0]]
        alpha = self.start + emissions[0]
        for i in range(1, emissions.size(0)):
            score = score + (self.transitions[tags[i - 1], tags[i]] + emissions[i, rows, tags[i]]) * mask[i]
            broadcast = alpha.unsqueeze(2) + self.transitions + emissions[i].unsqueeze(1)
            alpha = torch.where(mask[i].unsqueeze(1), torch.logsumexp(broadcast, dim=1), alpha)
        last = tags[mask.long().sum(dim=0) - 1, rows]
        return (torch.logsumexp(alpha + self.end, dim=1) - score - self.end[last]).mean()


def crf_tagger() -> Job:
    def loss(model: Any, batch: Any) -> Tensor:
        return model(batch["ids"], batch["tags"], sequence_mask(batch["lengths"], LENGTH))

    return job_of(CRFTagger, loss, {**TEXTS, "tags": integers(44, 5, LENGTH)})


class Seq2Seq(nn.Module):
    """An attentive decoder that reads, at each step, what it said or what it should have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder = nn.Embedding(VOCABULARY, 9), nn.GRU(9, 11, batch_first=True)
        self.cell, self.attn = nn.GRUCell(9 + 11, 11), nn.Linear(22, 1)
        self.out = nn.Linear(11, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor, teacher_forcing_ratio: float = 0.5) -> Tensor:
        memory, hidden = self.encoder(self.embed(source))
        hidden = hidden.squeeze(0)
        token, outputs = target[:, 0], []
        for t in range(1, target.size(1)):
            scores = self.attn(torch.cat([memory, hidden.unsqueeze(1).expand_as(memory)], -1)).squeeze(-1)
            context = torch.bmm(F.softmax(scores, dim=1).unsqueeze(1), memory).squeeze(1)
            hidden = self.cell(torch.cat([self.embed(token), context], dim=1), hidden)
            output = self.out(hidden)
            outputs.append(output)
            teacher_force = random.random() < teacher_forcing_ratio
            token = target[:, t] if teacher_force else output.argmax(1)
        return torch.stack(outputs, dim=1)


def _translate(model: Any, batch: Any) -> Tensor:
    output = model(batch["source"], batch["target"])
    return F.cross_entropy(output.reshape(-1, VOCABULARY), batch["target"][:, 1:].reshape(-1), label_smoothing=0.1)  # fmt: skip


def scheduled_sampling() -> Job:
    return job_of(Seq2Seq, _translate, {"source": TOKENS, "target": integers(45, VOCABULARY, 5)})


class PointerGenerator(Seq2Seq):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(11, 1)

    def forward(self, source: Tensor, target: Tensor, teacher_forcing_ratio: float = 1.0) -> Tensor:
        memory, hidden = self.encoder(self.embed(source))
        hidden, coverage, lost = hidden[0], torch.zeros_like(memory[:, :, 0]), 0.0
        for t in range(target.size(1) - 1):
            scores = self.attn(torch.cat([memory, hidden.unsqueeze(1).expand_as(memory)], -1)).squeeze(-1)
            a = F.softmax(scores - coverage, dim=1)
            coverage = coverage + a
            hidden = self.cell(
                torch.cat([self.embed(target[:, t]), (a.unsqueeze(2) * memory).sum(1)], 1), hidden
            )
            p = torch.sigmoid(self.gate(hidden))
            final = (p * F.softmax(self.out(hidden), 1)).scatter_add(1, source, (1 - p) * a)
            lost = lost - torch.log(final.gather(1, target[:, t + 1 : t + 2]).squeeze(1) + 1e-12).mean()
        return lost / (target.size(1) - 1)


def pointer_generator() -> Job:
    data = {"source": TOKENS, "target": integers(46, VOCABULARY, 5)}
    return job_of(PointerGenerator, lambda m, b: m(b["source"], b["target"]), data)


class TreeLSTM(nn.Module):
    """Child-sum cells over trees, each node's parent in a list, one node after another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.iou_x, self.iou_h = nn.Embedding(VOCABULARY, 7), nn.Linear(7, 27), nn.Linear(9, 27)
        self.fx, self.fh, self.head = nn.Linear(7, 9), nn.Linear(9, 9), nn.Linear(9, 3)

    def node(self, x: Tensor, children: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        zero = x.new_zeros(9)
        h_sum = torch.stack([h for h, _ in children]).sum(0) if children else zero
        i, o, u = (self.iou_x(x) + self.iou_h(h_sum)).chunk(3)
        c = torch.sigmoid(i) * torch.tanh(u)
        for h, cell in children:
            c = c + torch.sigmoid(self.fx(x) + self.fh(h)) * cell
        return torch.sigmoid(o) * torch.tanh(c), c

    def forward(self, ids: Tensor, parents: Tensor) -> Tensor:
        roots = []
        for b in range(ids.size(0)):
            children: list[list[Any]] = [[] for _ in range(ids.size(1))]
            for t in range(ids.size(1) - 1, -1, -1):
                state = self.node(self.embed(ids[b, t]), children[t])
                if t > 0:
                    children[parents[b, t].item()].append(state)
            roots.append(state[0])
        return self.head(torch.stack(roots))


def tree_lstm() -> Job:
    parents = torch.stack([(integers(47, 100)[:] % max(t, 1)) for t in range(4)], 1)
    data = {"ids": TOKENS[:, :4], "parents": parents, "label": LABELS}
    return job_of(TreeLSTM, lambda m, b: F.cross_entropy(m(b["ids"], b["parents"]), b["label"]), data)


class Halting(Encoder):
    """Adaptive computation time: steps until every token has halted."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        state = self.embedded(ids)
        halting, remainders = torch.zeros_like(state[..., 0]), torch.zeros_like(state[..., 0])
        updates, previous, step = torch.zeros_like(halting), torch.zeros_like(state), 0
        while ((halting < 0.9) & (updates < 4)).byte().any():
            p = torch.sigmoid(self.p(state)).squeeze(-1)
            running = (halting < 1.0).to(p.dtype)
            halted = (halting + p * running > 0.9).to(p.dtype) * running
            running = (halting + p * running <= 0.9).to(p.dtype) * running
            halting = halting + p * running
            remainders = remainders + halted * (1 - halting)
            halting = halting + halted * remainders
            updates = updates + running + halted
            weights = (p * running + halted * remainders).unsqueeze(-1)
            state = self.layers[step % 2](state)
            previous = state * weights + previous * (1 - weights)
            step += 1
        return self.head(previous.mean(1)) + 0.01 * remainders.mean()


def adaptive_computation_time() -> Job:
    return job_of(Halting, _classify, TEXTS)


class Skipgram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.u, self.v = nn.Embedding(VOCABULARY, 9), nn.Embedding(VOCABULARY, 9)
        nn.init.uniform_(self.u.weight.data, -0.5, 0.5)
        nn.init.uniform_(self.v.weight.data, -0.5, 0.5)

    def forward(self, centre: Tensor, context: Tensor, negatives: Tensor) -> Tensor:
        u, v, n = self.u(centre), self.v(context), self.v(negatives)
        score = -F.logsigmoid(torch.clamp(torch.sum(u * v, dim=1), max=10, min=-10))
        neg = torch.clamp(torch.bmm(n, u.unsqueeze(2)).squeeze(), max=10, min=-10)
        return torch.mean(score - torch.sum(F.logsigmoid(-neg), dim=1))


def skipgram_with_negatives() -> Job:
    data = (TOKENS[:, 0], TOKENS[:, 1], TOKENS[:, 2:])
    return job_of(Skipgram, lambda m, b: m(*b), data)


class WordDropout(Encoder):
    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        if self.training:
            mask = torch.empty(ids.size()).bernoulli_(0.2).bool()
            ids = torch.where(mask, torch.zeros_like(ids), ids)
        x = self.embedded(ids)
        for layer in self.layers:
            x = layer(x)
            if torch.isnan(x).any():
                raise ValueError("NaN in a layer's output")
        return self.head(x.max(dim=1)[0])


def word_dropout_with_checks() -> Job:
    assert normal(1).size(0) == SAMPLES
    return job_of(WordDropout, _classify, TEXTS)
