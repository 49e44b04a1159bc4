"""Models of several parts: towers, encoders with decoders, adapters beside frozen weights, losses of detection."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.equality.model import Model, Samples, normal, whole
from tests.equality.models.attention import GPT, Block, next_token, texts
from tests.equality.models.dense import own_loss


class Towers(nn.Module):
    """Pictures and texts, each with a tower of its own, which meet in a score of 3 texts for each picture."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 8, 3, stride=3)
        self.seen = Block(8, 2, 12, causal=False)
        self.embed = nn.Embedding(15, 6)
        self.read = Block(6, 3, 11)
        self.of_picture, self.of_text = nn.Linear(8, 5, bias=False), nn.Linear(6, 5, bias=False)
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        picture = self.seen(self.patches(batch["x"]).flatten(2).transpose(1, 2)).mean(1)
        text = self.read(self.embed(batch["texts"].flatten(0, 1))).mean(1).unflatten(0, (-1, 3))
        picture, text = F.normalize(self.of_picture(picture), dim=-1), F.normalize(self.of_text(text), dim=-1)
        scores = self.log_scale.exp() * torch.einsum("bi,bni->bn", picture, text)
        return F.cross_entropy(scores, batch["y"])


class Translator(nn.Module):
    """Sources [batch, 5] and targets [batch, 4]: an encoder, and a decoder that attends to it; three embeddings are one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(18, 12)
        self.encoder = nn.ModuleList(Block(12, 3, 17, causal=False) for _ in range(2))
        self.decoder = nn.ModuleList(Block(12, 2, 13) for _ in range(2))
        self.cross = nn.ModuleList(nn.MultiheadAttention(12, 4, batch_first=True) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(12) for _ in range(2))
        self.head = nn.Linear(12, 18, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.3)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        source = self.embed(batch["source"])
        for layer in self.encoder:
            source = layer(source)
        x = self.embed(batch["x"])
        for layer, cross, norm in zip(self.decoder, self.cross, self.norms, strict=True):
            x = layer(x)
            x = x + cross(norm(x), source, source, need_weights=False)[0]
        there = batch["y"] != -100
        loss = F.cross_entropy(
            self.head(x).flatten(0, 1), batch["y"].flatten(), ignore_index=-100, reduction="sum"
        )
        return loss, there.sum()


class ViT(nn.Module):
    """[batch, 2, 6, 6] -> [batch, 5]: patches, a token of the class, torch's own layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(2, 9, 2, stride=2)
        self.token = nn.Parameter(torch.randn(1, 1, 9))
        self.position = nn.Parameter(0.1 * torch.randn(1, 10, 9))
        self.blocks = nn.ModuleList(Block(9, 3, 14, 0.1, causal=False) for _ in range(2))
        self.norm = nn.LayerNorm(9)
        self.head = nn.Linear(9, 5)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.patches(batch["x"]).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.position
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)[:, 0]), batch["y"], label_smoothing=0.1)


