"""The settings of the matrix: of plans and of jobs, their values, and which of these do not go together.

Left out are `exchange=async`, `local_sgd` and `diloco` and compressed gradients, which do not promise to equal one device, and
`compile`, which takes longer than all the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshloom.core.job import Job
from meshloom.core.plan import Plan
from meshloom.core.schedules import SCHEDULES
from tests.equality.model import Model
from tests.jobs import averaged

Case = Mapping[str, str]  # the value of each setting, as text
MOST_RANKS = 8
STEPS = 2  # of a cell; 3 where the last batch is short

# The first value of each is the one that a plan or job has by itself.
OF_PLANS: dict[str, tuple[str, ...]] = {
    "dp": ("1", "2", "3", "4"),
    "tp": ("1", "2", "3"),
    "pp": ("1", "2", "3"),
    "microbatches": ("1", "2", "3"),
    "zero": ("0", "1", "2", "3", "3 within 2"),
    "exchange": ("all_reduce", "ring", "server", "2 servers"),
    "schedule": ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"),
    "cuts": ("chosen", "named"),
    "recompute": ("none", "full", "selective"),
    "precision": ("float32", "bf16-mixed", "fp16-mixed", "bf16"),
    "reduce": ("own", "float32", "bf16"),
    "shares": ("even", "uneven", "one", "measured"),
    "sync_batch_norm": ("false", "true"),
    "keyed_draws": ("false", "true"),
    "buckets": ("large", "small", "late"),
    "placements": ("chosen", "named"),
    "memory": ("all", "1GiB"),
}
OF_JOBS: dict[str, tuple[str, ...]] = {
    "optimizer": ("adamw", "momentum", "adafactor", "muon", "adagrad"),
    "scheduler": ("none", "warmup"),
    "clip": ("none", "0.05"),
    "init": ("stream", "keyed"),
    "order": ("shuffled", "given"),
    "batch": ("even", "uneven", "short", "few"),
}
# What is to leave the package: a line here goes with each, and its branch in `plan_of` or `job_of`.
LEAVING: dict[str, tuple[str, ...]] = {
    "offload": ("none", "optimizer"),
    "average": ("none", "0.9"),
}
SETTINGS: dict[str, tuple[str, ...]] = OF_PLANS | OF_JOBS
SETTINGS |= {name: (*SETTINGS.get(name, ()), *values) for name, values in LEAVING.items()}


def others(name: str, *but: str) -> tuple[str, ...]:
    """The values of a setting besides these, or besides its first."""
    return tuple(value for value in SETTINGS[name] if value not in (but or SETTINGS[name][:1]))


Values = tuple[str, Collection[str]]  # of one setting
SERVERS = ("exchange", ("server", "2 servers"))
# None of the one goes with any of the other: these the package refuses in a sentence,
REFUSED: list[tuple[Values, Values]] = [
    *((("dp", ("1",)), (name, others(name))) for name in ("exchange", "reduce", "shares")),
    (("dp", ("1", "3")), ("zero", ("3 within 2",))),
    (("pp", ("1",)), ("schedule", others("schedule"))),
    (("pp", ("1",)), ("cuts", ("named",))),
    (("pp", ("3",)), ("cuts", ("named",))),  # a model names one module
    (("schedule", ("interleaved", "zb-v")), ("cuts", ("named",))),  # these have more stages
    (("tp", ("1",)), ("placements", ("named",))),
    (("zero", others("zero")), SERVERS),
    (("precision", ("bf16",)), SERVERS),
    (("sync_batch_norm", ("true",)), ("tp", ("2", "3"))),
    (("sync_batch_norm", ("true",)), ("pp", ("2", "3"))),
    (("sync_batch_norm", ("true",)), ("recompute", ("full", "selective"))),
    (("sync_batch_norm", ("true",)), ("shares", ("measured",))),
]
# these, too, when a job is given,
REFUSED_WITH_JOBS: list[tuple[Values, Values]] = [
    (("average", ("0.9",)), ("exchange", others("exchange"))),
    (("average", ("0.9",)), ("precision", ("bf16",))),
    (("sync_batch_norm", ("true",)), ("shares", ("one",))),  # every chunk needs samples
    (("sync_batch_norm", ("true",)), ("batch", ("few", "short"))),
]
# and these would do nothing.
IDLE: list[tuple[Values, Values]] = [
    (("dp", ("1",)), ("zero", others("zero"))),
    (("dp", ("2",)), ("zero", ("3 within 2",))),
    (("dp", ("1",)), ("sync_batch_norm", ("true",))),
]
# What should be as predicted and is not yet: of cells that have all of these values, bytes are not compared. At most ten.
SKIPPED: dict[str, tuple[Values, ...]] = {
    "zero=3 predicts of every step the bytes of the first one, and of a short batch other ranks may have fewer chunks": (
        ("zero", ("3", "3 within 2")), ("batch", ("short",)),
    ),
    "the same, and measured shares decide which ranks have fewer chunks": (
        ("zero", ("3", "3 within 2")), ("shares", ("measured",)),
    ),
}  # fmt: skip
APART = [*REFUSED, *REFUSED_WITH_JOBS, *IDLE]


def refused_for(model: Model) -> dict[str, Collection[str]]:
    """Values that a model cannot have, by setting."""
    found: dict[str, Collection[str]] = {}
    if not model.cut:
        found["cuts"] = ("named",)
    if not model.pins:
        found["placements"] = ("named",)
    if not model.norms:
        found["sync_batch_norm"] = ("true",)
    if model.sparse:
        found |= {"optimizer": others("optimizer", "adagrad"), "average": ("0.9",)}
    if model.computed:
        found["init"] = ("keyed",)
    if model.several:  # a chunk of one sample has no statistics
        found |= {"shares": others("shares"), "batch": ("few", "short")}
    return found


def fits(model: Model, case: Case) -> bool:
    """Whether there are not too many ranks, nor stages. case: as much of it as is known."""
    at = {name: int(case.get(name, "1")) for name in ("dp", "tp", "pp")}
    stages = at["pp"] * SCHEDULES[case.get("schedule", "1f1b")].stages_per_rank
    return at["dp"] * at["tp"] * at["pp"] <= MOST_RANKS and stages <= max(model.stages, 1)


def is_skipped(model: Model, case: Case) -> bool:
    """Whether the bytes of a cell are not compared."""
    return any(all(case[name] in values for name, values in each) for each in SKIPPED.values())


def plan_of(model: Model, case: Case) -> Plan:
    """The plan of a cell."""
    dp, (zero, _, within) = int(case["dp"]), case["zero"].partition(" within ")
    exchange = case["exchange"]
    shares = {"uneven": "+".join(map(str, range(dp, 0, -1))), "one": "+".join("1" + "0" * (dp - 1))}
    return Plan.from_dict(
        {name: int(case[name]) for name in ("dp", "tp", "pp", "microbatches")}
        | {name: case[name] for name in ("schedule", "recompute", "precision", "reduce", "offload")}
        | {
            "zero": int(zero),
            "zero_within": int(within or 0),
            "exchange": "server" if "server" in exchange else exchange,
            "servers": 2 if exchange == "2 servers" else 1,
            "cuts": (model.cut,) if case["cuts"] == "named" else (),
            "shares": shares.get(case["shares"], case["shares"]),
            "sync_batch_norm": case["sync_batch_norm"] == "true",
            "keyed_draws": case["keyed_draws"] == "true",
            "bucket_bytes": 25 * 2**20 if case["buckets"] == "large" else 600,
            "overlap": case["buckets"] != "late",
            "tp_placements": dict(each.split(":") for each in model.pins.split("+"))
            if case["placements"] == "named"
            else {},
            "memory_bytes": 2**30 if case["memory"] == "1GiB" else 0,
        }
    )


def job_of(model: Model, case: Case) -> Job:
    """The job of a cell: two batches, and a third one if the last is to be short."""
    chunks = int(case["dp"]) * int(case["microbatches"])
    full, kind = chunks * model.chunk, case["batch"]
    update: dict[str, Any] = {
        "optimizer": OPTIMIZERS[case["optimizer"]],
        "scheduler": warmup if case["scheduler"] == "warmup" else None,
        "clip_grad_norm": None if case["clip"] == "none" else float(case["clip"]),
    }
    size = {"uneven": max(1, full - 1), "few": max(1, chunks // 2)}.get(kind, full)
    number = STEPS * size + (max(1, size // 2) if kind == "short" else 0)
    job = Job(
        model=partial(with_convention, model.build) if case["init"] == "keyed" else model.build,
        data=lambda: model.samples(number),
        batch_size=size,
        steps=steps_of(case),
        seed=3,
        init=case["init"],
        shuffle=case["order"] == "shuffled",
        leaves=model.leaves,
        buffers=model.buffers,
        loss=model.loss,
        **update,
    )
    return job if case["average"] == "none" else averaged(job, float(case["average"]))


def with_convention(build: Callable[[], nn.Module]) -> nn.Module:
    """A model whose root gives values to the parameters of modules that have no convention of their own."""
    model = build()
    vars(model)["_init_weights"] = _fill_bare
    return model


def _fill_bare(module: nn.Module) -> None:
    if not any(hasattr(module, name) for name in ("reset_parameters", "_reset_parameters")):
        for each in module.parameters(recurse=False):
            nn.init.normal_(each, 0.1, 0.2)


def steps_of(case: Case) -> int:
    """Steps of a cell."""
    return STEPS + (case["batch"] == "short")


def adamw(named: Any) -> Optimizer:
    """Two groups, as people write them: no decay of vectors."""
    matrices, vectors = [[each for _, each in named if (each.ndim > 1) is many] for many in (True, False)]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=3e-3)


def momentum(named: Any) -> Optimizer:
    return torch.optim.SGD(
        [each for _, each in named], lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3
    )


def adafactor(named: Any) -> Optimizer:
    return torch.optim.Adafactor([each for _, each in named], lr=0.01)


def muon(named: Any) -> list[Optimizer]:
    """Two optimizers: matrices, and all else."""
    matrices = [each for _, each in named if each.ndim == 2]
    rest = [each for _, each in named if each.ndim != 2]
    found: list[Optimizer] = [torch.optim.Muon(matrices, lr=0.01)] if matrices else []
    return [*found, torch.optim.AdamW(rest, lr=3e-3)] if rest else found


def adagrad(named: Any) -> Optimizer:
    return torch.optim.Adagrad([each for _, each in named], lr=0.02)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": adamw,
    "momentum": momentum,
    "adafactor": adafactor,
    "muon": muon,
    "adagrad": adagrad,
}


def warmup(optimizers: Any) -> Any:
    """Of each optimizer one."""
    each = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
    return [torch.optim.lr_scheduler.LambdaLR(one, lambda step: (step + 1) / 4) for one in each]


def named(case: Case) -> str:
    """A cell as text: what differs from the first values."""
    return ",".join(f"{name}={value}" for name, value in case.items() if value != SETTINGS[name][0])
