"""Optimizers on slices and on divided whole parameters do what the user's own loop does on one device."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from exchange_world import KINDS, Net, data, watch
from test_reach import ALL, WHOLE, Lamb, NeedsSome, OwnList, Together
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from meshloom.checkpoint.checkpoint import Checkpoint
from meshloom.checkpoint.writing.parallel import parallel
from meshloom.checkpoint.writing.saving import save
from meshloom.comm.group import Group
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.core.errors import CheckpointError, JobError
from meshloom.core.job import Job, NamedParameters
from meshloom.core.step_shape import StepShape
from meshloom.exchange.exchange import Exchange
from meshloom.optimizer.updater import Updater
from tests.covering import few
from tests.saving_jobs import whole_pieces

Build = Callable[[NamedParameters], Any]


def job(optimizer: Build, **settings: Any) -> Job:
    unused: Any = lambda *_: None  # noqa: E731
    return Job(model=unused, loss=unused, optimizer=optimizer, data=unused, batch_size=9, steps=1, **settings)


def matrices_and_rest(named: NamedParameters) -> list[Optimizer]:
    matrices = [(name, each) for name, each in named if each.ndim == 2]
    rest = [(name, each) for name, each in named if each.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


def decay_groups(named: NamedParameters) -> Optimizer:
    decayed = [(name, each) for name, each in named if each.ndim > 1]
    rest = [(name, each) for name, each in named if each.ndim < 2]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.3}, {"params": rest, "lr": 0.05}], lr=0.01
    )


BUILDS: dict[str, Build] = {
    **{name: lambda named, name=name: getattr(torch.optim, name)(named) for name in ALL if name != "Muon"},
    "momentum": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9, nesterov=True),
    "initial state": lambda named: torch.optim.Adagrad(named, lr=0.1, initial_accumulator_value=0.5),
    "decay groups": decay_groups,
    "muon and adamw": matrices_and_rest,
    "trust ratio": lambda named: Lamb([each for _, each in named]),
    "together": lambda named: Together(
        [each for _, each in named if not (each.shape == (3, 3) or each.shape == (3,))]
    ),
    "own list": lambda named: OwnList([each for _, each in named]),
    "some frozen": lambda named: torch.optim.Adam([pair for pair in named if "twice" not in pair[0]]),
}


def job_of(name: str, **settings: Any) -> Job:
    """The one of these optimizers, with what a job says of it."""
    return job(BUILDS[name], per_parameter=name == "trust ratio", **settings)


SPLITS = [3, 1, 2, 3]  # samples of each replica's chunk
STEPS = 4


class World:
    """Replicas of one model with their updaters, stepped in lockstep."""

    def __init__(self, the_job: Job, kind: str, size: int = 4, dtype: torch.dtype = torch.float64) -> None:
        self.members: list[tuple[Net, Exchange, Updater]] = []
        for group in simulated_groups(size, of_a_host=True):
            torch.manual_seed(0)
            model = Net().to(dtype)
            named = list(model.named_parameters())
            exchange = KINDS[kind](named, group, bucket_bytes=200, overlap=True)
            watch(model, exchange)
            self.members.append((model, exchange, Updater(the_job, named, exchange.ownership)))

    def step(self, chunks: Sequence[Tensor], loss: float = 1.0) -> list[float | None]:
        weight = sum(len(chunk) for chunk in chunks)
        for (model, exchange, _), chunk in zip(self.members, chunks, strict=True):
            exchange.begin(StepShape())
            model(chunk).square().sum().backward()

        def rank(exchange: Exchange, updater: Updater) -> float | None:
            gradients = exchange.finish(float(weight))
            norm = updater.update(gradients, loss)
            exchange.publish()
            return None if norm is None else float(norm)

        return in_turns([partial(rank, exchange, updater) for _, exchange, updater in self.members])

    def parameters(self) -> dict[str, Tensor]:
        first, *others = [
            {name: each.detach().clone() for name, each in model.named_parameters()}
            for model, _, _ in self.members
        ]
        assert all(torch.equal(first[name], other[name]) for other in others for name in first)
        return first

    def checkpoint(self) -> Saved:
        return Saved([updater.state.save() for _, _, updater in self.members])

    def load(self, saved: Saved, parameters: dict[str, Tensor]) -> None:
        for model, _, updater in self.members:
            with torch.no_grad():
                for name, each in model.named_parameters():
                    each.copy_(parameters[name])
            updater.state.load(saved.read, saved.shapes, saved.values)


class Saved:
    """What all ranks together gave to a checkpoint: every element once or the same."""

    def __init__(self, states: Sequence[tuple[list[Any], dict[str, Any]]]) -> None:
        assert all(json.dumps(values) == json.dumps(states[0][1]) for _, values in states)
        self.values = json.loads(json.dumps(states[0][1]))
        self.tensors: dict[str, Tensor] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        filled: dict[str, Tensor] = {}
        for piece in (piece for pieces, _ in states for piece in pieces):
            count = torch.Size(piece.shape).numel()
            whole = self.tensors.setdefault(piece.key, torch.zeros(count, dtype=piece.tensor.dtype))
            assert piece.tensor.ndim == 1 and len(piece.tensor) == piece.stop - piece.start
            whole[piece.start : piece.stop] = piece.tensor
            filled.setdefault(piece.key, torch.zeros(count, dtype=torch.bool))[piece.start : piece.stop] = (
                True
            )
            assert self.shapes.setdefault(piece.key, tuple(piece.shape)) == tuple(piece.shape)
        assert all(bool(each.all()) for each in filled.values())

    def read(self, key: str, start: int, stop: int) -> Tensor:
        return self.tensors[key][start:stop]


def one_device(
    the_job: Job, steps: int = STEPS, dtype: torch.dtype = torch.float64
) -> tuple[dict[str, Tensor], list[float]]:
    """The loop that a user writes; the chunks' gradients are summed in the replicas' order."""
    torch.manual_seed(0)
    model = Net().to(dtype)
    made = the_job.optimizer(list(model.named_parameters()))
    scheduler = the_job.scheduler(made) if the_job.scheduler else None
    norms: list[float] = []
    for step in range(steps):
        model.zero_grad()
        for chunk in batch(step, dtype):
            model(chunk).square().sum().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(sum(SPLITS))
        if the_job.clip_grad_norm:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), the_job.clip_grad_norm)))
        for optimizer in made if isinstance(made, list) else [made]:
            optimizer.step()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(loss_of(step))
        elif scheduler:
            scheduler.step()
    return {name: each.detach() for name, each in model.named_parameters()}, norms


def batch(step: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [chunk.to(dtype) * (0.5 + step) for chunk in data(*SPLITS)]


def loss_of(step: int) -> float:
    return [3.0, 2.0, 2.5, 2.6, 2.7, 2.8][step]


def trained(
    the_job: Job, kind: str, steps: int = STEPS, dtype: torch.dtype = torch.float64
) -> tuple[World, list[float | None]]:
    world = World(the_job, kind, dtype=dtype)
    return world, [world.step(batch(step, dtype), loss_of(step))[0] for step in range(steps)]


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], kind: str = "all_reduce") -> None:
    """The same bits. Slices: up to rounding, as the last elements of a tensor go through other instructions
    than the rest."""
    for name, each in expected.items():
        if kind == "all_reduce":
            assert torch.equal(found[name], each), f"{name} differs by {(found[name] - each).abs().max()}"
        else:
            # a few steps, one unit in the last place each, of values around 1
            tolerance = 100 * torch.finfo(each.dtype).eps
            torch.testing.assert_close(
                found[name],
                each,
                rtol=tolerance,
                atol=tolerance,
                msg=lambda text, name=name: f"{name}: {text}",
            )


LOOK_AT_ALL = ("together", "own list")  # which one copy is not for: see replica/exchanges/sharing.py


# one that can work on slices, groups of its own, and one that needs whole parameters
UNDER_ALL = ("AdamW", "decay groups", "muon and adamw")


@cache
def on_one_device(name: str) -> dict[str, Tensor]:
    return one_device(job_of(name))[0]


@pytest.mark.covering("-zero", "muon and adamw-two_servers")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if name in UNDER_ALL else pytest.mark.long)
        for name in BUILDS
        for kind in KINDS
        if kind != "one_copy" or name not in LOOK_AT_ALL
        if "server" not in kind or name != "together"  # which cannot step on nothing, as a worker has it
    ],
)
@pytest.mark.every
def test_every_optimizer_does_what_it_does_on_one_device(name: str, kind: str):
    expected = on_one_device(name)
    world, norms = trained(job_of(name), kind)
    assert_equal(world.parameters(), expected, kind)
    assert norms == [None] * STEPS


@pytest.mark.parametrize("name", ["AdamW", "decay groups", "momentum"])
def test_slices_in_float32_too(name: str):
    the_job = job_of(name)
    expected, _ = one_device(the_job, dtype=torch.float32)
    world, _ = trained(the_job, "zero", dtype=torch.float32)
    assert_equal(world.parameters(), expected, "zero")


@pytest.mark.long
def test_state_is_divided_among_the_ranks():
    for name in ("AdamW", "Adafactor", "trust ratio", "muon and adamw"):
        world, _ = trained(job_of(name), "zero")
        held = [
            sum(each.tensor.numel() for held in updater.updated.held for each in held)
            for _, _, updater in world.members
        ]
        total = sum(each.numel() for each in world.members[0][0].parameters())
        assert sum(held) == total and max(held) < total / 2, (name, held)


@pytest.mark.long
def test_gradients_belong_to_the_exchange_afterwards():
    for kind in KINDS:
        world, _ = trained(job(BUILDS["muon and adamw"]), kind, steps=1)
        for model, _, updater in world.members:
            kept = {id(each): each.grad for each in model.parameters()}
            assert all(
                target is None or id(target) in kept or target.grad is None
                for target in updater.updated.targets
            )


@pytest.mark.covering("0.05")
@pytest.mark.parametrize("kind", few(KINDS, 2))
@pytest.mark.parametrize("largest", [0.05, 1e6])
def test_clipping_is_torchs_over_the_whole_model(kind: str, largest: float):
    the_job = job(BUILDS["AdamW"], clip_grad_norm=largest)
    expected, expected_norms = one_device(the_job)
    world, norms = trained(the_job, kind)
    assert norms == pytest.approx(expected_norms, rel=1e-12)  # order of the sum
    for name, each in world.parameters().items():
        torch.testing.assert_close(each, expected[name], rtol=1e-10, atol=1e-12)


@pytest.mark.covering("zero", "one_server")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long
def test_schedulers_step_once_per_update(kind: str):
    schedules: list[Callable[[Any], Any]] = [
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: step / 3),  # starts at 0
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10),
        lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    ]
    for schedule in schedules:
        the_job = job(BUILDS["AdamW"], scheduler=schedule)
        expected, _ = one_device(the_job)
        world, _ = trained(the_job, kind)
        assert_equal(world.parameters(), expected, kind)


@pytest.mark.long
def test_several_optimizers_and_schedulers():
    schedule: Any = lambda made: [lr_scheduler.StepLR(each, 1, 0.5) for each in made]  # noqa: E731
    world, _ = trained(job(matrices_and_rest, scheduler=schedule), "zero", steps=2)
    for _, _, updater in world.members:
        assert updater.learning_rates() == [0.02 / 4, 0.01 / 4]


RESUMED = [
    "AdamW",
    "initial state",
    "ASGD",
    "Rprop",
    "Adafactor",
    "muon and adamw",
    "trust ratio",
    "together",
    "decay groups",
    "NAdam",
]
SIZES = [
    ("all_reduce", 4, "zero", 4),
    ("zero", 4, "all_reduce", 4),
    ("zero", 4, "zero", 4),
    ("zero", 4, "zero", 3),
]


@pytest.mark.covering("AdamW-zero-4-all_reduce-4", "Adafactor-all_reduce-4", "muon and adamw")
@pytest.mark.long
@pytest.mark.parametrize(("kind", "size", "kind2", "size2"), SIZES)
@pytest.mark.parametrize("name", RESUMED)
def test_resuming_is_bit_exact_under_another_division(
    name: str, kind: str, size: int, kind2: str, size2: int
):
    schedule: Any = lambda made: [  # noqa: E731
        lr_scheduler.CosineAnnealingLR(each, 10) for each in (made if isinstance(made, list) else [made])
    ]
    the_job = job_of(name, scheduler=schedule)
    first = World(the_job, kind, size)
    for step in range(2):
        first.step(merged(batch(step), size))
    second = World(the_job, kind2, size2)
    second.load(first.checkpoint(), first.parameters())
    assert first.members[0][2].learning_rates() == second.members[0][2].learning_rates()
    gathered = second.checkpoint()
    reference = first.checkpoint()
    assert gathered.values == reference.values and gathered.shapes == reference.shapes
    assert all(
        torch.equal(each, gathered.tensors[key]) and each.dtype == gathered.tensors[key].dtype
        for key, each in reference.tensors.items()
    )
    if size == size2:  # otherwise gradients are summed in another order
        for step in range(2, 4):
            first.step(merged(batch(step), size))
            second.step(merged(batch(step), size))
        assert_equal(second.parameters(), first.parameters(), "all_reduce" if kind == kind2 else "zero")


def test_state_goes_through_a_checkpoint_on_disk(tmp_path: Path):
    the_job = job(matrices_and_rest, scheduler=lambda made: lr_scheduler.StepLR(made[1], 1, 0.5))
    first, _ = trained(the_job, "zero", steps=2)

    def saved(model: Net, updater: Updater, group: Group) -> Path:
        pieces, values = updater.state.save()
        return save(
            tmp_path,
            2,
            write=parallel(whole_pieces(model.state_dict()), pieces),
            values=values,
            fingerprint={},
            plan_text="dp=4,zero=1",
            group=group,
            keep=1,
        )

    ranks = zip(first.members, simulated_groups(4), strict=True)
    opened = Checkpoint.open(
        in_turns([partial(saved, model, updater, group) for (model, _, updater), group in ranks])[0]
    )
    second = World(the_job, "all_reduce", 2)
    shapes = {key: opened.shape(key) for key in opened.keys()}  # noqa: SIM118
    for model, _, updater in second.members:
        model.load_state_dict(opened.weights())
        updater.state.load(opened.read, shapes, opened.values)
    reference, found = first.checkpoint(), second.checkpoint()
    assert found.values == reference.values
    assert all(torch.equal(each, found.tensors[key]) for key, each in reference.tensors.items())


def merged(chunks: list[Tensor], size: int) -> list[Tensor]:
    return chunks if size == len(chunks) else [*chunks[: size - 1], torch.cat(chunks[size - 1 :])]


class PlainState(Optimizer):
    """Elementwise, with plain numbers in its state, its group and beside its parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01, "calls": 0, "warm": (1, 2.5)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["all"]["calls"] = self.state["all"].get("calls", 0) + 1
        for group in self.param_groups:
            group["calls"] += 1
            for each in group["params"]:
                if each.grad is not None:
                    state = self.state[each]
                    state["step"] = state.get("step", 0) + 1
                    state["mode"] = None if state["step"] == 1 else "late"
                    each.sub_(each.grad * group["lr"] / state["step"])