class LoRA(nn.Module):
    """A frozen linear layer, and two small matrices beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(0.3 * torch.randn(rank, base.in_features))
        self.b = nn.Parameter(0.1 * torch.randn(base.out_features, rank))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * F.linear(F.linear(self.dropout(x), self.a), self.b)


def lora_gpt() -> nn.Module:
    """Everything is frozen but adapters of the packed projections, and of the feed-forward."""
    model = GPT(14, 8, 2, 18, 6).requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.up = LoRA(block.qkv, 3), LoRA(block.up, 2)
    return model


class Prefix(nn.Module):
    """Tokens [batch, 5] -> logits [batch, 5, 12]: a frozen model behind learned vectors and a small bottleneck."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT(12, 8, 4, 12, 8).requires_grad_(False)
        self.prefix = nn.Parameter(torch.randn(3, 8))
        self.down, self.up = nn.Linear(8, 3), nn.Linear(3, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.cat([self.prefix.expand(tokens.shape[0], -1, -1), self.model.embed(tokens)], dim=1)
        x = x + self.model.position
        for block in self.model.blocks:
            x = block(x)
            x = x + self.up(torch.tanh(self.down(x)))
        return self.model.head(self.model.norm(x[:, 3:]))


class Detector(nn.Module):
    """[batch, 1, 8, 8] -> a class and a box at 16 places of two scales, with losses by the number of objects."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 5, 3, stride=2, padding=1)
        self.lower = nn.Conv2d(5, 6, 3, stride=2, padding=1)
        self.lateral = nn.Conv2d(5, 6, 1)
        self.classes = nn.Conv2d(6, 3, 3, padding=1)
        self.boxes = nn.Conv2d(6, 4, 3, padding=1)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        stem = F.silu(self.stem(batch["x"]))
        lower = F.silu(self.lower(stem))
        upper = self.lateral(stem) + F.interpolate(lower, scale_factor=2, mode="nearest")
        classes = torch.cat([self.classes(each).flatten(2) for each in (upper, lower)], dim=2).transpose(1, 2)
        boxes = torch.cat([self.boxes(each).flatten(2) for each in (upper, lower)], dim=2).transpose(1, 2)
        is_object = batch["y"] > 0
        wanted = F.one_hot(batch["y"], 4)[..., 1:].to(classes.dtype)
        chance = torch.sigmoid(classes)
        missed = wanted * (1 - chance) + (1 - wanted) * chance
        focal = F.binary_cross_entropy_with_logits(classes, wanted, reduction="none") * missed**2
        box = F.smooth_l1_loss(boxes, batch["boxes"], reduction="none").sum(-1) * is_object
        return focal.sum() + box.sum(), is_object.sum() + 1


class SetPredictor(nn.Module):
    """[batch, 6, 5] features -> 3 objects each: queries attend to them, matched to the nearest of 3 boxes in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 8)
        self.queries = nn.Parameter(torch.randn(3, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.box = nn.Linear(8, 4)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.enter(batch["x"])
        queries = self.queries.expand(x.shape[0], -1, -1)
        found = self.norm(queries + self.attention(queries, x, x, need_weights=False)[0])
        corners = torch.sigmoid(self.box(found))
        costs = torch.cdist(corners, batch["boxes"], p=1)
        with torch.no_grad():
            match = costs.argmin(-1)
        wanted = torch.gather(batch["boxes"], 1, match.unsqueeze(-1).expand(-1, -1, 4))
        inner = torch.minimum(corners, wanted).clamp(min=0).sum(-1)
        outer = torch.maximum(corners, wanted).sum(-1)
        return (F.l1_loss(corners, wanted, reduction="none").sum(-1) + 1 - inner / outer).mean()


class Points(nn.Module):
    """[batch, 7, 3] points -> [batch, 4]: each by itself, then the maximum of all; an alignment that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.align = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 9))
        self.each = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 11))
        self.head = nn.Linear(11, 4)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        turn = torch.eye(3, dtype=x.dtype) + self.align(x).mean(1).unflatten(-1, (3, 3))
        found = self.head(self.each(torch.bmm(x, turn)).amax(dim=1))
        unturned = torch.bmm(turn, turn.transpose(1, 2)) - torch.eye(3, dtype=x.dtype)
        return F.cross_entropy(found, batch["y"]) + 0.01 * unturned.square().sum((1, 2)).mean()


class Triplets(nn.Module):
    """Three of [batch, 6]: one tower for all, and a margin between the distances."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(6, 9), nn.SELU(), nn.Linear(9, 9), nn.SELU(), nn.Linear(9, 5))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        one, near, far = (self.tower(batch[name]) for name in ("x", "near", "far"))
        listwise = -F.log_softmax(torch.stack([(one * near).sum(-1), (one * far).sum(-1)], dim=1), dim=1)[
            :, 0
        ]
        return F.triplet_margin_loss(one, near, far, margin=3.0) + listwise.mean()


def scenes(count: int) -> Samples:
    return Samples(x=normal(90, count, 1, 9, 9), texts=whole(91, 15, count, 3, 4), y=whole(92, 3, count))


def translations(count: int) -> Samples:
    targets = whole(94, 18, count, 5)
    lengths = whole(95, 4, count, 1) + 1
    return Samples(
        source=whole(93, 18, count, 5),
        x=targets[:, :-1],
        y=targets[:, 1:].masked_fill(torch.arange(4) >= lengths, -100),
    )


def small_images(count: int) -> Samples:
    return Samples(x=normal(96, count, 2, 6, 6), y=whole(97, 5, count))


def objects(count: int) -> Samples:
    classes = (whole(99, 8, count, 20) - 4).clamp(min=0)
    return Samples(x=normal(98, count, 1, 8, 8), y=classes, boxes=normal(100, count, 20, 4))


def sets(count: int) -> Samples:
    return Samples(x=normal(101, count, 6, 5), boxes=torch.sigmoid(normal(102, count, 3, 4)))


def clouds(count: int) -> Samples:
    return Samples(x=normal(103, count, 7, 3), y=whole(104, 4, count))


def triplets(count: int) -> Samples:
    return Samples(x=normal(105, count, 6), near=normal(106, count, 6), far=normal(107, count, 6))


SEVERAL = [
    Model(
        name="towers",
        features="two towers, learned temperature",
        build=Towers,
        loss=own_loss,
        samples=scenes,
        stages=2,
    ),
    Model(
        name="translator",
        features="encoder and decoder, three tied embeddings",
        build=Translator,
        loss=own_loss,
        samples=translations,
        cut="decoder.0",
    ),
    Model(
        name="vit",
        interacts=True,
        features="patches, a token of the class, dropout",
        build=ViT,
        loss=own_loss,
        samples=small_images,
        chunk=2,
        cut="blocks.1",
    ),
    Model(
        name="lora",
        interacts=True,
        features="adapters of packed projections, frozen weights",
        build=lora_gpt,
        loss=next_token,
        samples=texts(14, 6, seed=108),
        cut="blocks.1",
    ),
    Model(
        name="prefix",
        features="learned prefix, a bottleneck used twice; batch = vocabulary / 3",
        build=Prefix,
        loss=next_token,
        samples=texts(12, 5, seed=109),
        chunk=4,
        stages=2,
    ),
    Model(
        name="detector",
        interacts=True,
        features="two scales, focal loss by the number of objects",
        build=Detector,
        loss=own_loss,
        samples=objects,
        chunk=2,
        stages=2,
    ),
    Model(
        name="set_predictor",
        features="queries, matching",
        build=SetPredictor,
        loss=own_loss,
        samples=sets,
        stages=1,
    ),
    Model(
        name="points",
        features="maximum of points, alignment",
        build=Points,
        loss=own_loss,
        samples=clouds,
        stages=2,
    ),
    Model(
        name="triplets",
        features="one tower thrice, margins",
        build=Triplets,
        loss=own_loss,
        samples=triplets,
        chunk=2,
        stages=1,
    ),
]
