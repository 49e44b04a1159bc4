"""Small jobs of a given loss, and losses of batches that hold more than tensors."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.job import Job
from tests.jobs import vectors

STEPS = 3


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 5))


def job_of(loss: Any, **settings: Any) -> Job:
    optimizer = lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)  # noqa: E731
    return Job(
        **{
            "model": mlp,
            "loss": loss,
            "optimizer": optimizer,
            "data": vectors,
            "batch_size": 6,
            "steps": STEPS,
            **settings,
        }
    )


# --- Batches of more than tensors.

Extra = Callable[[Tensor], dict[str, Any]]


def job_with(extra: Extra, loss: Any, **settings: Any) -> Job:
    """extra: of a chunk's x, what its batch holds besides x and y."""

    def collate(samples: list[dict[str, Tensor]]) -> dict[str, Any]:
        x, y = (torch.stack([sample[name] for sample in samples]) for name in "xy")
        return {"x": x, "y": y, **extra(x)}

    return job_of(loss, collate=collate, **settings)


def of_scaled(scale: Callable[[dict[str, Any]], Any]) -> Any:
    """A loss whose input is scaled."""
    return lambda model, batch: F.cross_entropy(model(batch["x"] * scale(batch)), batch["y"])


def number(x: Tensor) -> float:
    return float(x[0].abs().sum()) / 4


class Task(enum.Enum):
    COPY = 1
    SORT = 2


@dataclasses.dataclass
class Noise:
    sigma: float
    name: str


class Opaque:
    def __init__(self, value: float) -> None:
        self.value = value


# name: what the batch holds, what the loss makes of it. All have another value in every batch, or nearly.
EQUAL: dict[str, tuple[Extra, Any]] = {
    "float": (lambda x: {"n": number(x)}, of_scaled(lambda b: b["n"])),
    "float, as a divisor of what the loss returns": (
        lambda x: {"n": number(x) * 9},
        lambda model, b: (F.cross_entropy(model(b["x"]), b["y"], reduction="sum"), b["n"]),
    ),
    "float in a dataclass": (lambda x: {"n": Noise(number(x), "a")}, of_scaled(lambda b: b["n"].sigma)),
    "two floats": (lambda x: {"n": [number(x), -number(x)]}, of_scaled(lambda b: b["n"][0] - b["n"][1])),
    "int": (lambda x: {"n": int(number(x) * 10)}, of_scaled(lambda b: b["n"] * 0.1)),
    "int that picks a row": (
        lambda x: {"n": int(number(x) * 100) % len(x)},
        of_scaled(lambda b: b["x"][b["n"]].abs()),
    ),
    "int that says how often": (
        lambda x: {"n": int(number(x) * 100) % 3},
        of_scaled(lambda b: sum([0.5 for _ in range(b["n"])], 1.0)),
    ),
    "NumPy's float": (lambda x: {"n": numpy.float64(number(x))}, of_scaled(lambda b: b["n"])),
    "bool": (lambda x: {"n": bool(x[0, 0] > 0)}, of_scaled(lambda b: 2.0 if b["n"] else 1.0)),
    "text": (
        lambda x: {"n": "abc"[int(number(x) * 100) % 3]},
        of_scaled(lambda b: {"a": 0.5, "b": 1.0, "c": 1.5}[b["n"]]),
    ),
    "bool that is asked for": (
        lambda x: {"n": bool(int(number(x) * 100) % 2)},
        of_scaled(lambda b: 0.5 if b["n"] is True else 1.5),
    ),
    "enum": (
        lambda x: {"n": list(Task)[int(number(x) * 100) % 2]},
        of_scaled(lambda b: 0.5 if b["n"] is Task.COPY else 1.5),
    ),
    "none or not": (
        lambda x: {"n": None if x[0, 0] > 0 else "there"},
        of_scaled(lambda b: 2.0 if b["n"] is None else 1.0),
    ),
    "names that the loss does not look at": (
        lambda x: {"n": [f"file {each}" for each in x[:, 0].tolist()], "o": Opaque(number(x))},
        of_scaled(lambda b: 1),
    ),
    "tensors in an object": (lambda x: {"n": Opaque(x)}, of_scaled(lambda b: b["n"].value)),  # type: ignore[arg-type]
    "a name beside a number": (lambda x: {"n": f"{number(x)}", "m": number(x)}, of_scaled(lambda b: b["m"])),
}

REFUSED: dict[str, tuple[Extra, Any, str]] = {
    "an array": (
        lambda x: {"n": x.numpy().copy()},
        of_scaled(lambda b: torch.from_numpy(b["n"]).abs()),
        r"n of the batch is a NumPy array, and a program computes with tensors. Make it a tensor in collate, torch.from_numpy\(n\)",
    ),
    "words": (
        lambda x: {"n": [f"w{int(each * 100)}" for each in x[:, 0].tolist()]},
        of_scaled(lambda b: torch.tensor([[int(word[1:]) / 100] for word in b["n"]])),
        "reads n of the batch, a list of 6, in Python, and it differs in the next batch",
    ),
    "a number that Python computes with": (
        lambda x: {"n": number(x)},
        of_scaled(lambda b: math.sqrt(b["n"])),
        "reads n of the batch, a float, in Python, and it differs in the next batch",
    ),
    "an object": (
        lambda x: {"n": Opaque(number(x))},
        of_scaled(lambda b: b["n"].value),
        "reads n of the batch, a Opaque, an object that meshloom cannot compare",
    ),
}
