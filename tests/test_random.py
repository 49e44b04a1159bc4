"""Random draws: decided by seed, step, chunk and number, whatever was drawn before and whoever computes
them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshloom.core.errors import JobError
from meshloom.core.random import (
    KeyedDraws,
    Rows,
    chunk_seed,
    derive,
    evaluation_seed,
    model_seed,
    preserved_draws,
    python_draws_of,
    sample_order,
    sample_seed,
    seed_everything,
)

# What draws a tensor [samples, 6] for a batch x [samples, 6], in as many ways as torch has.
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "dropout1d": lambda x: F.dropout1d(x.unsqueeze(2), 0.5).squeeze(2),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.5, inplace=True),
    "rrelu": lambda x: F.rrelu(x - 2, training=True),
    "rrelu in place": lambda x: F.rrelu(x - 2, training=True, inplace=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_ with p": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "bernoulli_ with tensor": lambda x: torch.empty_like(x).bernoulli_(torch.full_like(x, 0.3)),
    "rand": lambda x: torch.rand(x.shape),
    "randn": lambda x: torch.randn(x.shape),
    "randn with separate sizes": lambda x: torch.randn(x.shape[0], 6),
    "randint": lambda x: torch.randint(0, 100, x.shape).float(),
    "rand_like": lambda x: torch.rand_like(x),
    "randn_like": lambda x: torch.randn_like(x),
    "randint_like": lambda x: torch.randint_like(x, 5, 90),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "normal of means": lambda x: torch.normal(x, 1.0),
    "poisson": lambda x: torch.poisson(x.abs()),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 30.0), x.sigmoid()),
    "gamma": lambda x: torch.distributions.Gamma(x.abs() + 0.1, torch.ones_like(x)).sample(),
    "dirichlet": lambda x: torch.distributions.Dirichlet(x.abs() + 0.1).sample(),
    "normal of means and deviations": lambda x: torch.normal(x, x.abs()),
    "multinomial": lambda x: torch.multinomial(x.softmax(1), 6, replacement=True).float(),
    "two rows per sample": lambda x: torch.rand(2 * x.shape[0], 3).view(x.shape[0], 6),
}


def draw(
    function: Callable[[Tensor], Tensor], x: Tensor, rows: Rows | None = None, before: int = 0
) -> Tensor:
    """`function(x)` as the third keyed draw of a chunk; the first takes `before` numbers more than usual."""
    seed_everything(7)
    with KeyedDraws(rows):
        torch.rand(1 + before)
        torch.rand(())
        return function(x)


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_does_not_depend_on_how_much_earlier_ones_took(name: str):
    x = torch.randn(8, 6)
    assert torch.equal(draw(DRAWS[name], x), draw(DRAWS[name], x, before=1000))


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize(("start", "count"), [(0, 3), (3, 2), (7, 1), (0, 8)])
def test_rows_of_a_draw_are_the_slice_of_the_full_draw(name: str, start: int, count: int):
    x = torch.randn(8, 6)
    full = draw(DRAWS[name], x)
    part = draw(DRAWS[name], x[start : start + count], Rows(start=start, count=count, total=8))
    assert torch.equal(part, full[start : start + count])


@pytest.mark.parametrize("steps", [3, 5, 8])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_rows_of_what_a_recurrent_layer_draws_are_those_of_its_samples(kind: Any, steps: int):
    """Its masks are [time, samples, features], and were cut by time where that divides."""
    torch.manual_seed(1)
    layer, x = kind(6, 5, 2, dropout=0.5, batch_first=True), torch.randn(8, steps, 6)
    full = draw(lambda each: layer(each)[0], x)
    part = draw(lambda each: layer(each)[0], x[3:6], Rows(start=3, count=3, total=8))
    torch.testing.assert_close(part, full[3:6])
    packed = nn.utils.rnn.pack_padded_sequence(x[3:6], [steps] * 3, batch_first=True)
    with pytest.raises(JobError, match="packed sequences"):
        draw(lambda _: layer(packed)[0].data, x, Rows(start=3, count=3, total=8))


def test_rows_of_a_single_column_multinomial():
    weights = torch.rand(8, 5)
    full = draw(lambda w: torch.multinomial(w, 2), weights)
    part = draw(lambda w: torch.multinomial(w, 2), weights[2:5], Rows(start=2, count=3, total=8))
    assert torch.equal(part, full[2:5])


def test_successive_draws_differ():
    seed_everything(7)
    with KeyedDraws():
        assert not torch.equal(torch.rand(8), torch.rand(8))


def test_chunks_draw_differently_and_the_same_chunk_the_same():
    def mask(step: int, chunk: int) -> Tensor:
        seed_everything(chunk_seed(0, step, chunk))
        with KeyedDraws():
            return F.dropout(torch.ones(64), 0.5)

    assert torch.equal(mask(3, 1), mask(3, 1))
    assert not torch.equal(mask(3, 1), mask(3, 2))
    assert not torch.equal(mask(3, 1), mask(4, 1))


def test_a_draw_from_a_generator_of_ones_own_is_left_alone():
    def drawn() -> Tensor:
        return torch.rand(4, generator=torch.Generator().manual_seed(3))

    outside = drawn()
    seed_everything(7)
    with KeyedDraws():
        inside = drawn()
        following = torch.rand(4)
    seed_everything(7)
    with KeyedDraws():
        assert torch.equal(following, torch.rand(4))  # and counts for nothing
    assert torch.equal(inside, outside)


def test_seen_receives_every_operation_that_draws():
    seen: list[Any] = []
    with KeyedDraws(seen=seen):
        torch.rand(3)
        F.dropout(torch.ones(5), 0.5)
        torch.ones(3) + 1
    assert len(seen) == 2


class Noisy(nn.Module):
    """Two linear layers with a dropout mask and a noise between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.first(x), 0.5)
        return self.second(hidden + torch.randn_like(hidden))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("rows", [None, Rows(start=2, count=4, total=9)])
