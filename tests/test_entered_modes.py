"""How many modes a run enters, and how many attributes of torch are others meanwhile: each has a purpose, and they are few.

An attribute counts if something of meshloom's has taken its place while a loss or a forward runs, or `replaced` has set it.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from meshloom.core.job import Evaluate, Job
from meshloom.core.plan import Plan
from meshloom.program.ir import replaced
from meshloom.verify.run import verify
from tests.fitted import fitted

pytestmark = pytest.mark.usefixtures("silent_export", "dear_memory")

MOST_MODES, MOST_ATTRIBUTES = 11, 14
PURPOSES = {
    "KeyedDraws": "draws belong to (seed, step, chunk, n)",
    "_RecurrentLayers": "recurrent layers draw their masks as operators do",
    "CountDraws": "how often an operator or a leaf draws",
    "_Whole": "a rank along tp takes its slice of the full draw",
    "AsOnCPU": "operators without values take their CPU branches",
    "_OnCPU": "code for another device is read on the CPU",
    "_Meter": "FLOPs and bytes of operators",
    "CastWatch": "verify: which parts have a precision of their own",
    "SingleSamples": "verify: batch norms of one sample",
}


@dataclass
class Seen:
    """modes: of meshloom's that were entered. attributes: of torch and Python that were others."""

    modes: set[type] = field(default_factory=set[type])
    attributes: set[tuple[Any, str]] = field(default_factory=set[tuple[Any, str]])
    left: set[tuple[Any, str]] = field(default_factory=set[tuple[Any, str]])  # by imports in earlier exports

    def look(self) -> None:
        """Note the attributes that are meshloom's now."""
        for owner in _owners():
            for name, value in list(vars(owner).items()):
                if _is_ours(value):
                    self.attributes.add((owner, name))

    def of_torch(self) -> list[str]:
        """The attributes of torch's modules and classes."""
        names = [
            (getattr(owner, "__module__", owner.__name__), owner, name)
            for owner, name in self.attributes - self.left
        ]
        return sorted(
            f"{owner.__name__}.{name}" for module, owner, name in names if module.startswith("torch")
        )


def _owners() -> Iterator[Any]:
    yield builtins
    for name, module in list(sys.modules.items()):
        if type(module) is ModuleType and name.split(".")[0] == "torch":
            yield module
            yield from (
                each
                for each in list(vars(module).values())
                if isinstance(each, type) and each.__module__ == name
            )


def _is_ours(value: Any) -> bool:
    if isinstance(value, property):
        value = value.fget
    while isinstance(value, partial | MethodType | classmethod | staticmethod):
        value = value.func if isinstance(value, partial) else value.__func__
    return isinstance(value, FunctionType) and "/meshloom/" in value.__code__.co_filename


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found = Seen()
    found.look()
    found.left |= found.attributes

    def watched(kind: Any) -> Any:
        enter = kind.__enter__

        def entering(mode: Any) -> Any:
            if type(mode).__module__.startswith("meshloom."):
                found.modes.add(type(mode))
            return enter(mode)

        return entering

    def setting(owner: Any, name: str, value: Any) -> None:
        found.attributes.add((owner, name))
        setattr(owner, name, value)

    for kind in (TorchDispatchMode, TorchFunctionMode):
        monkeypatch.setattr(kind, "__enter__", watched(kind))
    monkeypatch.setattr(replaced, "setattr", setting, raising=False)
    return found


def job_of(seen: Seen) -> Job:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8))

        def forward(self, x: Tensor) -> Tensor:
            seen.look()
            return self.layers(x)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        seen.look()
        return (model(batch["x"]) - batch["y"]).square().mean()

    def data() -> list[dict[str, Tensor]]:
        return [{"x": torch.randn(8), "y": torch.randn(8)} for _ in range(16)]

    return Job(
        model=Net, loss=loss, optimizer=torch.optim.AdamW, data=data, batch_size=8, steps=2,
        evaluate=Evaluate(data, {"error": loss}, every=1),
    )  # fmt: skip


def check(seen: Seen) -> None:
    modes, attributes = sorted(each.__name__ for each in seen.modes), seen.of_torch()
    assert len(modes) <= MOST_MODES and set(modes) <= set(PURPOSES), modes
    assert len(attributes) <= MOST_ATTRIBUTES, attributes


@pytest.mark.parametrize("plan", ["tp=2", pytest.param("pp=2,microbatches=2", marks=pytest.mark.slow)])
@pytest.mark.long
def test_a_run_of_programs_enters_few_modes_and_replaces_little(seen: Seen, plan: str) -> None:
    fitted(job_of(seen), Plan.parse(plan))
    check(seen)
    assert seen.modes and seen.of_torch()


@pytest.mark.long
def test_a_run_under_dp_enters_no_mode(seen: Seen) -> None:
    fitted(job_of(seen), Plan.parse("dp=2"))
    assert not seen.modes
    assert set(seen.of_torch()) <= {"torch.cond"}  # which stays once it is replaced


@pytest.mark.long
def test_verifying_enters_few_modes_and_replaces_little(seen: Seen) -> None:
    verify(job_of(seen), Plan.parse("tp=2"), devices="simulated", steps=2, dtype=torch.float64)
    check(seen)
