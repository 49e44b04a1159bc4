"""A grid of dp x tp ranks in lockstep, each with its part of a small model, and the one device that they are
compared with.

No program runs here: a replica's whole gradient comes from autograd on the whole model, and every rank of it
is given its part.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from exchange_world import KINDS, Net, data
from torch import Tensor, nn

from meshloom.checkpoint.checkpoint import Checkpoint, Piece
from meshloom.checkpoint.writing.parallel import parallel
from meshloom.checkpoint.writing.saving import save
from meshloom.comm.pieces import Pieces, Runs, whole
from meshloom.comm.recording import RecordedGroup
from meshloom.comm.simulated import simulated_groups
from meshloom.comm.turns import in_turns
from meshloom.core.job import Job
from meshloom.core.step_shape import StepShape
from meshloom.exchange.alone import Alone
from meshloom.exchange.exchange import Exchange
from meshloom.optimizer.updater import Updater
from meshloom.parameters.shards import Shards


def runs_of(indices: Sequence[int]) -> Runs:
    """Sorted indices as runs."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][1] == index:
            runs[-1][1] = index + 1
        else:
            runs.append([index, index + 1])
    return tuple((start, stop) for start, stop in runs)


def random_pieces(shape: Sequence[int], num_ranks: int, draw: random.Random) -> Pieces:
    """One dim cut in uneven runs of which some are held by several ranks; or, on four ranks, two dims of it;
    or nothing cut."""
    if num_ranks == 1 or not shape or draw.random() < 0.2:
        return whole(shape, num_ranks)
    held: list[list[Runs | None]] = [[None] * len(shape) for _ in range(num_ranks)]
    both = num_ranks == 4 and len(shape) > 1 and draw.random() < 0.4
    for number, dim in enumerate((0, 1) if both else [draw.randrange(len(shape))]):
        parts = 2 if both else num_ranks
        copies = draw.random() < 0.5
        holders = [draw.sample(range(parts), 1 + (copies and draw.random() < 0.4)) for _ in range(shape[dim])]
        for rank in range(num_ranks):
            part = rank if not both else rank // 2 if number == 0 else rank % 2
            held[rank][dim] = runs_of([index for index, those in enumerate(holders) if part in those])
    return Pieces(tuple(shape), tuple(map(tuple, held)))


def pieces_of_net(num_ranks: int, seed: int = 0) -> dict[str, Pieces]:
    draw = random.Random(seed)
    return {
        name: random_pieces(parameter.shape, num_ranks, draw) for name, parameter in Net().named_parameters()
    }


def batch(step: int, dp: int) -> list[Tensor]:
    """A chunk per replica, the same samples for every dp."""
    return [chunk * (0.5 + step) for chunk in torch.cat(data(3, 1, 2, 3)).tensor_split(dp)]


def gradients(parameters: Mapping[str, Tensor], chunk: Tensor) -> dict[str, Tensor | None]:
    """Of the whole model's loss sum, by autograd alone."""
    model = Net().double()
    model.load_state_dict(parameters)
    model(chunk).square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