def test_recomputing_activations_repeats_the_draws(use_reentrant: bool, rows: Rows | None):
    modules = [Noisy() for _ in range(3)]
    x = torch.randn(4, 6, requires_grad=True)

    def gradients(recompute: bool) -> list[Tensor]:
        seed_everything(7)
        with KeyedDraws(rows):
            y = x
            for module in modules:
                y = checkpoint(module, y, use_reentrant=use_reentrant) if recompute else module(y)
            loss = (y * torch.rand_like(y)).sum()
            parameters = [parameter for module in modules for parameter in module.parameters()]
            for parameter in [x, *parameters]:
                parameter.grad = None
            loss.backward()
        return [parameter.grad.clone() for parameter in [x, *parameters]]

    for plain, recomputed in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(plain, recomputed)


def test_draws_for_some_rows_have_the_layout_of_those_for_all():
    """Compiled code expects the layout that the operator has without keys."""
    q = torch.randn(3, 7, 2, 5).transpose(1, 2)
    draws = [lambda: F.scaled_dot_product_attention(q, q, q), lambda: F.dropout(q, 0.5)]
    for draw in draws:
        with KeyedDraws(Rows(start=2, count=3, total=5)):
            assert draw().stride() == q.stride()


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=4))
def test_derived_seeds_are_63_bit_numbers(parts: list[int]):
    assert 0 <= derive(*parts) < 2**63
    assert derive(*parts) == derive(*parts)


def test_every_purpose_has_seeds_of_its_own():
    seeds = [model_seed(0), *(chunk_seed(0, step, chunk) for step in range(20) for chunk in range(20))]
    seeds += [sample_seed(0, epoch, index) for epoch in range(20) for index in range(20)]
    seeds += [evaluation_seed(0, batch, chunk) for batch in range(20) for chunk in range(20)]
    assert len(set(seeds)) == len(seeds)
    assert derive(1, 23) != derive(12, 3)


def test_the_derived_seeds_stay_what_they_are():
    # A checkpoint's curve goes on only if the next version derives the same numbers.
    assert chunk_seed(0, 1, 2) == 7101538770788553410


def test_sample_order_is_a_permutation_decided_by_seed_and_epoch():
    order = sample_order(3, 1, 100, shuffle=True)
    assert sorted(order) == list(range(100))
    assert order == sample_order(3, 1, 100, shuffle=True)
    assert order != sample_order(3, 2, 100, shuffle=True)
    assert order != sample_order(4, 1, 100, shuffle=True)
    assert sample_order(3, 1, 5, shuffle=False) == [0, 1, 2, 3, 4]


def test_sample_order_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    sample_order(3, 1, 100, shuffle=True)
    assert torch.equal(before, torch.get_rng_state())


def three_draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(numpy.random.rand())


def test_seed_everything_decides_torch_random_and_numpy():
    seed_everything(2**62 + 5)
    first = three_draws()
    seed_everything(2**62 + 5)
    assert three_draws() == first


def test_preserved_draws_puts_all_three_generators_back():
    seed_everything(1)
    expected = three_draws()
    seed_everything(1)
    with preserved_draws():
        seed_everything(99)
        three_draws()
    assert three_draws() == expected


def test_what_python_draws_at_a_moment_leaves_the_draws_outside_as_they_were():
    def outside(*, entered: bool) -> tuple[float, ...]:
        seed_everything(3)
        numpy.random.randn()  # numpy keeps the second of a pair
        if entered:
            with python_draws_of(11):
                of_python, of_numpy = random.Random(11), numpy.random.RandomState(11)
                drawn = random.random(), *numpy.random.randn(3)
                assert drawn == (of_python.random(), *of_numpy.randn(3))
                with python_draws_of(12):
                    assert random.random() == random.Random(12).random()
                    numpy.random.randn()
                assert (random.random(), *numpy.random.randn(2)) == (of_python.random(), *of_numpy.randn(2))
        return random.random(), *numpy.random.randn(3)

    assert outside(entered=True) == outside(entered=False)


def test_preserved_draws_keeps_the_chain_of_keyed_draws():
    def following(interrupted: bool) -> Tensor:
        seed_everything(7)
        with KeyedDraws():
            torch.rand(1)
            if interrupted:
                with preserved_draws():
                    torch.rand(5)
                    seed_everything(5)
            return torch.rand(3)

    assert torch.equal(following(interrupted=False), following(interrupted=True))
