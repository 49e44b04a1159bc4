"""Modules of a script whose forwards are divided over tp: the loop of one device, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.errors import CaptureError, TrainingError
from meshloom.core.plan import Plan
from meshloom.launch.opening import open_world
from meshloom.loops import taken_shares
from meshloom.loops.divided_module import DividedModule
from meshloom.loops.part_tensor import plain, whole_tensor
from meshloom.loops.pipelined_module import PipelinedModule
from meshloom.loops.ranks import LoopRanks
from meshloom.loops.taken_shares import TakenShare, share_sizes

pytestmark = pytest.mark.long
Call = Callable[..., Any]
Script = Callable[[list[nn.Module], list[Call], int], Any]
EXACT = 1e-13  # float64; sums over two ranks have another order


class Heads(nn.Module):
    """Two results, a loss inside where labels are given, and what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(11, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32))
        self.one, self.other = nn.Linear(32, 7), nn.Linear(32, 5)
        self.scale = 1.0

    def forward(self, x: Tensor, *, labels: Tensor | None = None) -> dict[str, Any]:
        h = self.body(x)
        found: dict[str, Any] = {"logits": self.one(h) * self.scale, "pair": (self.other(h), None, "text")}
        if labels is not None:
            found["loss"] = F.cross_entropy(found["logits"], labels)
        return found


class Language(nn.Module):
    """A block of a transformer, its embedding tied to its head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, 32), nn.Embedding(12, 32)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(3))
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down, self.drop = nn.Linear(32, 128), nn.Linear(128, 32), nn.Dropout(dropout)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        b, t = tokens.shape
        h = self.tokens(tokens) + self.places.weight[:t]
        q, k, v = (
            each.view(b, t, 4, 8).transpose(1, 2) for each in self.qkv(self.norms[0](h)).split(32, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, 32)
        h = h + self.drop(self.out(y))
        h = h + self.drop(self.down(F.gelu(self.up(self.norms[1](h)))))
        return self.head(self.norms[2](h))


class Timed(nn.Module):
    """Time first: `x` is (time, batch, 8), the mask (time, time); without one, what came before is added up."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.one(x))
        h = h.cumsum(0) if mask is None else torch.einsum("ts,sbd->tbd", mask, h)
        y = self.other(h)
        return (y if mask is None else y.transpose(0, 1)), y.square().mean()


def _kind(plan: Plan) -> type[DividedModule]:
    return PipelinedModule if plan.pp > 1 else DividedModule


def on_ranks(plan: str, make: Callable[[], list[nn.Module]], script: Script, **given: Any) -> list[Any]:
    """For each rank: what the script returns, and of each module this rank's elements and the whole state."""
    parsed = Plan.parse(plan)
    with open_world(parsed.mesh, "simulated") as world:

        def of_rank(own: Any) -> Any:
            models = make()
            known = [id(each) for model in models for each in model.parameters()]
            divided = [_kind(parsed)(each, LoopRanks(parsed, world, own), **given) for each in models]
            calls = [
                lambda *args, each=each, model=model, **kwargs: each.call(model.__call__, args, kwargs)
                for each, model in zip(divided, models, strict=True)
            ]
            returned = script(models, calls, own.place.dp)
            assert known == [id(each) for model in models for each in model.parameters()]
            elements = [sum(plain(each.detach()).numel() for each in model.parameters()) for model in models]
            states = [{name: gather().clone() for name, gather in each.tensors()} for each in divided]
            with divided[0].whole():
                grads = {
                    name: each.grad.clone()
                    for name, each in models[0].named_parameters()
                    if each.grad is not None
                }
            return returned, elements, states, grads

        return world.turns.run([lambda own=own: of_rank(own) for own in world.local])


