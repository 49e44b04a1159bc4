"""Parts of divided parameters and buffers: every element counted once, whole again from any division."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from shards_world import random_pieces
from torch import Tensor, nn

from meshloom.comm.pieces import Pieces, put
from meshloom.comm.recording import RecordedGroup
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.parameters.shards import Shards

SHAPES: list[tuple[int, ...]] = [(), (7,), (5, 3), (3, 7, 2), (1,), (2, 11)]


def everyone(pieces: dict[str, Pieces], num_ranks: int) -> list[Shards]:
    return [Shards(pieces, RecordedGroup(group, "tp")) for group in simulated_groups(num_ranks)]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.complex64])
def test_parts_make_the_whole_again(num_ranks: int, dtype: torch.dtype):
    draw = random.Random(num_ranks)
    for shape in SHAPES * 5:
        pieces = random_pieces(shape, num_ranks, draw)
        value = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 9).to(dtype)
        ranks = everyone({"x": pieces}, num_ranks)
        parts = [each.take("x", value) for each in ranks]
        assert [tuple(each.shape) for each in parts] == [
            pieces.local_shape(rank) for rank in range(num_ranks)
        ]
        for each, part in zip(ranks, parts, strict=True):
            assert each.whole_shape("x", part) == shape
        for whole, each in zip(
            in_turns([partial(each.gather, "x", part) for each, part in zip(ranks, parts, strict=True)]),
            ranks,
            strict=True,
        ):
            assert torch.equal(whole, value) and whole.dtype == dtype
            assert isinstance(each.group, RecordedGroup)
            assert sum(count.bytes for count in each.group.counts.values()) == each.gather_bytes("x", dtype)


def test_fingerprint_of_a_divided_model_is_that_of_the_whole():
    def whole() -> nn.Module:
        model = nn.Linear(3, 5).double()
        model.register_buffer("count", torch.tensor(0))
        return model

    expected = {"weight": "[5, 3] torch.float64", "bias": "[5] torch.float64", "count": "[] torch.int64"}
    assert Shards({}, None).fingerprint(whole()) == expected
    for shards in everyone({"weight": random_pieces((5, 3), 2, random.Random(0))}, 2):
        model = whole()
        shards.divide(model)
        assert shards.fingerprint(model) == expected


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_element_is_spoken_for_by_its_first_holder(num_ranks: int):
    draw = random.Random(num_ranks)
    kinds: set[str] = set()
    for shape in SHAPES * 10:
        pieces = random_pieces(shape, num_ranks, draw)
        times = torch.zeros(shape)
        for rank, shards in enumerate(everyone({"x": pieces}, num_ranks)):
            which = shards.speaks_for("x")
            kinds.add(type(which).__name__)
            spoken = (
                torch.full(pieces.local_shape(rank), float(which))
                if isinstance(which, bool)
                else which.view(pieces.local_shape(rank)).float()
            )
            mine = torch.zeros(shape)
            put(pieces, rank, spoken, mine)
            times += mine
        assert torch.equal(times, torch.ones(shape))
    assert kinds == {"bool", "Tensor"}


class Tied(nn.Module):
    """A tied head, a buffer used twice, a frozen weight, a recurrent layer, and something that stays
    whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList([nn.Linear(4, 5), nn.Linear(4, 5)])
        self.blocks[1] = self.blocks[0]
        self.blocks[0].bias.requires_grad_(False)
        self.recurrent = nn.LSTM(4, 3)
        self.norm = nn.LayerNorm(4)
        self.register_buffer("table", torch.randn(6, 2))
        self.register_buffer("not_saved", torch.randn(6), persistent=False)


def rows(size: int, cuts: list[int], *rest: int) -> Pieces:
    stops = [0, *cuts, size]
    return Pieces(
        (size, *rest),
        tuple(((((a, b),) if a < b else ()), *(None for _ in rest)) for a, b in itertools.pairwise(stops)),
    )


TIED = {
    "embed.weight": rows(7, [5, 6], 4),
    "head.bias": rows(7, [5, 6]),
    "blocks.0.weight": Pieces((5, 4), ((None, ((0, 1), (3, 4))), (None, ((1, 2),)), (None, ((1, 3),)))),
    "blocks.0.bias": rows(5, [2, 2]),
    "recurrent.weight_hh_l0": rows(12, [4, 8], 3),
    "table": rows(6, [3, 3], 2),
    "not_saved": rows(6, [1, 2]),
}


def divided() -> tuple[Tied, list[Tied], list[Shards]]:
    """The whole model, and each rank's."""
    models: list[Tied] = []
    for _ in range(4):
        torch.manual_seed(0)
        models.append(Tied())
    ranks = everyone(TIED, 3)
    for shards, model in zip(ranks, models[1:], strict=True):
        shards.divide(model)
    return models[0], models[1:], ranks


def test_the_model_holds_parts_under_the_same_names():
    whole, models, _ = divided()
    for rank, model in enumerate(models):
        named, original = (
            dict(model.named_parameters(remove_duplicate=False)),
            dict(whole.named_parameters(remove_duplicate=False)),
        )
        assert list(named) == list(original) and list(model.state_dict()) == list(whole.state_dict())
        assert (
            model.head.weight is model.embed.weight and named["blocks.1.weight"] is named["blocks.0.weight"]
        )
        assert "not_saved" not in model.state_dict() and model.not_saved.shape == (
            TIED["not_saved"].num_elements(rank),
        )
        assert all(
            isinstance(each, nn.Parameter) and each.requires_grad == original[name].requires_grad
            for name, each in named.items()
        )
        assert any(each is model.recurrent.weight_hh_l0 for each in model.recurrent._flat_weights)
        for name, each in named.items():
            pieces = TIED.get(name.replace("blocks.1", "blocks.0").replace("head.weight", "embed.weight"))
            assert tuple(each.shape) == (pieces.local_shape(rank) if pieces else tuple(original[name].shape))
            assert each.untyped_storage().nbytes() == each.nbytes  # the whole one can go


def gathered(ranks: Sequence[Shards], models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """The whole of each tensor, as the first rank gets it."""

    def rank(shards: Shards, model: nn.Module) -> dict[str, Tensor]:
        return {name: shards.gather(name, each) for name, each in model.state_dict().items()}

    return in_turns([partial(rank, *each) for each in zip(ranks, models, strict=True)])[0]


def test_wholes_are_loaded_as_parts():
    whole, models, ranks = divided()
    found = gathered(ranks, models)
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.state_dict().items())
    others = {name: tensor + 1 for name, tensor in whole.state_dict().items()}
    for shards, model in zip(ranks, models, strict=True):
        load = shards.weights_loader(model)
        for name, tensor in others.items():
            load(name, tensor)
    for name, tensor in gathered(ranks, models).items():
        assert torch.equal(tensor, others[name])


def test_without_pieces_everything_is_whole():
    model = nn.Linear(2, 3)
    shards = Shards({}, None)
    before = model.weight
    shards.divide(model)
    assert (
        model.weight is before
        and shards.take("weight", before) is before
        and shards.speaks_for("weight") is True
    )

    def gather() -> Tensor:
        return shards.gather("weight", before)

    assert gather() is before
