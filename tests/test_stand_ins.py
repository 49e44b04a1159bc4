"""Values for a comparison: parameters of equal shape and convention share memory, and differ nevertheless."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import spectral_norm

from meshloom.parameters.stand_ins import APART
from meshloom.parameters.unfilled_model import UnfilledModel, comparable, unfilled_model
from meshloom.parameters.values.building import described
from meshloom.program.store.object_text import ObjectText

CPU = torch.device("cpu")


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(39))
        self.mix = nn.Parameter(torch.zeros(39, 39))


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(39), nn.Linear(39, 90), nn.Linear(90, 39), Gain())


class Deep(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(11, 39, padding_idx=0), *(block() for _ in range(12)))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.3)


def memory_of(model: nn.Module) -> int:
    """Bytes of all storages, each once."""
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in model.parameters()
    }
    return sum(storages.values())


def test_blocks_of_one_convention_take_the_memory_of_one():
    one = sum(each.nbytes for each in block().parameters())
    with comparable(Deep, CPU) as model:
        apart = 4 * APART * 11 * 8  # eight parameters of a block, four bytes each
        assert memory_of(model) <= one + 4 * 11 * 39 + apart < 1.6 * one
        for number in range(2, 13):
            for each, first in zip(model[number].parameters(), model[1].parameters(), strict=True):
                assert each.shape == first.shape
                is_constant = len(first.unique()) == 1
                assert torch.equal(each, first) == is_constant
                if not is_constant:
                    assert torch.isclose(each.std(), first.std(), rtol=0.2)
        assert float(model[1][1].weight.detach().std()) == pytest.approx(0.3, rel=0.1)
        assert model[0].weight[0].eq(0).all() and model[1][0].weight.eq(1).all()
        # without a convention: vectors lie around one, matrices have the size of a layer's
        assert float(model[1][3].gain.detach().mean()) == pytest.approx(1, abs=0.1)
        assert 0.1 < float(model[1][3].mix.detach().std()) < 0.2


def test_at_the_end_nothing_has_memory():
    found = unfilled_model(lambda: described(Deep), CPU)
    assert isinstance(found, UnfilledModel)
    before = [id(each) for each in found.model.parameters()]
    for _ in range(2):
        with found.standing_in():
            assert memory_of(found.model) > 0
        assert memory_of(found.model) == 0 and found.lacks_parameters
    assert [id(each) for each in found.model.parameters()] == before


def test_ties_stay_and_frozen_parameters_are_apart():
    def build() -> nn.Module:
        made = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        made[2].weight = made[0].weight
        made[3].requires_grad_(False)
        return made

    with comparable(build, CPU) as model:
        assert model[0].weight is model[2].weight and not torch.equal(model[0].weight, model[1].weight)
        memory = [each.weight.untyped_storage().data_ptr() for each in model]
        assert memory[0] == memory[1] != memory[3]


def test_what_needs_values_is_built():
    def build() -> nn.Module:
        made = nn.Linear(3, 3)
        assert made.weight.detach().numpy().shape == (3, 3)
        return made

    assert "numpy" in str(unfilled_model(lambda: described(build), CPU))
    with comparable(build, CPU) as model:
        assert model.weight.untyped_storage().nbytes()


def test_a_text_leaves_memory_that_is_to_come_as_it_is():
    """Spectral norm as a hook keeps an attribute that is computed from its parameter."""
    texts: list[str] = []
    for _ in range(2):
        torch.manual_seed(1)
        found = unfilled_model(
            lambda: described(lambda: nn.Sequential(spectral_norm(nn.Linear(9, 11)), nn.ReLU())), CPU
        )
        assert isinstance(found, UnfilledModel)
        with found.standing_in():
            texts.append(ObjectText().module(found.model))
        found.fill_parameters()
        assert all(each.untyped_storage().nbytes() for each in found.model.parameters())
    assert texts[0] == texts[1]