def check(plan: str, make: Callable[[], list[nn.Module]], script: Script, **given: Any) -> None:
    """Every rank of the plan has what one device has, and at most its share of the parameters."""
    models = make()
    expected = script(models, [each.__call__ for each in models], 0)
    for returned, elements, states, grads in on_ranks(plan, make, script, **given):
        torch.testing.assert_close(returned, expected, rtol=EXACT, atol=EXACT)
        for model, mine, state in zip(models, elements, states, strict=True):
            whole = sum(each.numel() for each in model.parameters())
            print(f"{type(model).__name__}: {mine} of {whole} elements on a rank of {plan}")
            limit = 0.6 if "pp" not in plan else 0.97  # stages are cut by seconds
            assert mine <= (limit if "zero" not in plan else 0.05 + limit / 2) * whole
            torch.testing.assert_close(state, dict(model.state_dict()), rtol=EXACT, atol=EXACT)
        own = {name: each.grad for name, each in models[0].named_parameters() if each.grad is not None}
        torch.testing.assert_close(grads, own, rtol=EXACT, atol=EXACT)


def seeded(make: Callable[[], Any]) -> Callable[[], Any]:
    def made() -> list[nn.Module]:
        torch.manual_seed(0)
        return [each.double() for each in make()]

    return made


@pytest.fixture(autouse=True)
def _no_shares() -> Iterator[None]:
    yield
    taken_shares._RECENT.clear()  # pyright: ignore[reportPrivateUsage]
    taken_shares._BOUND.clear()  # pyright: ignore[reportPrivateUsage]


