"""The models of published runs, and their stages: equal numbers of blocks, embeddings on the first and the head on the last, as Megatron-LM cuts them.

A block is what two more blocks add to a small model of its shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshloom.clusters.cluster import Cluster, named
from meshloom.clusters.work import OperatorWork
from meshloom.core.job import Job
from meshloom.planner.on_clusters.cluster_parts import ClusterParts
from meshloom.planner.on_clusters.part import ModelPart, StageWork
from meshloom.planner.on_clusters.step import StepPricer

FEW = (4, 6)  # blocks of the small models


@dataclass(frozen=True, kw_only=True)
class Shape:
    """kind: "gpt-2021" (attention written out, GELU), "gpt" (attention in one kernel), "llama" (RMSNorm, SwiGLU, rotary, grouped keys)."""

    kind: str
    hidden: int
    heads: int
    layers: int
    vocabulary: int
    length: int
    feed_forward: int = 0
    key_heads: int = 0

    @property
    def inner(self) -> int:
        return self.feed_forward or 4 * self.hidden

    @property
    def parameters(self) -> int:
        gated, keys = (3 if self.kind == "llama" else 2), (self.key_heads or self.heads) / self.heads
        block = self.hidden**2 * (2 + 2 * keys) + gated * self.hidden * self.inner
        return round(self.layers * block + self.vocabulary * self.hidden * (2 if self.kind == "llama" else 1))


class _Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, size = shape, shape.hidden // shape.heads
        self.keys = (shape.key_heads or shape.heads) * size
        bias = shape.kind != "llama"
        if shape.kind == "llama":
            self.q, self.k, self.v = (
                nn.Linear(shape.hidden, n, bias) for n in (shape.hidden, self.keys, self.keys)
            )
        else:
            self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        size = self.shape.hidden // self.shape.heads
        given = (self.q(x), self.k(x), self.v(x)) if self.shape.kind == "llama" else self.qkv(x).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (-1, size)).transpose(1, 2) for each in given)
        if self.shape.kind == "llama":
            q, k = _rotated(q), _rotated(k)
        if self.shape.kind == "gpt-2021":
            later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
            scores = (q @ k.transpose(-1, -2) * size**-0.5).masked_fill(later, -1e4)
            read = functional.dropout(torch.softmax(scores, -1), 0.1) @ v
        else:
            read = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=bool(self.shape.key_heads)
            )
        return self.out(read.transpose(1, 2).flatten(2))


def _rotated(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[-2], dtype=torch.float32)[:, None] / 1e4 ** (
        torch.arange(x.shape[-1] // 2) * 2 / x.shape[-1]
    )
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    one, other = x.chunk(2, -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


class _Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gated = shape.kind == "llama"
        norm: Any = nn.RMSNorm if self.gated else nn.LayerNorm
        self.n1, self.n2, self.attention = norm(shape.hidden), norm(shape.hidden), _Attention(shape)
        self.up, self.down = (
            nn.Linear(*sizes, not self.gated)
            for sizes in ((shape.hidden, shape.inner), (shape.inner, shape.hidden))
        )
        self.gate = nn.Linear(shape.hidden, shape.inner, False) if self.gated else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.n1(x))
        y = self.n2(x)
        y = functional.silu(self.gate(y)) * self.up(y) if self.gate else functional.gelu(self.up(y))
        return x + self.down(y)


class _Model(nn.Module):
    def __init__(self, shape: Shape, blocks: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.places = nn.Embedding(shape.length, shape.hidden) if shape.kind != "llama" else None
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(blocks))
        norm: Any = nn.LayerNorm if self.places else nn.RMSNorm
        self.norm, self.head = norm(shape.hidden), nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        if self.places:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        x = x + self.places(torch.arange(ids.shape[1])) if self.places else x
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _loss(model: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["next"].flatten())


def _data(length: int) -> list[Any]:
    ids = torch.zeros(length, dtype=torch.int64)
    return [{"ids": ids, "next": ids}] * 16


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


@dataclass(frozen=True, kw_only=True)
class _Costs:
    """Of a block, and of all around the blocks; again: seconds of a block's attention without its products with weights."""

    block: StageWork
    ends: StageWork
    attention: float


