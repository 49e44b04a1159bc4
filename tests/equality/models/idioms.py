"""Models as people write them: hooks, replaced forwards, parametrizations, leaves, checkpoints, records, gradients of
parameters, matrix factors, sorting."""

from __future__ import annotations

import types
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import meshloom as ml
from tests.equality.model import Model, Samples, normal, whole
from tests.equality.models.dense import classify, own_loss, vectors


def adapt(adapter: nn.Module, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """A hook: adds what an adapter makes of a layer's output."""
    return output + adapter(output)


class Hooked(nn.Module):
    """[batch, 7] -> [batch, 5]: adapters by hooks on a frozen trunk, a hook before one of its layers and one that keeps an output, a
    forward replaced on its instance."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh()).requires_grad_(
            False
        )
        self.adapters = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 3), nn.GELU(), nn.Linear(3, 12)) for _ in range(2)
        )
        self.head = nn.Linear(12, 5)
        self.kept: dict[str, Tensor] = {}
        for layer, adapter in zip((self.trunk[0], self.trunk[2]), self.adapters, strict=True):
            layer.register_forward_hook(partial(adapt, adapter))
        self.trunk[0].register_forward_pre_hook(lambda layer, inputs: (inputs[0] * 2,))
        self.trunk[3].register_forward_hook(self.keep)
        self.head.forward = types.MethodType(self.rolled, self.head)

    def keep(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        self.kept["last"] = output

    @staticmethod
    def rolled(layer: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x, layer.weight + 0.1 * layer.weight.roll(1, 0), layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


def with_kept(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Looks at what the hook kept."""
    return classify(model, batch) + 0.1 * model.kept["last"].square().mean()


class LowRank(nn.Module):
    """A weight, and the product of two small matrices on top."""

    def __init__(self, out: int, into: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(0.3 * torch.randn(2, into)), nn.Parameter(0.1 * torch.randn(out, 2))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


class Symmetric(nn.Module):
    """[n, n] -> its upper triangle on both sides."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


class Turned(nn.Module):
    """[n, n] -> a rotation."""

    def forward(self, weight: Tensor) -> Tensor:
        return torch.linalg.matrix_exp(weight.triu(1) - weight.triu(1).T)


def parametrized() -> nn.Module:
    """[batch, 7] -> [batch, 5]: parametrizations of frozen weights, two on one, and of a trained one; one is pruned."""
    model = nn.Sequential(
        nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 5)
    )
    for layer in (model[0], model[2]):
        layer.requires_grad_(False)
        parametrize.register_parametrization(layer, "weight", LowRank(*layer.weight.shape))
    parametrize.register_parametrization(model[2], "weight", Symmetric())
    parametrize.register_parametrization(model[4], "weight", Turned())
    prune.l1_unstructured(model[6], "weight", amount=0.4)
    return model


class Rounded(torch.autograd.Function):
    """Rounds; gradients pass where it is small."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * (x.abs() < 1)


class Sifted(nn.Module):
    """[batch, length, 8] -> the same: rows whose score is high are read once more; which they are is known from values alone."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.more = nn.Linear(8, 1), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        at = (self.score(x).squeeze(-1) > 0).nonzero(as_tuple=True)
        return x.index_put(at, Rounded.apply(self.more(x[at])) + self.score(x[at]), accumulate=True)


@ml.leaf
def read(layers: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    """[batch, length, width] as far as the lengths."""
    packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(layers(packed)[0], batch_first=True, total_length=x.shape[1])[0]


class AsWritten(nn.Module):
    """Tokens [batch, 5] and lengths: a module that is a leaf because it cannot be captured, and a function that is marked as one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.enter = nn.Embedding(13, 8), nn.Linear(8, 8)
        self.sifted = Sifted()
        self.layers = nn.GRU(8, 8, batch_first=True)
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.sifted(torch.tanh(self.enter(self.embed(batch["x"]))))
        x = x + read(self.layers, x, batch["lengths"])
        x = x + self.down(F.gelu(self.up(x)))
        return F.cross_entropy((x @ self.embed.weight.T)[:, :-1].flatten(0, 1), batch["x"][:, 1:].flatten())


class Rerun(nn.Module):
    """[batch, 7] -> [batch, 5]: blocks with dropout that torch's own checkpoints run again, of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(7, 9), nn.Linear(9, 5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(9, 13), nn.Dropout(0.2), nn.GELU(), nn.Linear(13, 9)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for number, block in enumerate(self.blocks):
            x = x + checkpoint(block, x, use_reentrant=number == 1)
        return self.head(x)


def warmed(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """A penalty grows with the number of the step."""
    found = model(batch["x"])
    return F.cross_entropy(found, batch["y"]) + min(1.0, ml.step() / 4) * found.logsumexp(-1).square().mean()


@dataclass
class Told:
    """What a game of messages comes to."""

    scores: Tensor
    symbols: list[Tensor]
    extra: dict[str, Tensor]


class Messages(nn.Module):
    """[batch, 6] -> a guess of 4: one cell tells three symbols, drawn and passed straight through, and another one reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleDict({"tell": nn.LSTMCell(7, 10), "read": nn.GRUCell(7, 9)})
        self.enter, self.symbol, self.head = nn.Linear(6, 10), nn.Linear(10, 7), nn.Linear(9, 4)
        self.tables = nn.ParameterList([0.5 * torch.randn(7, 7) for _ in range(3)])
        self.scales = nn.ParameterDict({"score": nn.Parameter(torch.ones(4))})

    def forward(self, x: Tensor) -> Told:
        told, kept = (torch.tanh(self.enter(x)), x.new_zeros(len(x), 10)), list[Tensor]()
        symbol, found = x.new_zeros(len(x), 7), x.new_zeros(len(x), 9)
        for table in self.tables:
            told = self.cells["tell"](symbol, told)
            symbol = F.gumbel_softmax(self.symbol(told[0]), tau=0.8, hard=True)
            kept.append(symbol)
            found = self.cells["read"](symbol @ table, found)
        scores = self.head(found) * self.scales["score"]
        return Told(scores=scores, symbols=kept, extra={"use": torch.stack(kept).mean((0, 1))})


def guess(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Symbols should all be used."""
    told = model(batch["x"])
    use = told.extra["use"] + 1e-3
    return F.cross_entropy(told.scores, batch["y"]) + 0.1 * (use * use.log()).sum()


class Curve(nn.Module):
    """[points, 1] -> [points, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def learn_to_learn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Each sample is a task, with parameters of its own after two steps of descent, through which gradients pass."""

    def error(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(functional_call(model, parameters, (x,)), y)

    def after(x: Tensor, y: Tensor, later: Tensor, wanted: Tensor) -> Tensor:
        own: dict[str, Tensor] = dict(model.named_parameters())
        for _ in range(2):
            gradients = torch.func.grad(error)(own, x, y)
            own = {name: each - 0.1 * gradients[name] for name, each in own.items()}
        return error(own, later, wanted)

    return torch.func.vmap(after)(batch["x"], batch["y"], batch["later"], batch["wanted"]).mean()


class Process(nn.Module):
    """Six points [batch, 6, 4] and their values: the likelihood under a Gaussian process of learned features."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(4, 11), nn.Tanh(), nn.Linear(11, 5))
        self.log_scale, self.log_noise = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.tensor(-1.0))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.features(batch["x"]) * self.log_scale.exp()
        kernel = torch.exp(-0.5 * (x[:, :, None] - x[:, None]).square().sum(-1))
        kernel = kernel + self.log_noise.exp() * torch.eye(6, dtype=x.dtype)
        chances = torch.distributions.MultivariateNormal(
            torch.zeros_like(batch["y"]), covariance_matrix=kernel
        )
        volume = torch.linalg.slogdet(x.transpose(1, 2) @ x + torch.eye(5, dtype=x.dtype))[1]
        return (0.01 * volume - chances.log_prob(batch["y"])).mean()


class Sorted(nn.Module):
    """[batch, 6, 3] and a picture: rows drawn by a shuffle, their nearest neighbours, sums by index, in place; what is read of a picture
    where they point."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.token = nn.Linear(3, 8), nn.Parameter(torch.zeros(8))
        self.pair, self.point, self.head = nn.Linear(16, 8), nn.Linear(8, 2), nn.Linear(8, 3)
        self.picture = nn.Conv2d(1, 8, 3, padding=1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        h = self.embed(batch["x"])
        count, length, width = h.shape
        order = torch.rand(count, length).argsort(1)
        kept = h.gather(1, order[:, :3, None].expand(-1, -1, width))
        near = torch.cdist(kept, kept).topk(2, largest=False).indices.flatten(1)
        other = kept.gather(1, near[:, :, None].expand(-1, -1, width)).unflatten(1, (3, 2))
        edges = F.gelu(self.pair(torch.cat([other, kept[:, :, None].expand_as(other)], dim=-1))).amax(2)
        kept = (
            torch.zeros_like(kept).scatter_add_(1, near[:, ::2, None].expand(-1, -1, width), edges).add_(kept)
        )
        back = torch.cat([kept, self.token.expand(count, length - 3, width)], dim=1)
        h = back.gather(1, order.argsort(1)[:, :, None].expand(-1, -1, width)) + h.sort(1).values
        seen = F.grid_sample(
            self.picture(batch["picture"]), torch.tanh(self.point(h))[:, :, None], align_corners=False
        )
        return F.l1_loss(self.head(h + seen.squeeze(-1).transpose(1, 2)), batch["x"])


def sentences(count: int) -> Samples:
    return Samples(x=whole(130, 13, count, 5), lengths=whole(131, 5, count) + 1)


def curves(count: int) -> Samples:
    return Samples(
        **{name: normal(132 + seed, count, 4, 1) for seed, name in enumerate(("x", "y", "later", "wanted"))}
    )


def fields(count: int) -> Samples:
    return Samples(x=normal(136, count, 6, 4), y=normal(137, count, 6))


def pointed(count: int) -> Samples:
    return Samples(x=normal(138, count, 6, 3), picture=normal(139, count, 1, 5, 5))


IDIOMS = [
    Model(
        name="hooked",
        features="adapters by hooks on frozen layers, an output that a hook keeps, a replaced forward",
        build=Hooked,
        loss=with_kept,
        samples=vectors(7, 5, seed=140),
        stages=2,
    ),
    Model(
        name="parametrized",
        features="parametrizations over frozen weights, a matrix exponential, pruning",
        build=parametrized,
        loss=classify,
        samples=vectors(7, 5, seed=141),
        stages=2,
        computed=True,
    ),
    Model(
        name="as_written",
        features="a leaf that is found, with a backward of its own; a marked function",
        build=AsWritten,
        loss=own_loss,
        samples=sentences,
        stages=2,
    ),
    Model(
        name="rerun",
        interacts=True,
        features="torch's own checkpoints, dropout in them, the number of the step",
        build=Rerun,
        loss=warmed,
        samples=vectors(7, 5, seed=142),
        stages=2,
    ),
    Model(
        name="messages",
        interacts=True,
        features="cells in a loop, drawn symbols, a record as output, lists and dicts of parameters",
        build=Messages,
        loss=guess,
        samples=vectors(6, 4, seed=143),
        stages=2,
    ),
    Model(
        name="meta_learner",
        features="gradients of parameters in the loss, tasks by vmap",
        build=Curve,
        loss=learn_to_learn,
        samples=curves,
        stages=1,
    ),
    Model(
        name="process",
        features="Cholesky factors, determinants, distributions",
        build=Process,
        loss=own_loss,
        samples=fields,
        stages=2,
    ),
    Model(
        name="sorted",
        interacts=True,
        features="shuffles, neighbours, sums by index, sampling of pictures",
        build=Sorted,
        loss=own_loss,
        samples=pointed,
        stages=1,
    ),
]
