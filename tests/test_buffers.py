"""Buffers of replicas are those of one device that runs all their chunks one after another."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshloom as ml
from meshloom.comm.recording import RecordedGroup
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.core.buffer_rules import BufferRule
from meshloom.core.errors import MeshloomError
from meshloom.replica.buffers.merged_buffers import RunningStatistics
from meshloom.telemetry.traffic import ExpectedBytes

EXACT = {"rtol": 1e-12, "atol": 1e-12}  # moving averages are composed per replica and then over replicas


def inputs(*sizes: int, shape: tuple[int, ...] = (4,), seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, *shape, generator=generator, dtype=torch.float64) + 0.5 for size in sizes]


Loss = Callable[[nn.Module, Tensor], Tensor]


def total(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def backward(loss: Tensor) -> None:
    if loss.requires_grad:
        loss.backward()


class World:
    """Replicas of one model; `step` gives each its chunks, [replica][chunk]."""

    def __init__(
        self, build: Callable[[], nn.Module], size: int, loss: Loss = total, *, synchronised: bool = False,
        rules: Mapping[str, BufferRule] | None = None,
    ) -> None:  # fmt: skip
        self.loss = loss
        self.groups = [RecordedGroup(group, "dp") for group in simulated_groups(size)]
        self.models = [made(build) for _ in range(size)]
        self.statistics = [
            RunningStatistics(model, group, num_chunks=2, synchronised=synchronised, rules=rules or {})
            for model, group in zip(self.models, self.groups, strict=True)
        ]

    def step(self, chunks: Sequence[Sequence[Tensor]]) -> None:
        for model, statistics, mine in zip(self.models, self.statistics, chunks, strict=True):
            for x in mine:
                if len(x):
                    with statistics.chunk():
                        backward(self.loss(model, x))
        in_turns([each.finish for each in self.statistics])

    def notes(self) -> list[str]:
        notes = [each.take_notes() for each in self.statistics]
        assert all(each == notes[0] for each in notes)
        return notes[0]

    def buffers(self) -> dict[str, Tensor]:
        first, *others = [dict(model.named_buffers()) for model in self.models]
        for other in others:
            for name, each in first.items():
                assert torch.equal(each, other[name]) or each.isnan().any(), name
        return {name: each.clone() for name, each in first.items()}


def made(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().double()


def one_device(
    build: Callable[[], nn.Module], steps: Sequence[Sequence[Sequence[Tensor]]], loss: Loss = total
) -> dict[str, Tensor]:
    model = made(build)
    for chunks in steps:
        for x in (x for mine in chunks for x in mine):
            if len(x):
                backward(loss(model, x))
    return dict(model.named_buffers())


def check(
    build: Callable[[], nn.Module], steps: Sequence[Sequence[Sequence[Tensor]]], loss: Loss = total
) -> World:
    world = World(build, len(steps[0]), loss)
    for chunks in steps:
        world.step(chunks)
    found = world.buffers()
    for name, expected in one_device(build, steps, loss).items():
        torch.testing.assert_close(
            found[name], expected, **EXACT, msg=lambda text, name=name: f"{name}: {text}"
        )
    return world


def schedule(shape: tuple[int, ...] = (4,), steps: int = 3) -> list[list[list[Tensor]]]:
    """Three replicas of two chunks each, of uneven sizes; one chunk is empty."""
    sizes = [(3, 4), (2, 0), (5, 2)]
    return [
        [inputs(*mine, shape=shape, seed=10 * replica + step) for replica, mine in enumerate(sizes)]
        for step in range(steps)
    ]


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch norm 1d": (lambda: nn.BatchNorm1d(4), (4,)),
    "batch norm 2d": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3, momentum=0.3), nn.ReLU(), nn.BatchNorm2d(3)
        ),
        (1, 4, 4),
    ),
    "batch norm 3d": (lambda: nn.BatchNorm3d(2, affine=False), (2, 2, 3, 2)),
    "cumulative": (lambda: nn.Sequential(nn.BatchNorm1d(4, momentum=None), nn.BatchNorm1d(4)), (4,)),
    "momentum 0": (lambda: nn.BatchNorm1d(4, momentum=0.0), (4,)),
    "momentum 1": (lambda: nn.BatchNorm1d(4, momentum=1.0), (4,)),
    "instance norm": (lambda: nn.InstanceNorm1d(2, track_running_stats=True, momentum=0.2), (2, 5)),
    "instance norm without momentum": (
        lambda: nn.InstanceNorm2d(2, track_running_stats=True, momentum=None),
        (2, 3, 3),
    ),
    "untracked": (
        lambda: nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.BatchNorm1d(4)),
        (4,),
    ),
}


@pytest.mark.parametrize("case", list(NORMS))
def test_running_statistics_are_one_devices(case: str):
    build, shape = NORMS[case]
    assert not check(build, schedule(shape)).notes()


class TwiceOrNot(nn.Module):
    """One layer runs twice per forward, another only when the data says so, a third is frozen in evaluation
    mode."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.BatchNorm1d(4, momentum=0.4)
        self.sometimes = nn.BatchNorm1d(4, momentum=None)
        self.frozen = nn.BatchNorm1d(4)
        self.never = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        self.frozen.eval()
        x = self.twice(self.twice(x) + x)
        return self.frozen(self.sometimes(x) if len(x) % 2 else x)


