"""Parameters of which a rank has a part, in a loop of one's own: torch's own tools give what one device gives, or refuse."""

from __future__ import annotations

import copy
import pickle
import random
import weakref
from collections.abc import Callable
from typing import Any, cast

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from meshloom.comm.simulated import simulated_groups
from meshloom.comm.torch.checkpoint_directory import TorchDirectory
from meshloom.comm.turns import in_turns
from meshloom.core.averaged import Averaged
from meshloom.core.errors import TrainingError
from meshloom.core.plan_shares import chunk_sizes
from meshloom.loops.call_draws import CallDraws
from meshloom.loops.part_place import PartError, PartPlace
from meshloom.loops.part_tensor import PartParameter, PartTensor, made_part, plain, whole_tensor
from meshloom.loops.ranks import ranks
from meshloom.loops.sharded_module import ShardedModule
from meshloom.loops.taken_shares import TakenShare, took
from tests.processes import on_ranks

SAMPLES = 8


class Net(nn.Module):
    """Blocks of odd widths, a table whose weight is that of the head, too, a frozen bias, a number, a parameter of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 7)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 7)) for _ in range(2)
        )
        self.row = nn.Parameter(torch.randn(1, 7))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(7, 5)
        self.head.weight = self.table.weight
        self.head.bias.requires_grad_(False)
        self.unused = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.table(x)
        for block in self.blocks:
            hidden = hidden + block(hidden) * self.scale
        return self.head(hidden * self.row)


def net(seed: int = 0) -> Any:
    generator = torch.random.get_rng_state()
    torch.manual_seed(seed)
    made = Net().double()
    torch.random.set_rng_state(generator)
    return made


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole_tensor(each).clone() for name, each in model.named_parameters()}


def train(
    model: Any,
    call: Callable[[Tensor], Tensor],
    share: slice,
    *,
    make: Callable[..., torch.optim.Optimizer],
    mean: Callable[[Tensor], Tensor] = lambda loss: loss,
    backwards: int = 1,
) -> list[float]:
    """The user's: nothing in it knows of ranks but the batch. What it sees on the way."""
    seen: list[float] = []
    optimizer = make(model.parameters())
    generator = torch.Generator().manual_seed(2)
    model.apply(
        lambda each: (
            nn.init.kaiming_normal_(each.weight, generator=generator) if isinstance(each, nn.Linear) else None
        )
    )
    nn.init.trunc_normal_(model.unused.weight, generator=generator)
    model.load_state_dict({**model.state_dict(), "row": torch.full((1, 7), 0.25, dtype=torch.float64)})
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(4):
        optimizer.zero_grad()
        for _ in range(backwards):
            x = torch.randint(0, 5, (SAMPLES,), generator=generator)
            y = torch.randint(0, 5, (SAMPLES,), generator=generator)
            penalty = (
                sum(each.pow(2).sum() + each.abs().mean() for each in model.blocks.parameters())
                + model.row.norm()
                + sum(each.norm(p=3) for each in model.table.parameters())
            )
            (F.cross_entropy(call(x[share]), y[share]) + 1e-2 * penalty).backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        seen.append(float(torch.nn.utils.get_total_norm(gradients, float("inf"))))
        seen.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        average.update_parameters(model)
        with torch.no_grad():
            model.table.weight.mul_(0.99)
        model.blocks[0][0].weight.data.add_(0.01)
        seen.append(float(sum(each.detach().norm() for each in average.module.parameters())))
        seen.append(float(max(each.detach().abs().max() for each in model.parameters())))
        seen.append(sum(each.numel() * each.dim() + sum(each.shape) for each in model.parameters()))
    return seen


def on_simulated(size: int, function: Callable[[int, Any], Any]) -> list[Any]:
    groups = simulated_groups(size)
    return in_turns([lambda rank=rank: function(rank, groups[rank]) for rank in range(size)])


def adamw(**options: Any) -> Callable[..., torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, **options)


OPTIMIZERS = {
    "adamw": adamw(foreach=False),
    "foreach": adamw(foreach=True),
    "fused": adamw(fused=True),
    "amsgrad": adamw(amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, centered=True),
}