@pytest.mark.long
def test_plain_state_is_saved_from_whoever_has_it():
    the_job = job(lambda named: PlainState([each for _, each in named]), elementwise=True)
    first, _ = trained(the_job, "zero", steps=2)
    saved = first.checkpoint()
    for kind in KINDS:
        second = World(the_job, kind)
        second.load(saved, first.parameters())
        optimizer = second.members[0][2]._optimizers[0]
        assert (
            optimizer.param_groups[0]["calls"] == 2
            and optimizer.param_groups[0]["warm"] == (1, 2.5)
            and optimizer.state["all"] == {"calls": 2}
        )
        states = [each for key, each in optimizer.state.items() if isinstance(key, Tensor)]
        assert states and all(each == {"step": 2, "mode": "late"} for each in states)
    first.step(batch(2))
    second.step(batch(2))
    assert_equal(second.parameters(), first.parameters(), "zero")


def test_tensor_learning_rate_is_restored_in_place():
    the_job = job(
        lambda named: torch.optim.AdamW(named, lr=torch.tensor(0.01)),
        scheduler=lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.5),
    )
    first, _ = trained(the_job, "zero", steps=2)
    second = World(the_job, "all_reduce")
    second.load(first.checkpoint(), first.parameters())
    for world in (first, second):
        world.step(batch(2))
    assert_equal(second.parameters(), first.parameters(), "zero")
    assert second.members[0][2].learning_rates() == pytest.approx([0.01 / 8])


