"""Compressed gradients are what a plain reference computes, and what is left out comes later."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshloom.comm.group import Group
from meshloom.comm.recording import RecordedGroup
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.core.step_shape import StepShape
from meshloom.exchange.all_reduce import AllReduce
from meshloom.exchange.buckets.bf16 import BF16
from meshloom.exchange.buckets.powersgd import PowerSGD
from meshloom.exchange.buckets.reduction import Reduction
from meshloom.exchange.buckets.topk import TopK
from meshloom.telemetry.traffic import Traffic
from meshloom.train.trainer import Trainer
from tests.exchange_world import data, watch
from tests.jobs import make_job

SIZE, STEPS = 3, 6


class Layers(nn.Module):
    """A matrix worth compressing, one that is not, a convolution's kernel, a vector, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 12)
        self.kernel = nn.Parameter(torch.randn(8, 12, 2))
        self.last = nn.Linear(16, 2)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.scale
        return self.last(torch.einsum("bi,oik->bok", hidden, self.kernel).flatten(1))


class World:
    """Replicas of `Layers` with one reduction, and their gradients in each step."""

    def __init__(
        self,
        reduction: Callable[[Group], Reduction],
        *,
        bucket_bytes: int = 10**6,
        groups: Sequence[Group] | None = None,
    ) -> None:
        self.models: list[Layers] = []
        self.exchanges: list[AllReduce] = []
        for group in groups or simulated_groups(SIZE):
            torch.manual_seed(0)
            model = Layers().double()
            exchange = AllReduce(
                list(model.named_parameters()),
                group,
                bucket_bytes=bucket_bytes,
                overlap=True,
                reduction=reduction,
            )
            watch(model, exchange)
            self.models.append(model)
            self.exchanges.append(exchange)

    def step(self, chunks: Sequence[Tensor], weight: float = 1.0) -> list[dict[str, Tensor | None]]:
        """What each replica sees of the mean, by name."""
        for model, exchange, chunk in zip(self.models, self.exchanges, chunks, strict=True):
            exchange.begin(StepShape())
            model(chunk).square().sum().backward()
        found = in_turns([partial(exchange.finish, weight) for exchange in self.exchanges])
        names = [piece.name for piece in self.exchanges[0].ownership.owned]
        return [
            {
                name: None if each is None else each.clone()
                for name, each in zip(names, gradients, strict=True)
            }
            for gradients in found
        ]