class Lambda(nn.Module):
    """A function over its layers, as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 64), nn.Linear(64, 6)])
        up, down = self.layers
        self.both = lambda x: down(torch.tanh(up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.both(x)


@pytest.mark.parametrize("plan", ["tp=2,tp_placements=*.layers.0:column+*.layers.1:row", "pp=2"])
def test_a_function_that_a_module_holds_sees_what_is_captured(plan: str) -> None:
    def script(models: list[nn.Module], calls: list[Call], replica: int) -> Any:
        (model,), (call,) = models, calls
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        draws = torch.Generator().manual_seed(1)
        for size in (4, 6):
            optimizer.zero_grad()
            call(torch.randn(size, 6, generator=draws, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
        return call(torch.ones(4, 6, dtype=torch.float64)).detach()

    check(plan, seeded(lambda: [nn.Sequential(Lambda(), Lambda())]), script)


@pytest.mark.parametrize("plan", ["tp=2", "pp=2"])
def test_on_whole_parameters_a_module_runs_as_written(plan: str) -> None:
    parsed, x = Plan.parse(plan), torch.randn(4, 6, dtype=torch.float64)
    with open_world(parsed.mesh, "simulated") as world:

        def of_rank(own: Any) -> tuple[Tensor, Tensor]:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
            divided = _kind(parsed)(model, LoopRanks(parsed, world, own))
            expected = divided.call(model.__call__, (x,), {})
            with divided.whole():
                return expected, divided.call(model.__call__, (x,), {})

        for expected, found in world.turns.run([lambda own=own: of_rank(own) for own in world.local]):
            torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param("tp=2", marks=pytest.mark.slow),
        "pp=2,microbatches=3",
        "dp=2,tp=2,zero=1",
        pytest.param("pp=2,tp=2,microbatches=2", marks=pytest.mark.slow),
        pytest.param("dp=2,pp=2,zero=2,microbatches=3", marks=pytest.mark.slow),
        pytest.param("dp=2,pp=2,tp=2,zero=1,microbatches=2", marks=pytest.mark.slow),
    ],
)
def test_two_results_and_a_loss_inside(plan: str) -> None:
    def script(models: list[nn.Module], calls: list[Call], replica: int) -> Any:
        (model,), (call,) = models, calls
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # made before anything is divided
        draws, found = torch.Generator().manual_seed(1), []
        with torch.inference_mode():  # the first call
            x = torch.ones(4, 11).double()
            found.append(call(x)["logits"].clone())
        for step in range(2):
            count = 8 + 2 * step
            x, y = (
                torch.randn(count, 11, generator=draws).double(),
                torch.randint(0, 7, (count,), generator=draws),
            )
            out = call(x, labels=y)
            assert out["pair"][1:] == (None, "text")
            loss = (
                out["loss"]
                + out["pair"][0].square().mean()
                + F.cross_entropy(out["logits"], y, label_smoothing=0.1)
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                seen = call(x)["logits"]
            found += [loss.detach(), seen]
        model.eval()
        found.append(call(x)["logits"].detach())
        return found

    check(plan, seeded(lambda: [Heads()]), script)


@pytest.mark.parametrize("plan", ["tp=2", "pp=2,microbatches=2"])
def test_models_of_which_one_reads_the_other(plan: str) -> None:
    """A gradient goes back through the inputs, and running statistics follow."""

    def make() -> list[nn.Module]:
        norm = nn.BatchNorm1d(64) if plan == "tp=2" else nn.LayerNorm(64)  # statistics are of microbatches
        return [
            nn.Sequential(nn.Linear(9, 64), nn.Tanh(), nn.Linear(64, 12)),
            nn.Sequential(nn.Linear(12, 64), norm, nn.Tanh(), nn.Linear(64, 1)),
        ]

    def script(models: list[nn.Module], calls: list[Call], replica: int) -> Any:
        made, judged = (torch.optim.SGD(each.parameters(), lr=0.5) for each in models)
        generator, judge = calls
        draws, found = torch.Generator().manual_seed(1), []
        for _ in range(2):
            real, noise = (torch.randn(8, width, generator=draws).double() for width in (12, 9))
            fake = generator(noise)
            judged.zero_grad()
            first = F.softplus(-judge(real)).mean()
            first.backward()
            second = F.softplus(judge(fake.detach())).mean()
            second.backward()
            judged.step()
            made.zero_grad()
            third = F.softplus(-judge(fake)).mean()
            third.backward()
            made.step()
            found += [first.detach(), second.detach(), third.detach()]
        return found

    check(plan, seeded(make), script)


@pytest.mark.parametrize(
    "plan",
    ["tp=2", "pp=2,microbatches=2", "dp=2,tp=2,zero=2", pytest.param("dp=2,pp=2,zero=1,microbatches=2", marks=pytest.mark.slow)],
)  # fmt: skip
def test_tied_weights_and_several_calls_before_a_backward(plan: str) -> None:
    def script(models: list[nn.Module], calls: list[Call], replica: int) -> Any:
        (model,), (call,) = models, calls
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        draws, found = torch.Generator().manual_seed(1), []
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(2):  # gradients accumulate
                tokens = torch.randint(0, 50, (3, 9), generator=draws)
                one, two = call(tokens), call(tokens.flip(0))
                loss = (
                    F.cross_entropy(one[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) + two.square().mean()
                )
                loss.backward()
                found.append(loss.detach())
            optimizer.step()
        return found

    check(plan, seeded(lambda: [Language()]), script)


def test_a_penalty_on_the_gradient_of_an_input() -> None:
    def script(models: list[nn.Module], calls: list[Call], replica: int) -> Any:
        optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1)
        draws, found = torch.Generator().manual_seed(1), []
        for _ in range(2):
            x = torch.randn(8, 12, generator=draws).double().requires_grad_()
            (gradient,) = torch.autograd.grad(calls[0](x).sum(), x, create_graph=True)
            optimizer.zero_grad()
            loss = (gradient.norm(dim=1) - 1).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        return found

    make = seeded(
        lambda: [
            nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 1))
        ]
    )
    check("tp=2", make, script)
    with pytest.raises(TrainingError, match="create_graph=True.*dp and zero"):
        on_ranks("pp=2,microbatches=2", make, script)


@pytest.mark.parametrize(
    "plan",
    [
        "dp=2,tp=2",
        "dp=2,pp=2,microbatches=2",
        "dp=2,tp=2,zero=1",
        "dp=2,pp=2,microbatches=2,zero=2",
        pytest.param("dp=3,pp=2,tp=2,zero=1", marks=pytest.mark.slow),
    ],
)
def test_replicas_with_uneven_shares(plan: str) -> None:
    """The second batch has a shape that one replica has captured, and another one has not."""

    def script(models: list[nn.Module], calls: list[Call], replica: int) -> Any:
        (model,), (call,) = models, calls
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        draws = torch.Generator().manual_seed(1)
        for samples in (7, 6):
            sizes = share_sizes(samples, Plan.parse(plan).dp)
            x = torch.randn(samples, 11, generator=draws).double()
            y = torch.randint(0, 7, (samples,), generator=draws)
            if call != model.__call__:
                share = TakenShare(sizes, replica)
                taken_shares.took(share)
                x, y = (each[share.start : share.start + share.rows] for each in (x, y))
            optimizer.zero_grad()
            F.cross_entropy(call(x)["logits"], y).backward()
            optimizer.step()
        return []

    check(plan, seeded(lambda: [Heads()]), script)


@pytest.mark.parametrize(
    "plan", ["dp=2,tp=2,zero=1", "dp=2,pp=2,zero=2", pytest.param("pp=2,tp=2", marks=pytest.mark.slow)]
)
def test_penalties_clipping_and_states(plan: str) -> None:
    """Several ranks hold the same elements, which count once, and each of them has the gradient of what they count in."""

    def script(models: list[nn.Module], calls: list[Call], replica: int) -> Any:
        (model,), (call,) = models, calls
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        draws, found = torch.Generator().manual_seed(1), []
        for step in range(3):
            loss = call(torch.randn(8, 11, generator=draws).double())["logits"].square().mean()
            penalty = sum(each.pow(2).sum() + each.norm() + each.abs().mean() for each in model.parameters())
            optimizer.zero_grad()
            (loss + 1e-2 * penalty).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            found += [loss.detach(), norm.detach()]
            if step == 0:  # whole states, loaded again
                state = optimizer.state_dict()
                state["state"] = {
                    key: {name: whole_tensor(each) for name, each in of.items()}
                    for key, of in state["state"].items()
                }
                optimizer.load_state_dict(state)
        for each, state in optimizer.state.items():
            assert plain(state["exp_avg"]).numel() == plain(each.detach()).numel()
            found += [whole_tensor(state["exp_avg_sq"])]
        return found

    check(plan, seeded(lambda: [Heads()]), script)


def test_draws_are_alike_in_a_replica_and_others_in_each_call() -> None:
    def script(models: list[nn.Module], calls: list[Call], replica: int) -> Any:
        tokens = torch.arange(27).view(3, 9)
        return [calls[0](tokens).detach() for _ in range(2)]

    first, second = (found for found, *_ in on_ranks("tp=2", seeded(lambda: [Language(dropout=0.3)]), script))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert not torch.equal(first[0], first[1])


def test_changed_attributes_and_frozen_parameters() -> None:
    def script(models: list[nn.Module], calls: list[Call], replica: int) -> Any:
        (model,), (call,) = models, calls
        x = torch.randn(8, 11, generator=torch.Generator().manual_seed(1)).double()
        found = [call(x)["logits"].detach()]
        model.scale = 3.0  # pyright: ignore[reportArgumentType]
        found.append(call(x)["logits"].detach())
        model.body.requires_grad_(False)  # pyright: ignore[reportAttributeAccessIssue]
        loss = call(x)["logits"].square().mean()
        loss.backward()
        model.body.requires_grad_(True)  # pyright: ignore[reportAttributeAccessIssue]
        for each in model.parameters():
            each.grad = each.grad if each.grad is not None else torch.zeros_like(each)
        return found

    check("tp=2", seeded(lambda: [Heads()]), script)


def test_autocast_around_a_call() -> None:
    def script(models: list[nn.Module], calls: list[Call], replica: int) -> Any:
        x = torch.randn(8, 11, generator=torch.Generator().manual_seed(1))
        with torch.autocast("cpu", torch.bfloat16):
            low = calls[0](x)["logits"]
        models[0].zero_grad()
        low.float().square().mean().backward()
        return low.detach(), calls[0](x)["logits"].detach()

    def make() -> list[nn.Module]:
        torch.manual_seed(0)
        return [Heads()]

    models = make()
    expected = script(models, [models[0].__call__], 0)
    for (low, high), *_, grads in on_ranks("tp=2", make, script):
        assert low.dtype == torch.bfloat16
        torch.testing.assert_close(low, expected[0], rtol=1.6e-2, atol=1e-2)  # sums in another order
        torch.testing.assert_close(high, expected[1])
        torch.testing.assert_close(
            grads["one.weight"], models[0].get_parameter("one.weight").grad, rtol=2e-2, atol=1e-3
        )


def test_what_is_refused_names_the_ways_out() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return self.one(x) if x.sum() > 0 else x

    class Odd(Branches):
        def forward(self, x: Tensor) -> Any:
            return {1, 2}

    for kind, sentence in (
        (Branches, "depends on the values .*@ml.leaf.*dp and zero"),
        (Odd, "returns a set.*dp and zero"),
    ):
        with pytest.raises(CaptureError, match=sentence):
            on_ranks(
                "tp=2",
                seeded(lambda kind=kind: [kind()]),
                lambda models, calls, replica: calls[0](torch.ones(2, 4).double()),
            )


def test_leaves_run_as_written() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Linear(11, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.rows(x) * (2.0 if float(x.detach().sum()) > 0 else math.pi)

    def script(models: list[nn.Module], calls: list[Call], replica: int) -> Any:
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).double()
        loss = calls[0](x).square().mean()
        loss.backward()
        return loss.detach()

    make = seeded(lambda: [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 11), Halves())])
    check("tp=2", make, script, leaves=["3"])


def test_a_batch_that_is_not_dim_0_and_a_result_without_one() -> None:
    def script(models: list[nn.Module], calls: list[Call], replica: int) -> Any:
        draws = torch.Generator().manual_seed(1)
        x, mask = (
            torch.randn(6, 5, 8, generator=draws).double(),
            torch.randn(6, 6, generator=draws).double().tril(),
        )
        x.requires_grad_()
        rows, mean = calls[0](x, mask)
        (rows.exp().mean() + mean).backward()
        return rows.detach(), mean.detach(), x.grad

    check("pp=2,microbatches=2", seeded(lambda: [Timed()]), script, batch={"x": 1, "mask": None})
    refused: list[tuple[Script, dict[str, Any], str]] = [
        (script, {"x": 1}, "x has 5 rows along dim 1 and mask has 6"),
        (script, {}, "the forward fails for 3 of its 6 rows"),
        (
            lambda models, calls, replica: calls[0](torch.ones(6, 5, 8).double()),
            {},
            "rows depend on each other",
        ),
    ]
    for each, batch, sentence in refused:
        with pytest.raises(CaptureError, match=rf"{sentence}.*batch=.*microbatches=1"):
            on_ranks("pp=2,microbatches=2", seeded(lambda: [Timed()]), each, batch=batch)


class Penalized(nn.Module):
    """It leaves a penalty for the loss, and keeps a table that it makes once."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 64), nn.Linear(64, 64)
        self.penalty, self.table = torch.zeros(()), None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) != x.shape[1]:
            self.table = torch.arange(x.shape[1], dtype=x.dtype)
        hidden = torch.tanh(self.one(x + self.table))
        self.penalty = hidden.square().mean()
        return self.other(hidden)