@pytest.mark.parametrize(
    ("size", "zero", "name", "backwards"),
    [
        (2, 1, "adamw", 1), (3, 3, "adamw", 1), (2, 1, "foreach", 2), (2, 3, "foreach", 1), (3, 2, "fused", 1), (2, 3, "fused", 1), (3, 3, "sgd", 2),
        (3, 3, "amsgrad", 1), (2, 2, "adagrad", 1), (3, 3, "rmsprop", 1),
    ],
)  # fmt: skip
def test_a_loop_gives_what_one_device_gives(size: int, zero: int, name: str, backwards: int) -> None:
    expected_model = net()
    expected = train(expected_model, expected_model, slice(None), make=OPTIMIZERS[name], backwards=backwards)
    sizes = tuple(chunk_sizes(SAMPLES, size))  # 3 of 3, 3 and 2

    def rank_trains(rank: int, group: Any) -> Any:
        model = net(seed=rank)  # replica 0 has the values
        made = ShardedModule(model, group, zero=zero)
        share = TakenShare(sizes, rank)

        def call(x: Tensor) -> Tensor:
            took(share)
            return made.call(model, (x,), {})

        rows = slice(share.start, share.start + share.rows)
        seen = train(model, call, rows, make=OPTIMIZERS[name], backwards=backwards)
        held = sum(plain(each.detach()).numel() for each in model.parameters())
        return seen, whole_state(model), held, model.unused.weight.grad is None

    for seen, state, held, unused_has_none in on_simulated(size, rank_trains):
        assert seen == pytest.approx(expected, rel=1e-12)  # another order of sums
        for key, each in expected_model.named_parameters():
            torch.testing.assert_close(state[key], each.detach(), rtol=1e-11, atol=1e-13)
        total = sum(each.numel() for each in expected_model.parameters())
        print(f"zero={zero}, {size} ranks: a rank holds {held} of {total} values, {held / total:.2f}")
        assert held <= total / size * 1.25
        assert unused_has_none


def small() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(6, 4, dtype=torch.float64, generator=generator), torch.randn(
        6, 3, dtype=torch.float64, generator=generator
    )


def share_of(x: Tensor, rank: int, size: int) -> Tensor:
    share = TakenShare(tuple(chunk_sizes(len(x), size)), rank)
    took(share)
    return x[share.start : share.start + share.rows]


def backward(made: ShardedModule, model: nn.Module, rank: int, size: int) -> Tensor:
    x, y = batch()
    result = made.call(model, (share_of(x, rank, size),), {})
    F.mse_loss(result, share_of(y, rank, size)).backward()
    return result


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole_tensor(each.grad) for name, each in model.named_parameters() if each.grad is not None}


def expected_gradients(model: nn.Module) -> dict[str, Tensor]:
    x, y = batch()
    F.mse_loss(model(x), y).backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def test_what_needs_more_than_a_part_says_so() -> None:
    def rank_tries(rank: int, group: Any) -> list[str]:
        model = small()
        ShardedModule(model, group, zero=3)
        weight = model[0].weight
        attempts = [
            lambda: weight @ torch.ones(4, 2, dtype=torch.float64), lambda: weight.T, lambda: weight[0], lambda: weight.sum(dim=0),
            lambda: weight.mean(1), lambda: weight.view(-1), lambda: weight.std(), lambda: weight.flatten(), lambda: weight.data_ptr(),
            lambda: weight.detach().numpy(), lambda: weight.tolist(), lambda: pickle.dumps(model.state_dict()), lambda: weight.untyped_storage(),
            lambda: torch.linalg.norm(weight, 2), lambda: weight.norm(dim=1), lambda: torch.cat([weight, weight]), lambda: weight.max(dim=0),
            lambda: nn.utils.parameters_to_vector(model.parameters()), lambda: weight + model[2].weight, lambda: weight.argmax(),
            lambda: nn.init.sparse_(weight, 0.5), lambda: weight.max(), lambda: F.linear(batch()[0], weight), lambda: weight.detach().prod(),
            lambda: torch.einsum("ij,kj->ik", weight, weight), lambda: weight.__setitem__(0, 1.0), lambda: torch.eye(5, 4, out=weight.detach()),
        ]  # fmt: skip
        said = []
        for attempt in attempts:
            with pytest.raises((RuntimeError, ValueError)) as error:
                attempt()
            said.append(str(error.value))
        return said

    said, other = on_simulated(2, rank_tries)[::-1]
    assert [each for each in said + other if "this rank has rows" not in each] == []
    assert said[0] == (
        "matmul of 0.weight: this rank has rows 3 to 4 of 5. ml.whole(parameter) is all of it, "
        "with ml.whole(model): all of the model, and ml.save(...) writes it."
    )


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("Muon", lambda parameters: torch.optim.Muon([each for each in parameters if each.dim() == 2])),
        ("LBFGS", lambda parameters: torch.optim.LBFGS(parameters)),
        ("Adafactor", lambda parameters: torch.optim.Adafactor(parameters)),
    ],
)
def test_an_optimizer_that_needs_whole_matrices_is_refused(name: str, make: Callable[..., Any]) -> None:
    def rank_steps(rank: int, group: Any) -> str:
        model = small()
        made = ShardedModule(model, group, zero=2)
        backward(made, model, rank, 2)
        with pytest.raises(PartError) as error:
            make(model.parameters()).step(lambda: 0.0)
        return str(error.value)

    assert on_simulated(2, rank_steps)[0].startswith(
        f"{name} looks at whole parameters, and this rank has parts of them. Write optimizer = ml.whole(optimizer)"
    )


