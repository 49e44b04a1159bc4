"""How many parts an axis has follows from how the program is written, and never from sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.program.capture.capture import capture
from meshloom.tensor_parallel.layout.axes import Axis, concatenation, product
from meshloom.tensor_parallel.layout.layout import layout_of
from meshloom.tensor_parallel.layout.unify import freeze_axes, unify
from meshloom.tensor_parallel.rules.table import BUILT_IN
from tests.jobs import make_job

pytestmark = [
    pytest.mark.usefixtures("silent_export"),
    pytest.mark.filterwarnings("ignore:The tensor attributes? .* assigned during export:UserWarning"),
]


class Tokens(nn.Module):
    """[batch, length] -> [batch, length, 11]."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 4), nn.Linear(4, 11)
        self.mix = mix

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mix(self.table(tokens)))


def padded(x: Tensor) -> Tensor:
    return x + F.pad(x, (0, 0, 1, 0))[:, :-1]


def before(x: Tensor) -> Tensor:
    return x + torch.cat([x[:, -1:], x[:, :-1]], 1)


def differences(x: Tensor) -> Tensor:
    return x[:, 1:] - x[:, :-1]


def doubling(x: Tensor) -> Tensor:
    for step in (1, 2, 4, 8, 16):
        x = x + F.pad(x, (0, 0, step, 0))[:, : x.shape[1]]
    return x


def shifted_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """As causal language models of transformers have it: labels are the tokens, padded by one and cut."""
    logits = model(batch["tokens"])
    labels = F.pad(batch["tokens"], (0, 1), value=-100)[:, 1:].contiguous()[:, : logits.shape[1]]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def most_parts(mix: Callable[[Tensor], Tensor], length: int) -> int:
    job = replace(make_job("mlp", "sgd"), model=lambda: Tokens(mix), loss=shifted_loss)
    batch = {"tokens": torch.randint(11, (2, length), generator=torch.Generator().manual_seed(1))}
    layout = layout_of(capture(job, (batch, batch)), BUILT_IN)
    return max(
        sum(1 for _ in axis.leaves())
        for tensors in layout.values.values()
        for axes in tensors
        for axis in axes
    )


@pytest.mark.long
@pytest.mark.parametrize("mix", [padded, torch.tanh, before, differences, doubling])
def test_parts_are_as_many_for_a_long_text_as_for_a_short_one(mix: Callable[[Tensor], Tensor]):
    """A text and itself one token on were made one axis of as many parts as there are tokens: minutes at 800,
    a RecursionError at 900."""
    parts = most_parts(mix, 128)
    assert parts == most_parts(mix, 2048) <= 16


def test_an_axis_and_itself_one_place_on_stay_two():
    """Of before | rest and rest | after."""
    rest = Axis(999)
    assert not unify(concatenation([Axis(1), rest]), concatenation([rest, Axis(1)]))
    assert rest.kind is None


def test_halves_that_change_places_are_one_axis_each():
    """As rotary embeddings have them: nothing is split for it."""
    one, other = Axis(500), Axis(500)
    assert unify(concatenation([one, other]), concatenation([other, one]))
    assert one.key == other.key


def test_an_axis_that_occurs_twice_is_split_where_that_ends():
    half = Axis(500)
    assert unify(concatenation([half, half]), concatenation([Axis(300), Axis(700)]))
    assert [leaf.size for leaf in half.leaves()] == [300, 200]


@pytest.mark.long
@pytest.mark.parametrize("newer_first", [True, False])
def test_ways_do_not_grow_with_the_number_of_layers(newer_first: bool):
    """Every layer made the axis of the one before the same as its own. Who then asked what an axis is went
    through all layers: half of the time that 80 of them took to be followed. With this many it would be
    minutes."""
    axes = [product([Axis(2), concatenation([Axis(3), Axis(5)])]) for _ in range(5000)]
    for older, newer in pairwise(axes):
        assert unify(newer, older) if newer_first else unify(older, newer)
    freeze_axes(axes)
    assert len({tuple(leaf.key for leaf in axis.leaves()) for axis in axes}) == 1
    assert repr(axes[0]) == repr(axes[-1]) == "(2 x (3 | 5))"