def test_layers_that_run_twice_or_not_at_all():
    assert not check(TwiceOrNot, schedule()).notes()


def test_a_checkpointed_layer_counts_its_second_run_as_on_one_device():
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.norm, self.first(x), use_reentrant=False)

    check(Checkpointed, schedule())


def test_the_module_looks_unchanged_even_when_forward_fails():
    class Fails(nn.BatchNorm1d):
        def _check_input_dim(self, x: Tensor) -> None:  # type: ignore[override]
            if len(x) == 3:
                raise RuntimeError("stop")

    world = World(lambda: Fails(4), 2)
    model: Any = world.models[0]

    def look() -> tuple[Any, ...]:
        buffers = [id(each) for each in (model.running_mean, model.running_var, model.num_batches_tracked)]
        return model.momentum, *buffers, model.running_mean.clone(), sorted(vars(model))

    kept = look()
    for size in (3, 2):
        try:
            with world.statistics[0].chunk():
                model(inputs(size)[0])
        except RuntimeError:
            assert size == 3
        assert all(
            torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(kept, look(), strict=True)
        )
    in_turns([each.finish for each in world.statistics])
    assert id(model.running_mean) == kept[1] and not torch.equal(model.running_mean, kept[4])


def test_one_replica_is_left_alone():
    build = NORMS["batch norm 2d"][0]
    steps = [[inputs(3, 4, 2, shape=(1, 4, 4))]]
    world = World(build, 1)
    world.step(steps[0])
    for name, expected in one_device(build, steps).items():
        assert torch.equal(world.buffers()[name], expected)
    assert not world.groups[0].counts and world.statistics[0].expected_bytes() == ExpectedBytes()


def test_without_buffers_nothing_is_communicated():
    world = World(lambda: nn.Linear(4, 4), 3)
    world.step(schedule()[0])
    assert not world.groups[0].counts and world.statistics[0].expected_bytes() == ExpectedBytes()


@pytest.mark.parametrize("case", ["batch norm 2d", "declared"])
def test_predicted_bytes_are_counted_bytes(case: str):
    build, shape = NORMS.get(case, (Declared, (4,)))
    world = World(build, 3, rules=RULES)
    for steps, chunks in enumerate(schedule(shape), 1):
        world.step(chunks)
        expected = world.statistics[0].expected_bytes().after(steps=steps)
        assert world.groups[0].counts["all_gather"].bytes == expected.total("dp") > 0


class Declared(nn.Module):
    """Buffers that every forward changes, each in a way that a rule is for, and one that none does."""

    def __init__(self, *, norm: bool = True) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4) if norm else nn.Identity()
        self.register_buffer("mask", torch.ones(4, 4).tril().bool())
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("samples", torch.zeros((), dtype=torch.int32))
        self.register_buffer("average", torch.full((4,), 1000.0))
        self.register_buffer("touched", torch.ones(4))
        self.register_buffer("spectrum", torch.zeros(4, dtype=torch.complex128))
        self.register_buffer("least", torch.full((4,), torch.inf))
        self.register_buffer("latest", torch.zeros(4), persistent=False)
        self.register_buffer("ready", torch.tensor(False))
        self.register_buffer("undefined", torch.tensor(float("nan")))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls += 1
            self.samples = self.samples + len(x)
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.touched[len(x) % 4] = 0.8 * self.touched[len(x) % 4] + 1.0  # others stay
            self.spectrum.add_(torch.fft.fft(x.sum(0)).to(self.spectrum))
            self.least.data = torch.minimum(self.least, x.amin(0))
            self.latest.copy_(x[0])
            self.ready.fill_(True)
            self.undefined.copy_(x.sum())
        return self.norm(self.linear(x)) / self.average.clone()


def least(before: Tensor, left: Sequence[Tensor]) -> Tensor:
    return torch.stack([before, *left]).amin(0)


RULES: dict[str, BufferRule] = {
    "calls": "sum", "s*": "sum", "average": ml.ema(0.9), "touched": ml.ema(0.8), "least": least, "latest": "last",
}  # fmt: skip