def test_what_a_number_or_an_elementwise_function_gives_is_that_of_the_whole() -> None:
    mask = torch.arange(20).view(5, 4) % 3 == 0
    functions: list[Callable[[Tensor], Any]] = [
        Tensor.sum, Tensor.mean, lambda w: w.detach().max(), lambda w: w.detach().amin(), lambda w: (w > 0).any(), lambda w: torch.isfinite(w).all(),
        lambda w: torch.count_nonzero(w.detach() > 0), lambda w: w.norm(), lambda w: torch.linalg.vector_norm(w, 3), lambda w: torch.norm(w.detach(), float("inf")),
        lambda w: w.norm(p=1), lambda w: (w * mask).sum(), lambda w: (mask * w).norm(), lambda w: torch.where(mask, w, 0).sum(),
        lambda w: w.masked_fill(mask, 2.0).mean(),
        lambda w: (1 - w.abs().sqrt() + w.exp() * torch.arange(4)).norm(), lambda w: w.clamp(min=torch.arange(5.0).view(5, 1)).sum(),
        lambda w: w.shape, lambda w: w.numel(), lambda w: w.dim(), lambda w: w.size(0), lambda w: len(w), lambda w: w.nbytes, lambda w: w.ndim,
        lambda w: torch.equal(w, w.clone()), lambda w: torch.allclose(w, w + 1), lambda w: w.float().dtype, lambda w: (w.detach() - 1).pow(2).sum().item(),
        lambda w: nn.init.kaiming_uniform_(w.detach(), generator=torch.Generator().manual_seed(1)).sum(),
        lambda w: nn.init.orthogonal_(w.detach(), generator=torch.Generator().manual_seed(1)).sum(),
        lambda w: nn.init.xavier_normal_(w.detach(), generator=torch.Generator().manual_seed(1)).norm(), lambda w: w.detach().copy_(torch.arange(20.0).view(5, 4)).sum(),
    ]  # fmt: skip
    expected = [function(copy.deepcopy(small()[0].weight)) for function in functions]

    def rank_asks(rank: int, group: Any) -> list[Any]:
        model = small()
        ShardedModule(model, group, zero=3)
        return [function(copy.deepcopy(model[0].weight)) for function in functions]

    for found in on_simulated(3, rank_asks):
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            if isinstance(one, Tensor) and one.is_floating_point():
                torch.testing.assert_close(one, other, rtol=1e-13, atol=0)
            else:
                assert one == other, number


def test_parts_along_another_dim_for_shards_of_tensor_parallelism() -> None:
    whole = torch.arange(12.0).view(3, 4)

    def rank_asks(rank: int, group: Any) -> Any:
        place = PartPlace(name="w", shape=whole.shape, dim=1, sizes=(3, 0, 1), group=group)
        part = made_part(place.part_of(whole, rank).clone(), place)
        part.mul_(torch.tensor([1.0, 2.0, 3.0, 4.0])).add_(torch.ones(3, 1))
        return whole_tensor(part), part.norm(), part.max()

    expected = whole * torch.tensor([1.0, 2.0, 3.0, 4.0]) + 1
    for each, norm, largest in on_simulated(3, rank_asks):
        assert torch.equal(each, expected) and norm == expected.norm() and largest == expected.max()


