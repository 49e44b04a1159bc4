"""A model that is described without the values of its parameters, and built on one rank of a host after another."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.core.errors import JobError, MeshloomError
from meshloom.parameters.unfilled_model import UnfilledModel, unfilled_model
from meshloom.parameters.values.building import BuildingOrder, NotDescribableError, described
from meshloom.parameters.values.initial_values import HeldTensor
from meshloom.parameters.whole_model import WholeModel, check_alike

CPU = torch.device("cpu")


class Several(nn.Module):
    """Ties, attributes, hooks and layers that know their parameters."""

    def __init__(self) -> None:
        super().__init__()
        own = nn.Parameter(torch.rand(4, 3))
        own.kind = "kept"  # pyright: ignore[reportAttributeAccessIssue]
        self.one, self.same = own, own
        self.recurrent = nn.LSTM(3, 5)
        self.teacher = deepcopy(self.recurrent).requires_grad_(False)
        self.register_buffer("ages", torch.arange(5))
        self.one.register_hook(lambda gradient: 2 * gradient)
        nn.init.constant_(self.recurrent.weight_ih_l0, 0.5)


def test_a_description_has_everything_but_the_values_of_parameters():
    model: Any = described(Several)
    assert all(each.is_meta for each in model.parameters())
    assert model.one is model.same and model.one.kind == "kept"
    assert model.ages.tolist() == [0, 1, 2, 3, 4]
    assert [each.requires_grad for each in model.parameters()] == [
        each.requires_grad for each in Several().parameters()
    ]
    assert nn.Module.register_parameter.__module__ == "torch.nn.modules.module"


def test_what_is_filled_is_the_described_model_with_its_hooks():
    found = unfilled_model(lambda: described(Several), CPU)
    assert isinstance(found, UnfilledModel)
    model: Any = found.model
    kept = dict(model.named_parameters())
    assert not any(each.untyped_storage().nbytes() for each in kept.values())
    found.fill_parameters()
    torch.manual_seed(3)
    expected = Several()
    found.values = WholeModel(
        lambda: torch.manual_seed(3) and Several(), model, kept.keys(), (), draws=False, fixed=False
    )
    found.give_values()
    for name, each in model.named_parameters():
        assert each is kept[name] and torch.equal(each, expected.get_parameter(name))
    assert float(model.recurrent.weight_ih_l0.detach().mean()) == 0.5
    output, _ = model.recurrent(torch.ones(2, 3))
    (output.sum() + model.one.sum()).backward()
    assert model.one.grad.eq(2).all() and model.recurrent.weight_hh_l0.grad is not None


def shared() -> nn.Module:
    made = nn.Module()
    flat = torch.randn(30)
    made.whole, made.part = nn.Parameter(flat), nn.Parameter(flat[:12].view(3, 4))
    return made


def turned() -> nn.Module:
    made = nn.Linear(3, 4)
    made.back = nn.Parameter(made.weight.detach().t())
    return made


def read() -> nn.Module:
    made = nn.Linear(3, 4)
    return made if made.weight.sum() > 0 else nn.Linear(4, 4)


def scaled() -> nn.Module:
    made: Any = nn.Linear(3, 4)
    made.scale = made.weight.detach().abs().mean()
    return nn.Sequential(made)


def beside() -> nn.Module:
    made: Any = nn.Linear(3, 4)
    made.teachers = [nn.Linear(3, 4)]
    return made


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (shared, "part lies in the memory of whole"),
        (turned, "back lies in the memory of weight"),
        (read, "meta"),
        (scaled, "scale of 0 is made of them"),
        (beside, "teachers of the model is made of them"),
    ],
)
def test_what_needs_values_cannot_be_described(build: Callable[[], nn.Module], why: str):
    with pytest.raises(NotDescribableError, match=why):
        described(build)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_layers_that_compute_from_their_parameters_are_described():
    for build in (
        lambda: parametrizations.weight_norm(nn.Linear(3, 4)),
        lambda: parametrizations.spectral_norm(nn.Linear(3, 4)),
        lambda: nn.utils.weight_norm(nn.Linear(3, 4)),
    ):
        found = unfilled_model(lambda build=build: described(build), CPU)
        assert isinstance(found, UnfilledModel)
        with found.standing_in():
            assert torch.isfinite(found.model(torch.ones(2, 3))).all()


def whole_model(build: Callable[[], nn.Module], like: Callable[[], nn.Module], *, fixed: bool = False) -> Any:
    model = described(like)
    names = dict(model.named_parameters()).keys()
    return model, WholeModel(build, model, names, (), draws=False, fixed=fixed)


def test_another_model_is_told():
    held = [HeldTensor(name="weight", tensor=torch.empty(4, 3))]
    for build, why in (
        (lambda: nn.Linear(3, 5), r"weight is \[5, 3\] weight, and was \[4, 3\] weight"),
        (lambda: nn.Linear(3, 4, bias=False), "bias is missing"),
    ):
        _, values = whole_model(build, lambda: nn.Linear(3, 4))
        with pytest.raises(JobError, match=why):
            values.fill(held)
    with pytest.raises(JobError, match="weight has other values on rank 2 than on rank 0"):
        check_alike([{"weight": 1}, {}, {"weight": 2}])
    check_alike([{"weight": 1}, {}, {"weight": 1}])


def test_attributes_that_depend_on_draws_are_the_built_ones():
    def build() -> nn.Module:
        made: Any = nn.Linear(3, 4)
        made.noise, made.rate = torch.rand(2), float(torch.rand(()))
        made.layers = 4
        return made

    torch.manual_seed(0)
    model, values = whole_model(build, build)
    values.fill([HeldTensor(name="weight", tensor=torch.empty(4, 3))])
    torch.manual_seed(0)
    torch.rand(2), torch.rand(())
    expected: Any = build()
    assert torch.equal(model.noise, expected.noise) and model.rate == expected.rate
    model, values = whole_model(build, build, fixed=True)
    with pytest.raises(JobError, match="noise of the model .*constant of the program.*Make it a buffer"):
        values.fill([HeldTensor(name="weight", tensor=torch.empty(4, 3))])


def test_ranks_of_a_host_take_turns_and_raise_the_same_error():
    """Two hosts of two ranks and one of one."""
    hosts, now, most = ["a", "b", "a", "b", "c"], dict[str, int](), list[int]()
    order: list[int] = []

    def rank(group: Any) -> Any:
        turns = BuildingOrder.of(group, hosts[group.rank])

        def work() -> None:
            host = hosts[group.rank]
            order.append(group.rank)
            now[host] = now.get(host, 0) + 1
            most.append(now[host])
            now[host] -= 1
            if len(order) > 5:
                raise JobError(f"rank {group.rank}")

        turns.each(work)
        with pytest.raises(MeshloomError, match="rank 0"):
            turns.each(work)
        return turns.count, turns.mine

    assert in_turns([partial(rank, each) for each in simulated_groups(5)]) == [
        (2, 0),
        (2, 0),
        (2, 1),
        (2, 1),
        (2, 0),
    ]
    assert [sorted(order[:3]), sorted(order[3:5]), max(most)] == [[0, 1, 4], [2, 3], 1]


def test_a_forward_of_the_described_model_sees_what_it_is_given():
    model = nn.Linear(2, 2)

    def copied() -> nn.Module:
        made = nn.Sequential(nn.Linear(2, 2))
        made[0]._parameters["weight"] = model.weight  # as what lies outside
        return made

    found = unfilled_model(lambda: described(copied), CPU)
    assert isinstance(found, UnfilledModel)
    assert torch.equal(found.had["0.weight"], model.weight)
    outputs: list[Tensor] = []
    with found.standing_in():
        outputs.append(found.model(torch.ones(1, 2)))
    assert outputs[0].isfinite().all()
