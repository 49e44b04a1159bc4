"""Gradients that are computed where they are added up equal autograd's, whatever else uses the weight, and
nothing is copied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from meshloom.comm.group import Group
from meshloom.comm.pieces import Pieces, whole
from meshloom.comm.recording import RecordedGroup
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.core.job import Job
from meshloom.core.step_shape import StepShape
from meshloom.exchange.alone import Alone
from meshloom.exchange.exchange import Exchange
from meshloom.pipeline.runtime.program_stage import DeferredWeightGradients
from meshloom.program.capture.capture import capture
from meshloom.program.operators.collectives import Transition
from meshloom.program.operators.fused_grad_accumulation import DirectAccumulator, GradBuffer
from meshloom.program.operators.linears import GatheredLinears
from meshloom.program.run.with_fused_accumulation import FusedLinear, with_fused_accumulation
from tests.covering import few
from tests.exchange_world import KINDS, assert_same, gathered, watch

WIDTH, WORDS = 6, 9
Linear = Callable[..., Tensor]


class Net(nn.Module):
    """The embedding is also the head, `twice` is used twice, `some` in some chunks, `never` in none; `frozen`
    has a bias without a gradient."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, WIDTH, sparse=sparse)
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.some = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.linear: Linear = F.linear

    def forward(self, tokens: Tensor) -> Tensor:
        layer = lambda each, x: self.linear(x, each.weight, each.bias)  # noqa: E731
        x = layer(self.twice, torch.tanh(layer(self.twice, self.table(tokens)))) * self.scale
        if tokens.shape[0] != 2:
            x = x + layer(self.some, x)
        x = layer(self.frozen, torch.tanh(x))
        return self.linear(x, self.table.weight).square().sum()


def trainable(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, each) for name, each in model.named_parameters() if each.requires_grad]


def chunks_of(replica: int) -> list[Tensor]:
    """Three, of [2 or 3, 4] tokens."""
    generator = torch.Generator().manual_seed(replica)
    return [torch.randint(WORDS, (size, 4), generator=generator) for size in ((2, 3, 2), (3, 3, 2))[replica]]


def accumulator(exchange: Exchange) -> Linear:
    """Linear layers whose weights' gradients land in the buffers of the exchange."""
    return FusedLinear(DirectAccumulator(exchange.buffer))


def train(model: Net, exchange: Exchange, chunks: Sequence[Tensor], *, at_the_end: bool) -> None:
    """Backward of all chunks; the exchange hears of gradients as they come or, as from a pipeline's stage, at
    the end of all."""
    exchange.begin(StepShape(chunks=len(chunks)))
    for chunk in chunks:
        model(chunk).backward()
        exchange.end_chunk()
    for _, each in trainable(model) if at_the_end else ():
        if ready := exchange.hook(each):
            ready(each)


def averaged(world: Sequence[Exchange], weight: float) -> list[dict[str, Tensor | None]]:
    def finish(exchange: Exchange) -> dict[str, Tensor | None]:
        gradients = exchange.finish(weight)
        return gathered(exchange, gradients)

    return in_turns([partial(finish, exchange) for exchange in world])


def by_autograd(chunks: Sequence[Tensor], weight: float) -> dict[str, Tensor | None]:
    model = Net().double()
    for chunk in chunks:
        (model(chunk) / weight).backward()
    return {name: each.grad for name, each in trainable(model)}