def test_gradients_are_those_of_the_whole_batch_and_none_where_one_device_has_none() -> None:
    model = small()
    expected = expected_gradients(model)

    def rank_computes(rank: int, group: Any) -> Any:
        model = small()
        model[2].bias.requires_grad_(False)
        made = ShardedModule(model, group, zero=3)
        backward(made, model, rank, 3)
        frozen, norms = model[2].bias.grad, list[Tensor]()
        model[0].weight.register_hook(lambda gradient: norms.append(gradient.norm()))
        model[0].bias.register_hook(lambda gradient: gradient * 2)
        model[2].bias.requires_grad_(True)
        model.zero_grad()
        backward(made, model, rank, 3)
        again = torch.autograd.grad(model[0].weight.pow(2).sum(), [model[0].weight])[0]
        model[0].bias.grad.div_(2)
        assert norms[0] == pytest.approx(float(expected["0.weight"].norm()))
        return (
            frozen,
            whole_gradients(model),
            again.norm(),
            type(model[0].weight.grad),
            model[0].weight.grad is model[0].weight.grad,
        )

    for frozen, found, again, kind, is_same in on_simulated(3, rank_computes):
        assert frozen is None and kind is PartTensor and is_same
        assert again == pytest.approx(2 * float(model[0].weight.detach().norm()))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("zero", [2, 3])
def test_a_replica_whose_only_sample_counts_nothing_adds_nothing(zero: int) -> None:
    x, y = batch()
    model = small()
    F.mse_loss(model(x[:1]), y[:1]).backward()

    def rank_computes(rank: int, group: Any) -> Any:
        mine = small()
        made = ShardedModule(mine, group, zero=zero)
        took(TakenShare((1, 0), rank))
        F.mse_loss(made.call(mine, (x[:1],), {}), y[:1] + rank).backward()
        return whole_gradients(mine)

    for found in on_simulated(2, rank_computes):
        torch.testing.assert_close(
            found, {name: each.grad for name, each in model.named_parameters()}, rtol=1e-13, atol=0
        )


def test_zero_three_frees_the_whole_after_a_forward_and_in_backward_block_by_block() -> None:
    def rank_computes(rank: int, group: Any) -> Any:
        model = small()
        made = ShardedModule(model, group, zero=3)
        seen: list[weakref.ref[Tensor]] = []
        for each in (model[0], model[2]):
            each.register_forward_pre_hook(
                lambda module, _: seen.append(weakref.ref(module.weight.untyped_storage()))
            )
        x, y = batch()
        took(TakenShare((3, 3), rank))
        result = made.call(model, (x[3 * rank : 3 * rank + 3].requires_grad_(),), {})
        alive = [each() is not None for each in seen]
        F.mse_loss(result, y[3 * rank : 3 * rank + 3]).backward()
        return alive, whole_gradients(model), made.gatherer.again

    expected = expected_gradients(small())
    for alive, found, again in on_simulated(2, rank_computes):
        assert alive == [False, False] and again is None
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.last(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.last = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cells(x[:, None])[0][:, 0])


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        self.encoder, self.last = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.encoder(x[:, None])[:, 0])


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), nn.GELU(), nn.Linear(5, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + self.layers(2 * x)  # twice in one forward


class Keeping(nn.Module):
    """It keeps what it computed when it was made, and its graph, as torch.nn.utils.weight_norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.last = nn.Linear(4, 5).double(), nn.Linear(5, 3)
        self.kept = self.one.weight.square()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.one(x).tanh())


class Graph(nn.Module):
    """A sparse product, whose backward keeps what has no strides."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.sparse.mm(torch.eye(len(x), dtype=x.dtype).to_sparse(), self.one(x)))


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("kind", [Recomputed, Recurrent, Attending, Normed, Keeping, Graph])
def test_modules_of_many_kinds(kind: type[nn.Module], zero: int) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return kind().double()

    expected = expected_gradients(make())

    def rank_computes(rank: int, group: Any) -> dict[str, Tensor]:
        model = make()
        made = ShardedModule(model, group, zero=zero)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                made.call(model, (batch()[0],), {})
        backward(made, model, rank, 2)
        return whole_gradients(model)

    for found in on_simulated(2, rank_computes):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-14)