@pytest.mark.covering("<lambda>0", "<lambda>4", "<lambda>6")
@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 3], 0.1),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [
                lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
                lr_scheduler.CosineAnnealingLR(optimizer, 9),
            ],
            [2],
        ),
        lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2, cycle_momentum=False),
        lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, [lambda step: 0.9**step]),
        lambda optimizer: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.ConstantLR(optimizer, 0.5, 3)]
        ),
        lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
        lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 5),
    ],
)
@pytest.mark.long
def test_schedulers_resume_where_they_were(schedule: Callable[[Any], Any]):
    the_job = job(BUILDS["AdamW"], scheduler=schedule)
    whole, _ = trained(the_job, "all_reduce", steps=5)
    first, _ = trained(the_job, "zero", steps=3)
    second = World(the_job, "all_reduce")
    second.load(first.checkpoint(), first.parameters())
    for step in range(3, 5):
        second.step(batch(step), loss_of(step))
    assert second.members[0][2].learning_rates() == whole.members[0][2].learning_rates()
    assert_equal(second.parameters(), whole.parameters(), "zero")


@pytest.mark.long
def test_the_users_answer_decides():
    class Mine(torch.optim.AdamW):
        pass

    def lengths(world: World) -> set[bool]:
        return {
            each.tensor.numel() == torch.Size(each.shape).numel()
            for _, _, updater in world.members
            for held in updater.updated.held
            for each in held
        }

    assert lengths(World(job(BUILDS["AdamW"]), "zero")) == {True, False}
    for settings, expected in ({"per_parameter": True}, {True}), ({"elementwise": True}, {True, False}):
        mine = job(lambda named: Mine(named, lr=0.01), **settings)
        assert lengths(World(mine, "zero")) == expected
        world, _ = trained(mine, "zero")
        assert_equal(world.parameters(), one_device(mine)[0], "zero")