def open_exchange(kind: str, model: nn.Module, group: Group, *, overlap: bool) -> Exchange:
    return (
        Alone(trainable(model))
        if kind == "alone"
        else KINDS[kind](trainable(model), group, bucket_bytes=100, overlap=overlap)
    )


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("told", few(["as they come and at the end", "as they come", "at the end", "never"]))
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["alone", "all_reduce", "zero"])
def test_what_lands_equals_autograd(kind: str, overlap: bool, told: str, sparse: bool):
    world: list[tuple[Net, Exchange]] = []
    for group in simulated_groups(1 if kind == "alone" else 2):
        model = Net(sparse=sparse).double()
        exchange = open_exchange(kind, model, group, overlap=overlap)
        model.linear = accumulator(exchange)
        if "come" in told:
            watch(model, exchange)
        world.append((model, exchange))
    expected = by_autograd([chunk for replica in range(len(world)) for chunk in chunks_of(replica)], 7.0)
    assert expected["never.weight"] is None
    for _ in range(2):  # nothing is left over from a step
        for replica, (model, exchange) in enumerate(world):
            train(model, exchange, chunks_of(replica), at_the_end="end" in told)
        for found in averaged([exchange for _, exchange in world], 7.0):
            assert_same(found, expected)  # to 1e-12 in float64: sums have another order


@pytest.mark.parametrize("kind", list(KINDS))
def test_what_is_ready_leaves_before_the_step_is_finished(kind: str):
    group = RecordedGroup(simulated_groups(2, of_a_host=True)[0], "dp")
    model = Net().double()
    exchange = open_exchange(kind, model, group, overlap=True)
    model.linear = accumulator(exchange)
    train(model, exchange, chunks_of(0), at_the_end=False)
    assert not group.counts
    for _, each in trainable(model):
        ready = exchange.hook(each)
        assert ready
        ready(each)
    # One operation, or one for each server: the next bucket holds a parameter that is never used.
    assert sum(count.calls for count in group.counts.values()) == (2 if kind == "two_servers" else 1)


class Made(TorchDispatchMode):
    """Operators that write or make a tensor of as many elements as a weight has."""

    def __init__(self, num_elements: int) -> None:
        super().__init__()
        self.num_elements = num_elements
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.numel() == self.num_elements and not func.is_view:
            self.counts[str(func)] += 1
        return out


@pytest.mark.parametrize("kind", list(KINDS))
def test_nothing_is_copied_on_the_way_into_a_bucket(kind: str):
    counts: list[dict[str, int]] = []
    for accumulates in (False, True):
        weight = nn.Linear(11, 13, bias=False)
        exchange = KINDS[kind](
            list(weight.named_parameters()),
            simulated_groups(1, of_a_host=True)[0],
            bucket_bytes=10,
            overlap=False,
        )
        watch(weight, exchange)
        linear = accumulator(exchange) if accumulates else F.linear
        exchange.begin(StepShape(chunks=3))
        for _ in range(3):
            loss = linear(torch.randn(2, 11), weight.weight).sum()
            with Made(11 * 13) as made:
                loss.backward()
            exchange.end_chunk()
            counts.append(dict(made.counts))
    *by_autograd, first, second, third = counts
    assert [sum(each.values()) for each in by_autograd] == [2, 2, 2]  # dW, and its way into the bucket
    assert first == {"aten.mm.out": 1}
    assert second == third == {"aten.addmm_.default": 1}


def test_what_hooks_see_and_change_is_left_to_autograd():
    found: list[Any] = []
    for accumulates in (False, True):
        model = Net().double()
        model.linear = FusedLinear(DirectAccumulator()) if accumulates else F.linear
        model.twice.weight.register_hook(lambda gradient: 3 * gradient)
        for chunk in chunks_of(0):
            model(chunk).backward()
        found.append({name: each.grad for name, each in trainable(model)})
    assert_same(found[1], found[0])


def test_what_was_saved_may_come_back_as_another_tensor():
    """As it does where activations are recomputed or kept elsewhere."""
    model = Net().double()
    grad_buffers = {id(each): torch.full_like(each, float("nan")) for _, each in trainable(model)}
    model.linear = FusedLinear(
        DirectAccumulator(lambda parameter: GradBuffer(tensor=grad_buffers[id(parameter)], filled=False))
    )
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor.detach().clone(), lambda tensor: tensor
    ):
        for chunk in chunks_of(0):
            model(chunk).backward()
    assert_same({name: each.grad for name, each in trainable(model)}, by_autograd(chunks_of(0), 1.0))
    assert model.twice.weight.grad is grad_buffers[id(model.twice.weight)]


