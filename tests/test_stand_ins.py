"""Values for a comparison: parameters that are made alike share memory, and differ nevertheless."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import spectral_norm

from meshloom.parameters.stand_ins import APART
from meshloom.parameters.unfilled_model import UnfilledModel, comparable, record_unfilled
from meshloom.program.store.object_digest import ObjectDigest

CPU = torch.device("cpu")


def block() -> nn.Module:
    made = nn.Sequential(nn.LayerNorm(40), nn.Linear(40, 90), nn.Linear(90, 40))
    with torch.no_grad():
        made[1].weight.normal_(std=0.02)
        made[2].weight.data = torch.randn(40, 90) * 0.3
        made[2].bias.zero_()
    return made


def deep() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 40, padding_idx=0), *(block() for _ in range(12)))


def memory_of(model: nn.Module) -> int:
    """Bytes of all storages, each once."""
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in model.parameters()
    }
    return sum(storages.values())


def test_blocks_that_are_made_alike_take_the_memory_of_one():
    one = sum(each.nbytes for each in block().parameters())
    with comparable(deep, CPU) as model:
        apart = 4 * APART * 11 * 6  # six parameters of a block, four bytes each
        assert memory_of(model) <= one + 4 * 11 * 40 + apart < 1.6 * one
        for number in range(2, 13):
            for each, first in zip(model[number].parameters(), model[1].parameters(), strict=True):
                assert each.shape == first.shape
                is_constant = len(first.unique()) == 1
                assert torch.equal(each, first) == is_constant
                if not is_constant:
                    assert torch.isclose(each.std(), first.std(), rtol=0.2)
        assert float(model[1][1].weight.detach().std()) == pytest.approx(0.02, rel=0.1)
        assert float(model[1][2].weight.detach().std()) == pytest.approx(0.3, rel=0.1)


@pytest.mark.long
def test_at_the_end_nothing_has_memory():
    found = record_unfilled(deep, CPU)
    assert isinstance(found, UnfilledModel)
    before = [id(each) for each in found.model.parameters()]
    for _ in range(2):
        with found.standing_in():
            assert memory_of(found.model) > 0
        assert memory_of(found.model) == 0 and found.lacks_parameters
    assert [id(each) for each in found.model.parameters()] == before
    found.fill()
    torch.manual_seed(0)
    expected = deep()
    torch.manual_seed(0)
    again = record_unfilled(deep, CPU)
    assert isinstance(again, UnfilledModel)
    with again.standing_in():
        pass
    again.fill()
    for each, other in zip(again.model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(each, other)


def ordered() -> nn.Module:
    made = nn.Linear(6, 6)
    nn.init.orthogonal_(made.weight)
    made.bias.data = torch.arange(6.0)
    return made


def shared() -> nn.Module:
    made = nn.Module()
    flat = torch.randn(30)
    made.whole, made.part = nn.Parameter(flat), nn.Parameter(flat[:12].view(3, 4))
    return made


def tied() -> nn.Module:
    made = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
    made[2].weight = made[0].weight
    return made


def generated() -> nn.Module:
    made = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
    for number, each in enumerate(made):
        nn.init.normal_(each.weight, generator=torch.Generator().manual_seed(number))
    return made


@pytest.mark.parametrize("build", [ordered, shared, tied, generated])
@pytest.mark.long
def test_what_depends_on_places_keeps_its_structure(build: Callable[[], nn.Module]):
    with comparable(lambda: nn.ModuleList(build() for _ in range(3)), CPU) as model:
        for each in model:
            if build is ordered:
                assert torch.allclose(each.weight @ each.weight.T, torch.eye(6), atol=1e-5)
                assert each.bias.tolist() == [0, 1, 2, 3, 4, 5]
            elif build is shared:
                assert torch.equal(each.whole[:12].view(3, 4), each.part)
            elif build is tied:
                assert each[0].weight is each[2].weight and not torch.equal(each[0].weight, each[1].weight)
            else:
                assert torch.equal(
                    each[1].weight, torch.empty(5, 5).normal_(generator=torch.Generator().manual_seed(1))
                )


def test_what_cannot_be_recorded_is_built():
    def build() -> nn.Module:
        made = nn.Linear(3, 3)
        made.weight.data.resize_(2, 3)
        return made

    assert "size" in str(record_unfilled(build, CPU))
    with comparable(build, CPU) as model:
        assert model.weight.shape == (3, 3) and model.weight.untyped_storage().nbytes()


def test_a_digest_leaves_memory_that_is_to_come_as_it_is():
    """Spectral norm as a hook keeps an attribute in the memory of its parameter. Made an array, it could not get memory any more."""
    digests: list[str] = []
    for _ in range(2):
        torch.manual_seed(1)
        found = record_unfilled(lambda: nn.Sequential(spectral_norm(nn.Linear(9, 11)), nn.ReLU()), CPU)
        assert isinstance(found, UnfilledModel)
        with found.standing_in():
            digests.append(ObjectDigest().module(found.model).text())
        found.fill()
        assert all(each.untyped_storage().nbytes() for each in found.model.parameters())
    assert digests[0] == digests[1]