def test_whole_parameters_travel_to_their_keeper_and_back():
    world, _ = trained(job(matrices_and_rest, clip_grad_norm=1.0), "zero", steps=1)
    whole = sum(each.numel() for each in world.members[0][0].parameters() if each.ndim == 2)
    back = sum(
        updater.updated.from_slices.expected_bytes().per_step.total("dp")
        for _, _, updater in world.members
        if updater.updated.from_slices
    )
    slices = sum(
        1
        for _, exchange, _ in world.members
        for slice_ in exchange.ownership.owned
        if slice_.parameter.ndim == 2
    )
    own = sum(
        slice_.stop - slice_.start
        for _, exchange, updater in world.members
        for slice_ in exchange.ownership.owned
        if slice_.parameter.ndim == 2 and any(each is slice_.parameter for each in updater.updated.full)
    )
    assert back == 8 * (whole + slices + whole - own)
    assert all(
        updater.expected_bytes().per_step.bytes["dp"]["all_reduce"] == 8 for _, _, updater in world.members
    )


def test_a_scheduler_that_cannot_be_saved_is_refused():
    class Odd(lr_scheduler.StepLR):
        def __init__(self, optimizer: Optimizer) -> None:
            super().__init__(optimizer, 1)
            self.model = nn.Linear(1, 1)

    with pytest.raises(JobError, match="Odd cannot be saved: model is a Linear"):
        World(job(BUILDS["SGD"], scheduler=Odd), "all_reduce", 1)


def test_state_of_another_optimizer_is_refused():
    saved = World(job(BUILDS["SGD"]), "all_reduce", 1).checkpoint()
    for build in (BUILDS["Adam"], BUILDS["muon and adamw"], decay_groups):
        other = World(job(build), "all_reduce", 1)
        with pytest.raises(CheckpointError, match="start a new run"):
            other.load(saved, other.parameters())


def test_an_optimizer_that_fails_without_parameters_still_works_when_divided():
    # Its rule is not known, so every rank updates everything.
    used = lambda named: NeedsSome([each for name, each in named if "never" not in name])  # noqa: E731
    expected, _ = one_device(job(used))
    world, _ = trained(job(used), "zero")
    assert_equal(world.parameters(), expected, "zero")


def test_whole_optimizers_are_known():
    assert set(ALL) >= WHOLE