class Grid:
    """Ranks of a plan dp x tp, with the optimizer path over their parts."""

    def __init__(self, job: Job, dp: int, tp: int, zero: int = 0, seed: int = 0) -> None:
        self.dp, self.tp = dp, tp
        self.job = job
        pieces = pieces_of_net(tp, seed)
        along_dp = [[RecordedGroup(group, "dp") for group in simulated_groups(dp)] for _ in range(tp)]
        along_tp = [[RecordedGroup(group, "tp") for group in simulated_groups(tp)] for _ in range(dp)]
        self.worlds = simulated_groups(dp * tp)
        self.groups = [
            {"dp": along_dp[rank % tp][rank // tp], "tp": along_tp[rank // tp][rank % tp]}
            for rank in range(dp * tp)
        ]
        self.models: list[Net] = []
        self.shards: list[Shards] = []
        self.exchanges: list[Exchange] = []
        self.updaters: list[Updater] = []
        for groups in self.groups:
            torch.manual_seed(0)
            model = Net().double()
            named = list(model.named_parameters())
            shards = Shards(pieces, groups["tp"])
            shards.divide(model)
            parts = list(model.named_parameters())
            kind = KINDS["zero" if zero else "all_reduce"]
            exchange = Alone(parts) if dp == 1 else kind(parts, groups["dp"], bucket_bytes=200, overlap=True)
            self.models.append(model)
            self.shards.append(shards)
            self.exchanges.append(exchange)
            self.updaters.append(Updater(job, named, exchange.ownership, shards, parts))

    def parameters(self) -> dict[str, Tensor]:
        """Whole values, which every rank agrees on to the bit; what several ranks hold is equal on all of
        them."""

        def rank(number: int) -> dict[str, Tensor]:
            values: dict[str, Tensor] = {}
            for name, part in self.models[number].named_parameters():
                values[name] = self.shards[number].gather(name, part.detach()).clone()
                assert torch.equal(self.shards[number].take(name, values[name]), part), name
            return values

        first, *others = in_turns([partial(rank, number) for number in range(self.dp * self.tp)])
        assert all(torch.equal(first[name], other[name]) for other in others for name in first)
        return first

    def step(self, step: int) -> list[float | None]:
        chunks = batch(step, self.dp)
        parameters = self.parameters()
        whole = [gradients(parameters, chunk) for chunk in chunks]
        for number, (model, exchange) in enumerate(zip(self.models, self.exchanges, strict=True)):
            exchange.begin(StepShape())
            for name, part in model.named_parameters():
                gradient = whole[number // self.tp][name]
                if gradient is not None:
                    part.grad = self.shards[number].take(name, gradient).clone()
                    if ready := exchange.hook(part):
                        ready(part)

        def rank(number: int) -> float | None:
            exchange, groups = self.exchanges[number], self.groups[number]
            weight = float(sum(map(len, chunks)))
            averaged = exchange.finish(weight)
            for group in groups.values():
                group.counts.clear()
            norm = self.updaters[number].update(averaged, 1.0)
            self.counted[number] = {
                axis: {kind: each.bytes for kind, each in group.counts.items()}
                for axis, group in groups.items()
            }
            exchange.publish()
            return None if norm is None else float(norm)

        self.counted: list[dict[str, dict[str, int]]] = [{} for _ in self.models]
        return in_turns([partial(rank, number) for number in range(len(self.models))])

    def save(self, directory: Path, step: int) -> Path:
        def rank(number: int) -> Path:
            pieces, values = self.updaters[number].state.save()
            model, shards = self.models[number], self.shards[number]
            weights = [
                Piece(
                    name, each.reshape(-1), 0, each.numel(), shards.whole_shape(name, each),
                    shards.pieces[name].held[shards.rank] if name in shards.pieces else None,
                )
                for name, each in model.state_dict().items()
            ]  # fmt: skip
            return save(
                directory, step, write=parallel(weights, pieces), values=values, fingerprint={},
                plan_text=f"dp={self.dp},tp={self.tp}", group=self.worlds[number], keep=9,
            )  # fmt: skip

        return in_turns([partial(rank, number) for number in range(len(self.models))])[0]

    def load(self, directory: Path) -> None:
        checkpoint = Checkpoint.open(directory)
        shapes = {key: checkpoint.shape(key) for key in checkpoint.keys()}  # noqa: SIM118
        for model, shards, updater in zip(self.models, self.shards, self.updaters, strict=True):
            load = shards.weights_loader(model)
            for name, tensor in checkpoint.weights().items():
                load(name, tensor)
            updater.state.load(checkpoint.read, shapes, checkpoint.values)


def one_device(job: Job, dp: int, steps: int) -> tuple[dict[str, Tensor], list[float]]:
    """The loop that a user writes, over the same chunks; values, and gradient norms before clipping."""
    torch.manual_seed(0)
    model = Net().double()
    made = job.optimizer(list(model.named_parameters()))
    optimizers = made if isinstance(made, list) else [made]
    schedulers: list[Any] = job.scheduler(made) if job.scheduler else []
    norms: list[float] = []
    for step in range(steps):
        model.zero_grad()
        chunks = batch(step, dp)
        for chunk in chunks:
            model(chunk).square().sum().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(sum(map(len, chunks)))
        if job.clip_grad_norm:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), job.clip_grad_norm)))
        for optimizer in optimizers:
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    return {name: each.detach() for name, each in model.named_parameters()}, norms