def test_a_gradient_penalty_by_a_second_backward() -> None:
    x = batch()[0]

    def penalty(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return (torch.autograd.grad(call(x).sum(), x, create_graph=True)[0].norm(dim=1) - 1).pow(2).mean()

    model = small()
    penalty(model, x).backward()
    expected = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}

    def rank_computes(rank: int, group: Any) -> Any:
        mine = small()
        made = ShardedModule(mine, group, zero=3)
        took(TakenShare((3, 3), rank))
        penalty(lambda x: made.call(mine, (x,), {}), x[3 * rank : 3 * rank + 3]).backward()
        return {name: each for name, each in whole_gradients(mine).items() if name in expected}

    for found in on_simulated(2, rank_computes):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


def test_a_gradient_of_parameters_has_no_second_derivative() -> None:
    def rank_computes(rank: int, group: Any) -> str:
        model = small()
        loss = ShardedModule(model, group, zero=3).call(model, (batch()[0],), {}).sum()
        with pytest.raises(TrainingError) as error:
            torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
        return str(error.value)

    for said in on_simulated(2, rank_computes):
        assert "a mean over replicas, which has no second derivative. Gradients of inputs have one" in said


def test_a_layer_that_one_replica_does_not_use_counts_zeros_there() -> None:
    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor, which: int) -> Tensor:
            return (self.first, self.second)[which](x)

    def rank_computes(rank: int, group: Any) -> Any:
        torch.manual_seed(0)
        model = Choosing()
        made = ShardedModule(model, group, zero=2)
        took(TakenShare((2, 2), rank))
        made.call(model, (torch.ones(2, 4), rank), {}).sum().backward()
        return whole_gradients(model)

    for found in on_simulated(2, rank_computes):
        assert all(torch.equal(each, torch.ones_like(each)) for each in found.values()) and len(found) == 4


def test_blocks_of_one_size_that_ranks_call_in_another_order_are_refused() -> None:
    def rank_calls(rank: int, group: Any) -> str:
        blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        made = ShardedModule(blocks, group, zero=3)
        with pytest.raises(PartError) as error:
            made.call(blocks[rank], (torch.ones(2, 4),), {})
        return str(error.value)

    assert on_simulated(2, rank_calls)[1] == (
        "This rank gathers 1.weight, and another one something else: ranks call the same modules, in the same order. "
        "Call it on every rank, and count its result zero times where it is not wanted."
    )


@pytest.mark.parametrize("options", [{"foreach": False}, {"fused": True}])
def test_whole_states_are_loaded_on_every_rank_before_the_first_step_and_after(
    options: dict[str, bool],
) -> None:
    x, y = batch()

    def step(model: nn.Module, call: Callable[[Tensor], Tensor], optimizer: Any, rows: slice) -> None:
        optimizer.zero_grad()
        F.mse_loss(call(x[rows]), y[rows]).backward()
        optimizer.step()

    model = small()
    optimizer = adamw(**options)(model.parameters())
    step(model, model, optimizer, slice(None))
    state, optimizer_state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    step(model, model, optimizer, slice(None))

    def rank_loads(rank: int, group: Any) -> Any:
        mine = small()
        optimizer = adamw(**options)(mine.parameters())  # before it is made parallel
        made = ShardedModule(mine, group, zero=3)
        rows = slice(3 * rank, 3 * rank + 3)
        found = []
        took(TakenShare((3, 3), rank))
        for _ in range(2):
            mine.load_state_dict(state)
            optimizer.load_state_dict(copy.deepcopy(optimizer_state))
            step(mine, lambda x: made.call(mine, (x,), {}), optimizer, rows)
            found.append(whole_state(mine))
        kinds = {type(each["exp_avg"]) for each in optimizer.state.values()}
        return found, kinds

    for found, kinds in on_simulated(2, rank_loads):
        assert kinds == {PartTensor}
        for each in found:
            torch.testing.assert_close(
                each, {name: each.detach() for name, each in model.named_parameters()}, rtol=1e-12, atol=1e-15
            )


def test_what_the_scaler_of_one_rank_finds_all_know() -> None:
    def rank_scales(rank: int, group: Any) -> Any:
        model = small().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ShardedModule(model, group, zero=2)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        before = whole_state(model)
        for each in model.parameters():
            each.grad = torch.ones_like(each)
        if rank == 1:
            plain(model[0].weight.grad)[0, 0] = float("inf")
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        after = whole_state(model)
        return scaler.get_scale(), all(torch.equal(before[name], after[name]) for name in before)

    assert on_simulated(2, rank_scales) == [(2.0, True)] * 2