def test_every_chunk_reads_what_the_step_found_and_what_chunks_leave_is_merged_by_the_rules():
    """By a plain loop; one device's, where the rule is that of the code."""
    world = World(Declared, 3, rules=RULES)
    reference = made(Declared)
    for number, chunks in enumerate(schedule()):
        world.step(chunks)
        filled = [x for mine in chunks for x in mine if len(x)]
        left: list[dict[str, Tensor]] = []
        before = {name: each.clone() for name, each in reference.named_buffers() if "norm" not in name}
        for x in filled:
            for name, each in before.items():
                reference.get_buffer(name).data = each.clone()
            total(reference, x)
            left.append({name: reference.get_buffer(name).clone() for name in before})
        touched = before["touched"].clone()
        for end, x in zip(left, filled, strict=True):
            at = len(x) % 4
            touched[at] = 0.8 * touched[at] + (end["touched"][at] - 0.8 * before["touched"][at])
        average = before["average"]
        for x in filled:
            average = 0.9 * average + 0.1 * x.mean(0)
        expected = {
            **left[-1], "average": average, "touched": touched, "calls": torch.tensor(5 * (number + 1)),
            "least": torch.stack([before["least"], *[x.amin(0) for x in filled]]).amin(0),
            "samples": before["samples"] + sum(map(len, filled)),
            "spectrum": before["spectrum"] + sum(torch.fft.fft(x.sum(0)) for x in filled),
        }  # fmt: skip
        found = world.buffers()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value.to(found[name]), **EXACT, msg=lambda text, name=name: f"{name}: {text}")  # fmt: skip
            reference.get_buffer(name).data = value.to(found[name])
        assert int(found["norm.num_batches_tracked"]) == 5 * (number + 1)
    [note] = world.notes()
    assert note.startswith("Of ready, undefined a step keeps what its last chunk left.")


def test_a_rule_that_is_a_function_is_called_for_one_chunk_too():
    world = World(Declared, 1, rules={"average": lambda before, left: before + len(left)})
    with world.statistics[0].chunk():
        total(world.models[0], inputs(3)[0])
    world.statistics[0].finish()
    assert torch.equal(world.buffers()["average"], torch.full((4,), 1001.0, dtype=torch.float64))


def test_rules_that_do_not_fit_are_refused_before_the_update():
    with pytest.raises(MeshloomError, match=re.escape("ml.ema(0.5), and it has torch.int64")):
        World(Declared, 3, rules={"calls": ml.ema(0.5)}).step(schedule()[0])
    with pytest.raises(
        MeshloomError,
        match=r"for average returned \[2, 4\]. It must return a tensor of the buffer's shape, \[4\]",
    ):
        World(Declared, 3, rules={"average": lambda before, left: torch.stack([before, before])}).step(
            schedule()[0]
        )
    with pytest.raises(MeshloomError, match="each replica sees a part of every chunk"):
        World(Declared, 3, rules={"calls": "sum"}, synchronised=True)


@pytest.mark.parametrize("replaced", [True, False])
def test_a_buffer_that_takes_another_shape_is_refused_by_name(replaced: bool):
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            if replaced:
                self.table = torch.arange(len(x), dtype=x.dtype)
            else:  # as torch's observers do
                self.table.resize_(4)
            return x

    with pytest.raises(
        MeshloomError, match=r"the buffer table, which was \[1\] of torch.float64. A buffer keeps its shape"
    ):
        World(Grows, 3).step(schedule()[0])


def test_a_layer_in_both_modes_is_reported():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            out = self.norm(x)
            with torch.no_grad():
                target = self.norm.eval()(x)
            self.norm.train()
            return out - target

    world = World(Both, 3)
    for chunks in schedule():
        world.step(chunks)
    assert "norm ran in evaluation mode" in world.notes()[0]
    assert int(world.buffers()["norm.num_batches_tracked"]) == 15


def test_with_joined_chunks_the_last_replicas_part_is_kept_and_that_is_said():
    world = World(lambda: Declared(norm=False), 2, synchronised=True)
    world.step([inputs(3, 2), inputs(2, 2, seed=5)])
    assert int(world.buffers()["calls"]) == 1
    [note] = world.notes()
    assert note.startswith(
        "Of calls, samples, average and 6 more a step keeps what its last chunk's last replica left."
    )


def test_layers_that_count_by_themselves_need_no_rule_with_joined_chunks():
    """Instance norms were refused for a rule that no job had declared."""
    world = World(lambda: nn.InstanceNorm1d(2, track_running_stats=True), 2, synchronised=True)
    world.step([inputs(3, shape=(2, 5)), inputs(2, shape=(2, 5), seed=5)])
    assert int(world.buffers()["num_batches_tracked"]) == 0


def test_a_buffer_that_is_written_and_then_replaced_by_its_old_value_is_as_the_step_found_it():
    class Replaces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("level", torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            old = self.level.clone()
            self.level += x.sum()
            self.level = old
            return x

    world = World(Replaces, 2)
    for chunks in schedule()[:2]:
        world.step(chunks[:2])
    assert torch.equal(world.buffers()["level"], torch.ones(2, dtype=torch.float64)) and not world.notes()
