"""A few replicas of a small model in lockstep with an exchange each, and the one device they are compared
with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.comm.group import Group
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.comm.windows import windows_of
from meshloom.core.step_shape import StepShape
from meshloom.exchange.all_reduce import AllReduce
from meshloom.exchange.alone import Alone
from meshloom.exchange.disjoint import Disjoint, OfSome
from meshloom.exchange.exchange import Exchange
from meshloom.exchange.local_sgd import LocalSGD, TakeMean, rounds_of
from meshloom.exchange.server import Server
from meshloom.exchange.shared import OneForAll
from meshloom.exchange.sparse_gradients import SparseGradients
from meshloom.exchange.units.unit_access import UnitAccess
from meshloom.exchange.units.unit_gathering import STEP
from meshloom.exchange.units.unit_slices import UnitParameters
from meshloom.exchange.zero import ZeroOne
from meshloom.exchange.zero_three import ZeroThree, slices_of
from meshloom.exchange.zero_two import ZeroTwo

Named = Sequence[tuple[str, nn.Parameter]]


def all_reduce_in_windows(named: Named, group: Group, **settings: Any) -> Exchange:
    """Gradients lie in memory that the other ranks see."""
    return AllReduce(named, group, windows=windows_of(group), **settings)


def one_copy(named: Named, group: Group, **settings: Any) -> Exchange:
    """Parameters too, once for all ranks."""
    windows = windows_of(group)
    assert windows
    return ZeroOne(
        named,
        group,
        windows=windows,
        copies=lambda buckets, group: OneForAll(buckets, group, windows),
        **settings,
    )


KINDS: dict[str, Callable[..., Exchange]] = {
    "all_reduce": AllReduce,
    "all_reduce_in_windows": all_reduce_in_windows,
    "zero": ZeroOne,
    "one_copy": one_copy,
    "one_server": partial(Server, num_servers=1),
    "two_servers": partial(Server, num_servers=2),
}


def alone(named: Named, group: Group, **settings: Any) -> Exchange:
    """Of one replica."""
    return Alone(named)


def zero_three(named: Named, group: Group, *, bucket_bytes: int, overlap: bool) -> Exchange:
    """All parameters are one unit."""
    units = [UnitParameters(name="", module=None, named=named)]
    return ZeroThree(units, group, group, replicas=group, overlap=overlap)


def local_steps(named: Named, group: Group, **settings: Any) -> Exchange:
    """Rounds of two steps."""
    return LocalSGD(named, named, group, local_steps=2, end=TakeMean())


def sparse(kind: Callable[..., Exchange], named: Named, group: Group, **settings: Any) -> Exchange:
    """Beside an exchange of this kind. The gradients of some tables arrive dense, and one is not used."""
    dense = [pair for pair in named if pair[0] not in TABLES]
    tables = [pair for pair in named if pair[0] in TABLES]
    inner = kind(dense, group, **settings)
    settings = {"slices": [], "kept": [], "sparse_only": [], "used_rows": lambda name: None}
    rows = SparseGradients(tables, group, inner.ownership, **settings)
    return Disjoint([OfSome(exchange=inner, named=dense), OfSome(exchange=rows, named=tables)])


TABLES = ("first.weight", "never.weight")
EVERY: dict[str, Callable[..., Exchange]] = {
    **KINDS,
    "alone": alone,
    "zero_two": partial(ZeroTwo, rounds=2),
    "zero_three": zero_three,
    "local_steps": local_steps,
    "sparse": partial(sparse, AllReduce),
    "sparse_zero": partial(sparse, ZeroOne),
}


class Net(nn.Module):
    """Two layers of odd sizes; `twice` is used twice, `never` not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.twice = nn.Linear(7, 7)
        self.never = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.last = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.twice(torch.tanh(self.twice(self.first(x)))) * self.scale)


def replicas(
    size: int,
    kind: str,
    *,
    bucket_bytes: int = 200,
    overlap: bool = True,
    groups: Sequence[Group] | None = None,
) -> list[tuple[Net, Exchange]]:
    """`size` equal models with hooks, and their exchanges."""
    made: list[tuple[Net, Exchange]] = []
    for group in groups or simulated_groups(size, of_a_host=True):
        torch.manual_seed(0)
        model = Net().double()
        exchange = EVERY[kind](
            list(model.named_parameters()), group, bucket_bytes=bucket_bytes, overlap=overlap
        )
        watch(model, exchange)
        made.append((model, exchange))
    return made


def watch(model: nn.Module, exchange: Exchange) -> None:
    """The exchange hears of gradients as they come."""
    for parameter in model.parameters():
        if parameter.requires_grad and (ready := exchange.hook(parameter)):
            parameter.register_post_accumulate_grad_hook(ready)


def backward(model: nn.Module, exchange: Exchange, chunks: Sequence[Tensor]) -> None:
    """Forward and backward of the sum of each chunk's loss."""
    exchange.begin(StepShape(chunks=len(chunks)))
    sliced = slices_of(exchange)
    with UnitAccess(sliced.gathering).computing(STEP) if sliced else nullcontext():
        for chunk in chunks:
            model(chunk).square().sum().backward()
            exchange.end_chunk()
    if not chunks:
        exchange.end_chunk()


def whole_gradients(world: Sequence[tuple[Net, Exchange]], weight: float) -> list[dict[str, Tensor | None]]:
    """Finish the step on every replica; whole gradients by name, as each of them sees them."""

    def finish(exchange: Exchange) -> dict[str, Tensor | None]:
        gradients = exchange.finish(weight)
        return gathered(exchange, gradients)

    return in_turns([partial(finish, exchange) for _, exchange in world])


def gathered(exchange: Exchange, gradients: list[Tensor | None]) -> dict[str, Tensor | None]:
    """Copies of whole gradients by name."""
    whole: dict[str, Tensor | None] = {}

    def emit(name: str, gradient: Tensor | None) -> None:
        whole[name] = None if gradient is None else gradient.clone()

    rounds = rounds_of(exchange)
    exchange.gather(gradients, rounds.mean(emit) if rounds else emit)
    return whole


def one_device(chunks: Sequence[Tensor], weight: float) -> dict[str, Any]:
    """Gradient of the mean over all chunks, by autograd alone."""
    torch.manual_seed(0)
    model = Net().double()
    for chunk in chunks:
        (model(chunk).square().sum() / weight).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def mean_of_replicas(shares: Sequence[Sequence[Tensor]]) -> dict[str, Any]:
    """Of the gradient of each replica's own mean."""
    found = [one_device(chunks, float(sum(map(len, chunks)))) for chunks in shares]
    return {
        name: None if each is None else sum(of[name] for of in found) / len(found)
        for name, each in found[0].items()
    }


def data(*sizes: int) -> list[Tensor]:
    """Chunks of these sizes, the same every time."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(size, 5, generator=generator, dtype=torch.float64) for size in sizes]


def assert_same(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    """Equal up to the order of sums in float64, and None in the same places."""
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        have = found[name]
        assert (have is None) == (want is None), name
        if want is not None:
            torch.testing.assert_close(
                have, want, rtol=1e-12, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}"
            )