@pytest.mark.parametrize("plan", ["tp=2", "pp=2"])
def test_what_a_forward_leaves_on_its_module_is_not_there(plan: str) -> None:
    x = torch.randn(4, 6, dtype=torch.float64)

    def reads(models: list[nn.Module], calls: list[Call], replica: int) -> Any:
        loss = calls[0](x).square().mean() + calls[0](x[:2]).mean()
        return (loss + models[0].penalty).detach()

    with pytest.raises(TrainingError, match=r"Penalized.penalty is set by the forward"):
        on_ranks(plan, seeded(lambda: [Penalized()]), reads)
    check(plan, seeded(lambda: [Penalized()]), lambda models, calls, replica: calls[0](x).detach())


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.drop = nn.Linear(6, 64), nn.Linear(64, 64), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x)
        return self.other(self.drop(hidden + torch.randn_like(hidden)))


@pytest.mark.parametrize("plan", ["tp=2", "pp=2,microbatches=2"])
def test_a_call_draws_nothing_that_the_script_would(plan: str) -> None:
    def script(models: list[nn.Module], calls: list[Call], replica: int) -> bool:
        before = torch.get_rng_state()
        calls[0](torch.ones(4, 6, dtype=torch.float64)).sum().backward()
        return torch.equal(before, torch.get_rng_state())

    assert all(same for same, *_ in on_ranks(plan, seeded(lambda: [Drawing()]), script))