def test_whole_gives_parameters_and_gradients_and_writes_back() -> None:
    expected = expected_gradients(small())

    def rank_looks(rank: int, group: Any) -> Any:
        model = small()
        made = ShardedModule(model, group, zero=3)
        backward(made, model, rank, 2)
        weight: Any = model[0].weight
        with made.whole():
            found = {name: each.grad.clone() for name, each in model.named_parameters()}
            kinds = {type(each) for each in model.parameters()}
            norms = weight.norm(dim=1).detach()
            assert not made.call(model, (batch()[0],), {}).requires_grad
            weight.data *= 2
            weight.grad.zero_()
        assert model[0].weight is weight and type(weight) is PartParameter
        return (
            found,
            kinds,
            norms,
            float(weight.norm().detach()),
            weight.grad.abs().max(),
            dict(made.tensors())["0.weight"](),
        )

    for found, kinds, norms, after, zero, saved in on_simulated(2, rank_looks):
        assert kinds == {nn.Parameter} and zero == 0
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
        assert after == pytest.approx(2 * float(norms.norm()), rel=1e-12)
        torch.testing.assert_close(saved, small()[0].weight.detach() * 2)


def test_an_average_from_before_and_a_target_network_are_right_by_gathering() -> None:
    model = small()
    plus_one = {name: each + 1 for name, each in model.state_dict().items()}

    def rank_averages(rank: int, group: Any) -> Any:
        mine = small()
        average, by_list, target = (
            copy.deepcopy(mine),
            [each.detach().clone() for each in mine.parameters()],
            small(),
        )
        ShardedModule(mine, group, zero=3)
        mine.load_state_dict(plus_one)
        with torch.no_grad():
            for one, other in zip(average.parameters(), mine.parameters(), strict=True):
                one.lerp_(other, 0.5)
            cast(Any, torch)._foreach_lerp_(by_list, list(mine.parameters()), 0.5)
        target.load_state_dict(mine.state_dict())
        return average.state_dict(), by_list, target.state_dict()

    half = {name: each + 0.5 for name, each in model.state_dict().items()}
    for average, by_list, target in on_simulated(2, rank_averages):
        torch.testing.assert_close(average, half)
        torch.testing.assert_close(by_list, list(half.values()))
        torch.testing.assert_close(target, plus_one)