class PublishedPart:
    """Stands for a `ModelPart` in `StepPricer.step`: its stages are those of the run. recompute: none, full, third (of a forward), or attention
    (Korthikanti's selective one)."""

    def __init__(
        self,
        shape: Shape,
        cluster: Cluster,
        tp: int,
        *,
        recompute: str = "none",
        compiled: bool = True,
        hides_tp: bool = False,
    ) -> None:
        self._shape, self._recompute, self._tp, self._hides_tp = shape, recompute, tp, hides_tp
        made = (_parts(replace(shape, layers=0), cluster.name, blocks, compiled) for blocks in FEW)
        self._few, self._more = (each.priced_on(cluster) for each in made)

    @property
    def pricer(self) -> StepPricer:
        return self._few.pricer

    def stages(self, count: int, samples: int, recompute: str) -> tuple[StageWork, ...]:
        costs, layers = self._costs(samples), self._shape.layers
        block = costs.block
        if self._hides_tp:
            block = replace(
                block, forward=block.forward - block.tp / 2, backward=block.backward - block.tp / 2, tp=0.0
            )
        if self._recompute == "full":
            block = replace(
                block,
                backward=block.backward + block.forward,
                tp=block.tp * 1.5,
                tp_bytes=block.tp_bytes * 3 // 2,
            )
            block = replace(block, kept=block.sent)
        elif self._recompute == "third":
            block = replace(block, backward=block.backward + block.forward / 3)
        elif self._recompute == "attention":
            block = replace(block, backward=block.backward + costs.attention)
        found = [_times(block, layers // count + (number < layers % count)) for number in range(count)]
        # embedding and head: half of their parameters each, time on the last
        ends = costs.ends
        first = replace(_times(ends, 0), parameters=ends.parameters // 2, trained=ends.trained // 2)
        found[0] = _sum(found[0], first)
        found[-1] = _sum(
            found[-1],
            replace(
                ends, parameters=ends.parameters - first.parameters, trained=ends.trained - first.trained
            ),
        )
        return tuple(found)

    def _costs(self, samples: int) -> _Costs:
        few, more = (each.of(self._tp) for each in (self._few, self._more))
        one, other, two = (
            few.stages(1, samples, "none")[0],
            more.stages(1, samples, "none")[0],
            few.stages(2, samples, "none")[0],
        )
        block = replace(
            _times(_sum(other, one, -1), 1 / (FEW[1] - FEW[0])), sent=two.sent, returned=two.returned
        )
        return _Costs(block=block, ends=_sum(one, block, -FEW[0]), attention=_attention_seconds(few, samples))


@cache
def _parts(shape: Shape, cluster: str, blocks: int, compiled: bool) -> ClusterParts:
    job = Job(
        model=partial(_Model, shape, blocks), data=partial(_data, shape.length), loss=_loss, optimizer=_adam, batch_size=16, steps=1
    )  # fmt: skip
    return ClusterParts(job, named(cluster), precision="bf16", compiled=compiled)


def _attention_seconds(part: ModelPart, samples: int) -> float:
    """Forward, of a block: from its product of queries and keys to that with values."""
    total, run = 0.0, [0.0]
    for forward, seconds in part.forwards(samples):
        is_inner = any(
            isinstance(each, OperatorWork) and (each.kind == "attention" or each.sizes[:1] > (1,))
            for each in forward
        )
        run[0] += seconds
        if is_inner and len(run) == 1:
            run = [seconds, 0.0]
        elif is_inner:
            total, run = total + run[0], [0.0]
    return total / FEW[0]


def _sum(one: StageWork, other: StageWork, times: float = 1) -> StageWork:
    return _each(lambda name: getattr(one, name) + times * getattr(other, name))


def _times(one: StageWork, times: float) -> StageWork:
    return _each(
        lambda name: (
            getattr(one, name) if name in ("sent", "returned", "again") else times * getattr(one, name)
        )
    )


def _each(value: Callable[[str], float]) -> StageWork:
    found: dict[str, Any] = {each.name: value(each.name) for each in fields(StageWork)}
    whole = {each.name for each in fields(StageWork) if each.type == "int"}
    return StageWork(**{name: round(each) if name in whole else each for name, each in found.items()})