class Computed(nn.Module):
    """Layers of which some have weights that are computed, cast, or frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.scaled, self.cast, self.fixed = (nn.Linear(4, 4) for _ in range(4))
        self.fixed.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(self.plain(x), self.scaled.weight * 2)
        with torch.autocast("cpu", torch.bfloat16):
            x = self.cast(x).float()
        return self.fixed(x)


@pytest.mark.usefixtures("silent_export")
@pytest.mark.long
def test_only_layers_whose_weights_are_parameters_land():
    job = Job(
        model=Computed,
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        data=lambda: [torch.randn(4) for _ in range(4)],  # type: ignore[arg-type]
        batch_size=2,
        steps=1,
    )
    program = capture(job, (torch.randn(2, 4), torch.randn(2, 4)))
    assert sum(node.operator == "linear" for node in program.nodes) == 4

    def accumulated(**settings: Any) -> list[str]:
        return [
            node.path
            for node in with_fused_accumulation(program, DirectAccumulator(), **settings).nodes
            if isinstance(node.target, FusedLinear)
        ]

    assert accumulated(min_elements=0) == ["plain"]
    assert accumulated(min_elements=17) == accumulated() == []


@pytest.mark.parametrize("accumulator", [None, "in place"])
def test_a_rank_may_have_no_outputs_of_a_layer(accumulator: str | None):
    """Two classes on three ranks: what has no columns was asked for as many rows as fit ("cannot reshape
    tensor of 0 elements")."""
    group = simulated_groups(1)[0]
    everything = whole((3, WIDTH), 1)
    change = Transition(source="invariant", target="part", before=everything, after=everything)
    layers = GatheredLinears(
        change=change, biased=(True, False), accumulator=DirectAccumulator() if accumulator else None
    )
    x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    weights = [
        torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((0, WIDTH), (0,), (5, WIDTH))
    ]
    nothing, some = layers.run(group, x, *weights)
    (nothing.sum() + some.square().sum()).backward()
    (expected,) = torch.autograd.grad(F.linear(x, weights[2]).square().sum(), x)
    torch.testing.assert_close(x.grad, expected, rtol=1e-13, atol=1e-13)  # float64, sums in another order
    assert all(each.grad is not None and each.grad.shape == each.shape for each in weights)


@pytest.mark.parametrize("source", ["invariant", "part"])
def test_layers_with_their_change_of_placement_land_now_or_later(source: Any):
    """Weights wait in a pipeline's backward for inputs, but not for an input that was gathered again: it
    would have to be held."""
    group = simulated_groups(1)[0]
    shape = (3, WIDTH)
    before = Pieces(shape, ((None, ((0, WIDTH),)),)) if source == "part" else whole(shape, 1)
    later = DeferredWeightGradients(DirectAccumulator())
    layers = GatheredLinears(
        change=Transition(source=source, target="part", before=before, after=whole(shape, 1)),
        biased=(True, False),
        accumulator=later,
    )
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weights = [
        torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((5, WIDTH), (5,), (7, WIDTH))
    ]

    def loss(one: Tensor, other: Tensor) -> Tensor:
        return one.square().sum() + other.sin().sum()

    expected = torch.autograd.grad(loss(F.linear(x, *weights[:2]), F.linear(x, weights[2])), [x, *weights])
    for times in (1, 2):
        later.collecting = True
        loss(*layers.run(group, x, *weights)).backward()
        waiting = later.take()
        assert len(waiting) == (2 if source == "invariant" else 0)
        for compute in waiting:
            compute()
        for each, gradient in zip([x, *weights], expected, strict=True):
            torch.testing.assert_close(each.grad, times * gradient, rtol=1e-13, atol=1e-13)
