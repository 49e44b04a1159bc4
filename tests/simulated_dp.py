"""A hand-written data-parallel run in a few lines, with switches that break it: what verification is tested
on.

It shares nothing with the product but the seeds, the observation of modules and the records.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.plan_shares import chunk_sizes
from meshloom.core.random import chunk_seed, model_seed, sample_order, seed_everything
from meshloom.verify.reference.observers import DrawWatch, ModuleWatch, digest_values
from meshloom.verify.reference.step_records import ChunkRecord
from tests.held import WholeRecord


def simulate(
    job: Job, plan: Plan, bug: str = "", dtype: torch.dtype | None = None, steps: int = 3
) -> Iterator[WholeRecord]:
    """Records of a run of map-style data without buffers across replicas; `bug` names what goes wrong."""
    seed_everything(model_seed(job.seed))
    model = job.model().to(dtype) if dtype else job.model()
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizers = job.optimizer(list(named.items()))
    schedulers: Any = job.scheduler(optimizers) if job.scheduler else []
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    schedulers = schedulers if isinstance(schedulers, list) else [schedulers]
    data, dp, m = job.data(), plan.dp, plan.microbatches
    per_epoch = -(-len(data) // job.batch_size)
    stale: dict[str, Tensor] = {}
    names = list(named)
    some = names[len(names) // 2 :]  # a bucket
    for step in range(steps):
        order = sample_order(job.seed, step // per_epoch, len(data), job.shuffle)
        batch = order[step % per_epoch * job.batch_size :][: job.batch_size]
        sizes = chunk_sizes(len(batch), dp * m)
        shares: list[list[tuple[dict[str, Tensor | None], float]]] = []
        chunks: list[ChunkRecord] = []
        for replica in range(dp):
            shares.append([])
            for j in range(m):
                index = replica * m + j
                where = index % m if bug == "shared data" else index
                samples = [data[i] for i in batch[sum(sizes[:where]) : sum(sizes[: where + 1])]]
                if not samples:
                    continue
                gradients, weight, chunk = _run(job, model, samples, step, index, m, bug, dtype)
                shares[replica].append((gradients, weight))
                chunks.append(chunk)
        total = sum(weight for share in shares for _, weight in share)
        gradients = {
            name: _average(name, shares, total, plan, job, bug, name in some, stale) for name in names
        }
        if bug == "tied twice":
            gradients["embed.weight"] = 2 * gradients["embed.weight"]  # type: ignore[operator]
        if bug == "stale":
            stale = {name: each.clone() for name, each in gradients.items() if each is not None}
        for name, parameter in named.items():
            parameter.grad = gradients[name]
        recorded = {name: None if each is None else each.clone() for name, each in gradients.items()}
        used = [each for each in gradients.values() if each is not None]
        norm = float(torch.nn.utils.get_total_norm(used))
        if bug == "tied twice in the norm":
            norm = float((torch.tensor(norm) ** 2 + recorded["embed.weight"].square().sum()).sqrt())  # type: ignore[union-attr]
        if bug == "wrong clip norm":
            norm = float(
                torch.nn.utils.get_total_norm(
                    [each for name, each in gradients.items() if each is not None and name in some]
                )
            )
        if job.clip_grad_norm and norm > job.clip_grad_norm:
            for each in used:
                each *= job.clip_grad_norm / (norm + 1e-6)  # as torch's clip_grad_norm_ does
        if bug == "other state" and step == 1:
            _swap_state(optimizers[-1])
        for optimizer in optimizers:
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        digest = digest_values(dict(model.named_parameters()))
        yield WholeRecord(
            step=step,
            loss=sum(chunk.loss_sum for chunk in chunks) / total,
            weight=total,
            gradient_norm=norm,
            gradients=recorded,
            buffers={name: each.clone() for name, each in model.named_buffers()},
            parameters={name: each.detach().clone() for name, each in model.named_parameters()},
            chunks=chunks,
            replicas=[digest] * (dp - 1) + ["drifted" if bug == "drift" else digest],
        )


def _run(
    job: Job,
    model: Any,
    samples: list[Any],
    step: int,
    index: int,
    m: int,
    bug: str,
    dtype: torch.dtype | None,
) -> Any:
    batch = (job.collate or default_collate)(samples)
    digest = digest_values(batch)
    batch = {
        name: each.to(dtype) if dtype and each.is_floating_point() else each for name, each in batch.items()
    }
    seed_everything(chunk_seed(job.seed, step, index % m if bug == "same masks" else index))
    draws: list[str] = []
    seed = torch.initial_seed()
    watch = ModuleWatch(model)
    model.zero_grad(set_to_none=True)
    with watch.attached():
        watch.start()
        watched = DrawWatch(torch.device("cpu"))
        watched.start()
        loss = job.loss(model, batch)
        draws += watched.stop()
        loss_sum, weight = loss if isinstance(loss, tuple) else (loss * len(samples), len(samples))
        loss_sum.backward()
        modules = watch.stop()
    gradients = {
        name: None if each.grad is None else each.grad.clone()
        for name, each in model.named_parameters()
        if each.requires_grad
    }
    chunk = ChunkRecord(
        index=index,
        samples=len(samples),
        weight=float(weight),
        loss_sum=float(loss_sum.detach()),
        data=digest,
        seed=seed,
        draws=tuple(draws),
        modules=modules,
    )
    return gradients, float(weight), chunk


def _average(
    name: str,
    shares: Any,
    total: float,
    plan: Plan,
    job: Job,
    bug: str,
    in_bucket: bool,
    stale: dict[str, Tensor],
) -> Tensor | None:
    """The gradient of one parameter from all chunks' (gradients, weight)."""
    dp, m = plan.dp, plan.microbatches
    every = [(gradients[name], weight) for share in shares for gradients, weight in share]
    if all(each is None for each, _ in every):
        return None
    if bug == "last microbatch only":
        return _sum([share[-1][0][name] for share in shares if share]) / total
    if bug == "mean of means":
        means = [
            _sum([gradients[name] for gradients, _ in share]) / sum(weight for _, weight in share)
            for share in shares
            if share
        ]
        return _sum(means) / len(means)
    if bug == "mean of chunk means":
        return _sum([each / weight for each, weight in every if each is not None]) / len(every)
    if bug == "not reduced" and in_bucket:
        return _sum([gradients[name] for gradients, _ in shares[0]]) / (total / dp)
    if bug == "clip before averaging":
        clipped: list[Tensor] = []
        for share in shares:
            weight = sum(weight for _, weight in share)
            own = (
                {
                    key: _sum([gradients[key] for gradients, _ in share]) / weight
                    for key in share[0][0]
                    if share[0][0][key] is not None
                }
                if share
                else {}
            )
            if own:
                norm = float(torch.nn.utils.get_total_norm(list(own.values())))
                clipped.append(own[name] * min(1.0, (job.clip_grad_norm or 1.0) / norm) * weight)
        return _sum(clipped) / total
    if bug == "uneven factors":
        return _sum([each * (1 + number / 7) for number, (each, _) in enumerate(every)]) / total
    if bug == "noise":
        return _sum([each for each, _ in every]) / total + torch.linspace(-1, 1, every[0][0].numel()).view_as(
            every[0][0]
        )
    if bug == "missing chunk":
        return _sum([each for each, _ in every[1:]]) / total
    gradient = _sum([each for each, _ in every]) / total
    if bug == "not divided by dp":
        gradient = gradient * dp
    if bug == "not divided by m":
        gradient = gradient * m
    if bug == "divided by own weight":
        gradient = gradient * total / sum(weight for _, weight in shares[0])
    if bug == "reduced twice" and in_bucket:
        gradient = gradient * dp
    if bug == "stale" and name in stale:
        gradient = gradient + stale[name]
    return gradient


def _sum(parts: list[Tensor | None]) -> Tensor:
    return sum(part for part in parts if part is not None)  # type: ignore[return-value]


def _swap_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter the state of another, cut or filled to its size."""
    entries = [optimizer.state[each] for each in optimizer.param_groups[0]["params"] if optimizer.state[each]]
    copies = copy.deepcopy(entries)
    for entry, other in zip(entries, copies[1:] + copies[:1], strict=True):
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.ndim:
                flat = other[key].reshape(-1)
                entry[key] = (
                    flat.repeat(-(-value.numel() // flat.numel()))[: value.numel()]
                    .reshape(value.shape)
                    .clone()
                )