def own_gradients(chunk: Tensor) -> dict[str, Tensor]:
    """Of one replica, by autograd alone; flat."""
    torch.manual_seed(0)
    model = Layers().double()
    model(chunk).square().sum().backward()
    return {
        name: parameter.grad.reshape(-1)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def batches() -> list[list[Tensor]]:
    """Three uneven shares per step."""
    chunks = data(*[2 + number % 4 for number in range(SIZE * STEPS)])
    return [chunks[SIZE * step : SIZE * (step + 1)] for step in range(STEPS)]


# --- Against plain references.


def test_top_k_with_error_feedback_is_the_plain_loop() -> None:
    world = World(partial(TopK, share=0.2))
    names = [name for name, _ in reversed(list(Layers().named_parameters()))]  # a bucket is in reverse order
    errors = [
        torch.zeros(sum(each.numel() for each in Layers().parameters()), dtype=torch.float64)
        for _ in range(SIZE)
    ]
    for chunks in batches():
        mean = torch.zeros_like(errors[0])
        for rank, chunk in enumerate(chunks):
            mine = own_gradients(chunk)
            wanted = torch.cat([mine[name] for name in names]) / 7 + errors[rank]
            largest = sorted(range(len(wanted)), key=lambda place: -abs(float(wanted[place])))[
                : math.ceil(0.2 * len(wanted))
            ]
            sent = torch.zeros_like(wanted)
            sent[largest] = wanted[largest]
            errors[rank] = wanted - sent
            mean += sent
        for found in world.step(chunks, 7.0):
            whole = torch.cat([found[name] for name in names])  # type: ignore[misc]
            torch.testing.assert_close(whole, mean, rtol=1e-12, atol=1e-14)


def test_powersgd_with_error_feedback_is_the_plain_loop() -> None:
    """The reference starts from the product's first guess of Q, takes every product apart from it, and uses
    another way to orthonormal columns."""
    rank = 2
    world = World(partial(PowerSGD, rank=rank), bucket_bytes=10**6)
    shapes = {
        name: (each.shape[0], each.numel() // each.shape[0])
        for name, each in Layers().named_parameters()
        if each.ndim > 1
    }
    compressed = {name: (n, m) for name, (n, m) in shapes.items() if rank * (n + m) < n * m}
    assert set(compressed) == {"first.weight", "kernel"}
    errors = [
        {name: torch.zeros(n, m, dtype=torch.float64) for name, (n, m) in compressed.items()}
        for _ in range(SIZE)
    ]
    guesses: dict[str, Tensor] = {}
    for step, chunks in enumerate(batches()):
        mine = [own_gradients(chunk) for chunk in chunks]
        if step == 0:
            found = world.step(chunks)
            span = {name: found[0][name].view(shape) for name, shape in compressed.items()}  # type: ignore[union-attr]
            for name, (n, m) in compressed.items():
                assert torch.linalg.matrix_rank(span[name]) == rank
                total = sum(each[name].view(n, m) for each in mine)
                columns = _orthonormal(span[name])
                torch.testing.assert_close(span[name], columns @ (columns.T @ total), rtol=1e-9, atol=1e-12)
                guesses[name] = total.T @ columns
                for rank_, each in enumerate(mine):
                    errors[rank_][name] = each[name].view(n, m) - columns @ (
                        columns.T @ each[name].view(n, m)
                    )
            continue
        found = world.step(chunks)
        for name, (n, m) in compressed.items():
            wanted = [each[name].view(n, m) + errors[rank_][name] for rank_, each in enumerate(mine)]
            columns = _orthonormal(torch.stack([each @ guesses[name] for each in wanted]).sum(0))
            for rank_, each in enumerate(wanted):
                errors[rank_][name] = each - columns @ (columns.T @ each)
            expected = columns @ (columns.T @ torch.stack(wanted).sum(0))
            guesses[name] = torch.stack(wanted).sum(0).T @ columns
            for each in found:
                torch.testing.assert_close(each[name].view(n, m), expected, rtol=1e-8, atol=1e-11)  # type: ignore[union-attr]
        for name in mine[0].keys() - compressed.keys():
            torch.testing.assert_close(
                found[0][name], torch.stack([each[name] for each in mine]).sum(0), rtol=1e-12, atol=1e-13
            )


def _orthonormal(columns: Tensor) -> Tensor:
    """An orthonormal basis of what the columns span, by singular vectors."""
    left, sizes, _ = torch.linalg.svd(columns, full_matrices=False)
    return left[:, sizes > 1e-9 * sizes[0]]


def test_bf16_rounds_what_is_sent_and_sums_in_order() -> None:
    world = World(BF16)
    for chunks in batches():
        mine = [own_gradients(chunk) for chunk in chunks]
        for found in world.step(chunks, 7.0):
            for name, have in found.items():
                total = mine[0][name].bfloat16()
                for other in mine[1:]:
                    total = total + other[name].bfloat16()
                assert torch.equal(have, total.double() / 7.0), name  # type: ignore[arg-type]


METHODS: dict[str, Callable[[Group], Reduction]] = {
    "bf16": BF16,
    "powersgd": partial(PowerSGD, rank=2),
    "topk": partial(TopK, share=0.1),
}
WITH_ERRORS = ["powersgd", "topk"]


@pytest.mark.parametrize("kind", WITH_ERRORS)
def test_what_is_left_out_arrives_later(kind: str) -> None:
    """All that was sent in all steps, and the errors that are left, are all gradients: nothing is lost or
    sent twice."""
    world = World(METHODS[kind], bucket_bytes=500)
    sent: dict[str, Tensor] = {}
    wanted: dict[str, Tensor] = {}
    for chunks in batches():
        for chunk in chunks:
            for name, each in own_gradients(chunk).items():
                wanted[name] = wanted.get(name, torch.zeros_like(each)) + each
        for name, each in world.step(chunks)[0].items():
            assert each is not None
            sent[name] = sent.get(name, torch.zeros_like(each)) + each
    left = _errors(world)
    assert max(float(each.abs().max()) for each in left.values()) > 0.01
    for name, each in wanted.items():
        torch.testing.assert_close(sent[name] + left[name], each, rtol=1e-9, atol=1e-11)


def _errors(world: World) -> dict[str, Tensor]:
    """Errors that all replicas keep, added up."""
    total: dict[str, Tensor] = {}
    for exchange in world.exchanges:
        reduction: Any = exchange._reduction
        for bucket, flat in zip(exchange._buckets.buckets, reduction._errors._errors, strict=True):
            for entry in bucket.entries:
                total[entry.name] = (
                    total.get(entry.name, torch.zeros(entry.stop - entry.start, dtype=flat.dtype))
                    + flat[entry.start : entry.stop]
                )
    return total


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("bucket_bytes", [1, 500, 10**6])
def test_all_replicas_get_the_same_bits_and_bytes_are_those_of_the_formula(
    kind: str, bucket_bytes: int
) -> None:
    groups = [RecordedGroup(group, "dp") for group in simulated_groups(SIZE)]
    world = World(METHODS[kind], bucket_bytes=bucket_bytes, groups=groups)
    for chunks in batches():
        found = world.step(chunks)
        for other in found[1:]:
            assert all(torch.equal(found[0][name], each) for name, each in other.items())  # type: ignore[arg-type]
    for group, exchange in zip(groups, world.exchanges, strict=True):
        assert exchange.expected_bytes().after(steps=STEPS) == Traffic.of({"dp": group.counts})


# --- Through plans.


COMPRESSED = ["bf16", "powersgd:2", "topk:0.05"]
SLOW = pytest.mark.slow


@pytest.mark.parametrize("compress", COMPRESSED)
@pytest.mark.parametrize(
    "inner",
    ["", pytest.param(",pp=2,microbatches=2", marks=SLOW), pytest.param(",tp=2,microbatches=2", marks=SLOW)],
)
@pytest.mark.long
def test_replicas_stay_the_same_and_bytes_are_predicted(compress: str, inner: str) -> None:
    with Trainer(
        make_job("gpt", "adamw", steps=5),
        f"dp=3,compress={compress},bucket_bytes=2000{inner}",
        devices="simulated",
    ) as trainer:
        summary = trainer.fit()  # which compares the replicas' bits at the end
    assert summary.predicted == summary.counted


# --- A planted mistake.