def test_an_optimizer_with_averages_keeps_those_of_its_parts() -> None:
    """Saved whole, and taken up from whole ones."""

    def trained(model: nn.Module, optimizer: Averaged, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            sum(each.pow(2).sum() for each in model.parameters()).backward()  # pyright: ignore[reportAttributeAccessIssue]
            optimizer.step()

    def averages_of(rank: int, group: Any | None) -> Any:
        model = small()
        if group:
            ShardedModule(model, group, zero=3)
        optimizer = Averaged(torch.optim.AdamW(model.parameters(), lr=0.1), 0.75)
        trained(model, optimizer, 2)
        saved = {
            key: [whole_tensor(each).detach().clone() for each in value] if key == "averages" else value
            for key, value in optimizer.state_dict().items()
        }
        again = Averaged(torch.optim.AdamW(model.parameters(), lr=0.1), 0.75)
        again.load_state_dict(saved)
        trained(model, again, 1)
        with again.averages():
            found = whole_state(model)
        return saved["averages"], found, whole_state(model)

    expected = averages_of(0, None)
    for found in on_simulated(2, averages_of):
        torch.testing.assert_close(found, expected)


def test_a_copy_of_the_module_computes_with_its_own_parts() -> None:
    def rank_copies(rank: int, group: Any) -> Any:
        model = small()
        model.execution = ShardedModule(model, group, zero=3)
        copied = copy.deepcopy(model)
        with torch.no_grad():
            copied[0].weight.zero_()
        result = copied(batch()[0])  # by itself
        again = model.execution.call(model, (batch()[0],), {})
        return result.detach(), again.detach(), copied.execution._module is copied

    model = small()
    expected = model(batch()[0]).detach()
    with torch.no_grad():
        model[0].weight.zero_()
    for result, again, is_its_own in on_simulated(2, rank_copies):
        assert is_its_own
        torch.testing.assert_close(result, model(batch()[0]).detach())
        torch.testing.assert_close(again, expected)


def test_buffers_are_merged_and_draws_are_of_the_call() -> None:
    def rank_calls(rank: int, group: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        made = ShardedModule(model, group, zero=3)
        made.call(model, (batch()[0].float() + rank,), {})
        return (
            model[1].running_mean.clone(),
            int(model[1].num_batches_tracked),
            torch.randn(1),
            made.take_notes(),
        )

    (mean, count, drawn, _), (other, other_count, other_drawn, _) = on_simulated(2, rank_calls)
    assert torch.equal(mean, other) and count == other_count == 2 and torch.equal(drawn, other_drawn)


def test_draws_of_numpy_and_of_python_are_of_the_call_and_its_replica() -> None:
    before = random.getstate(), pickle.dumps(numpy.random.get_state())
    drawn: list[tuple[float, ...]] = []
    for draws in (CallDraws(0), CallDraws(1)):
        for _ in range(2):
            with draws.of_a_call():
                drawn.append((numpy.random.normal(), random.random(), float(torch.rand(()))))
    assert all(len(set(each)) == 4 for each in zip(*drawn, strict=True))
    assert before == (random.getstate(), pickle.dumps(numpy.random.get_state()))


def test_a_parameter_that_is_added_later_and_a_change_of_dtype() -> None:
    def rank_adds(rank: int, group: Any) -> Any:
        model = small()
        made = ShardedModule(model, group, zero=2)
        model[2] = nn.Linear(5, 3).double()
        model.float()
        made.call(model, (batch()[0].float(),), {}).sum().backward()
        return (
            {type(each) for each in model.parameters()},
            {each.grad.dtype for each in model.parameters()},
            model[0].weight.place.name,
        )

    assert on_simulated(2, rank_adds) == [({PartParameter}, {torch.float32}, "0.weight")] * 2


def test_changes_that_autograd_could_not_see_are_refused() -> None:
    class Changing(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(input)

    def rank_changes(rank: int, group: Any) -> list[str]:
        said = []
        model, changing = small(), Changing(4, 3).double()
        made = ShardedModule(model, group, zero=3)
        loss = made.call(model, (batch()[0].requires_grad_(),), {}).sum()
        with torch.no_grad():
            model[2].weight.add_(1)
        for attempt in (
            loss.backward,
            lambda: ShardedModule(changing, group, zero=2).call(changing, (batch()[0],), {}),
        ):
            with pytest.raises(PartError) as error:
                attempt()
            said.append(str(error.value).split(":")[0])
        return said

    assert on_simulated(2, rank_changes)[0] == [
        "A change in place, between a forward and its backward, of 2.weight",
        "A change in place, within forward, of weight",
    ]


def rank_of_processes() -> tuple[list[float], float]:
    found = ranks("dp=2,zero=3")
    model = net(seed=found.replica)
    made = ShardedModule(model, found.replicas, zero=found.plan.zero)
    share = TakenShare((4, 4), found.replica)
    took(share)
    rows = slice(share.start, share.start + 4)
    seen = train(model, lambda x: made.call(model, (x,), {}), rows, make=OPTIMIZERS["fused"])
    held = sum(plain(each.detach()).numel() for each in model.parameters())
    return seen, held / sum(each.numel() for each in model.parameters())


@pytest.mark.processes
def test_two_processes_give_what_one_device_gives() -> None:
    model = net()
    expected = train(model, model, slice(None), make=OPTIMIZERS["fused"])
    for seen, held in on_ranks(rank_of_processes, 2):
        assert seen == pytest.approx(expected, rel=1e-12) and held < 0.6


def rank_saves(path: str) -> tuple[dict[str, Tensor], list[bool]]:
    found = ranks("dp=2,zero=3")
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    made = ShardedModule(model, found.replicas, zero=3)
    backward(made, model, found.replica, 2)
    optimizer.step()
    dcp.save(
        {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)},
        checkpoint_id=f"{path}/saved",
    )
    whole = whole_state(model)
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    dcp.load({"model": model.state_dict()}, checkpoint_id=f"{path}/saved")
    return whole, [torch.equal(each, whole[name]) for name, each in whole_state(model).items()]


@pytest.mark.processes
def test_torchs_checkpoints_hold_parts(tmp_path: Any) -> None:
    whole, alike = on_ranks(rank_saves, 2, str(tmp_path))[0]
    assert all(alike)
    directory = TorchDirectory(tmp_path / "saved")
    for name, each in whole.items():
        assert torch.equal(directory.read(("model", name), (0,) * each.dim(), tuple(each.shape)), each)
    assert directory.tensors["optimizer", "state", "0.weight", "exp_avg"].shape == (5, 4)