def test_a_sparse_input_is_refused() -> None:
    sparse = torch.eye(4, 6, dtype=torch.float64).to_sparse()
    with pytest.raises(CaptureError, match="is given a sparse tensor"):
        on_ranks(
            "tp=2",
            seeded(lambda: [nn.Sequential(nn.Linear(6, 2))]),
            lambda models, calls, replica: calls[0](sparse),
        )


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("plan", ["tp=2", "pp=2"])
def test_a_weight_that_is_computed_when_the_module_is_made_is_refused_with_the_way_out(plan: str) -> None:
    def normed(norm: Callable[..., nn.Module]) -> Callable[[], list[nn.Module]]:
        return seeded(lambda: [nn.Sequential(norm(nn.Linear(6, 64)), nn.Tanh(), norm(nn.Linear(64, 64)))])

    def script(models: list[nn.Module], calls: list[Call], replica: int) -> Any:
        results = calls[0](torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6))
        results.square().mean().backward()
        return results.detach()

    with pytest.raises(
        CaptureError, match=r"0.weight is a tensor that .* Use torch.nn.utils.parametrizations"
    ):
        on_ranks(plan, normed(nn.utils.weight_norm), script)
    check(plan, normed(nn.utils.parametrizations.weight_norm), script)


def test_a_module_that_trains_by_another_method_alone_is_refused() -> None:
    parsed = Plan.parse("tp=2")
    with open_world(parsed.mesh, "simulated") as world:

        def of_rank(own: Any) -> None:
            model = Heads()
            divided = DividedModule(model, LoopRanks(parsed, world, own))
            divided.check_complete()
            model.body(torch.ones(2, 11)).sum().backward()
            divided.check_complete()

        with pytest.raises(TrainingError, match="divides nothing of it"):
            world.turns.run([lambda own=own: of_rank(own) for own in world.local])


@pytest.mark.parametrize("plan", ["tp=2", "dp=2,pp=2,microbatches=2"])
def test_a_few_lengths_are_captured_and_the_others_follow(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As text is generated: the module is whole on a rank for each capture."""
    wholes = list[int]()
    whole_copy = DividedModule._whole_copy

    def counted(self: DividedModule) -> nn.Module:
        wholes.append(1)
        return whole_copy(self)

    def script(models: list[nn.Module], calls: list[Call], replica: int) -> Any:
        (model,), (call,) = models, calls
        draws = torch.Generator().manual_seed(1)
        found = []
        for length in range(2, 13):
            with torch.no_grad():
                found.append(call(torch.randint(50, (4, length), generator=draws)))
        assert model.training
        return found

    monkeypatch.setattr(DividedModule, "_whole_copy", counted)
    check(plan, seeded(lambda: [Language()]), script)
    assert len(wholes) <= 3 * Plan.parse(plan).dp
