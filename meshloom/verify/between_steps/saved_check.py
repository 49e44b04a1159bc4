"""A checkpoint's files against one device: parameters, buffers, the optimizer's state, its groups and the schedule, by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from meshloom.checkpoint.checkpoint import Checkpoint
from meshloom.checkpoint.format import AVERAGE, MASTER, STATE
from meshloom.checkpoint.json_values import from_json
from meshloom.core.moments.by_metric import ByMetric
from meshloom.replica.replica_state import SCALE
from meshloom.verify.between_steps.checks import BetweenSteps, TensorError, compared_with, same_bits
from meshloom.verify.reference.reference import Reference

_SAME = 1e-6  # how far, relatively, numbers may be off that both sides compute from equal ones
_MOST = 8  # facts
_LEFT_OUT = ("params", "param_names")


def check_saved(
    path: Path, what: str, reference: Reference, averages: Mapping[str, Tensor], tolerance: Callable[[str], float], of_outputs: float,
    moved: Callable[[Tensor, str], float],
) -> BetweenSteps:  # fmt: skip
    """Compare the checkpoint in `path` with the reference. averages: one device's, of parameters by name. tolerance: of what a parameter's
    optimizer computes, by name. of_outputs: of what forwards compute. moved: how far rounding was measured to move what it keeps of a
    parameter, by its key."""
    saved = Checkpoint.open(path)
    step = reference.step
    facts = [*_facts(saved, reference, of_outputs)]
    errors = [*_weight_errors(saved, reference, tolerance)]
    state, lost = _state_errors(saved, reference, tolerance, moved)
    shown, missing = _average_errors(saved, reference, averages, tolerance)
    owners = [
        each.name.rpartition(" of ")[2].rpartition(".")[0]
        for each in (*errors, *state, *shown)
        if not each.passed
    ]
    return BetweenSteps(
        what=f"{what} after step {step}",
        errors=[*errors, *state, *shown],
        facts=[*facts, *lost, *missing],
        first_module=owners[0] or "the whole model" if owners else None,
    )


def same_files(path: Path, other: Path, what: str) -> BetweenSteps:
    """Compare two checkpoints of one step, whose values must be the same bits."""
    one, two = Checkpoint.open(path), Checkpoint.open(other)
    here, there = one.stored_weights(), two.stored_weights()
    wrong = [
        name
        for name in here.entries
        if name not in there.entries or not same_bits(here.tensor(name), there.tensor(name))
    ]
    facts = [f"{name} has other values." for name in wrong]
    for key in one.keys():  # noqa: SIM118
        size = math.prod(one.shape(key))
        if key not in two.keys() or one.shape(key) != two.shape(key):  # noqa: SIM118
            facts.append(f"{key} is lost.")
        elif not same_bits(one.read(key, 0, size), two.read(key, 0, size)):
            facts.append(f"{key} has other values.")
    if one.step != two.step:
        facts.append(f"It is of step {two.step} instead of {one.step}.")
    owners = [name.rpartition(".")[0] or "the whole model" for name in wrong]
    return BetweenSteps(
        what=f"{what}, after step {one.step - 1}", facts=facts[:_MOST], first_module=next(iter(owners), None)
    )


def _facts(saved: Checkpoint, reference: Reference, of_outputs: float) -> Iterator[str]:
    if saved.step != reference.step + 1:
        yield f"The checkpoint says step {saved.step}, and {reference.step + 1} are done."
    updater = saved.values["updater"]
    optimizers = [each for loss in reference.losses for each in loss.optimizers]
    for number, (there, here) in enumerate(zip(updater["optimizers"], optimizers, strict=True)):
        groups = [from_json(each) for each in there["groups"]]
        for place, (ours, right) in enumerate(zip(groups, here.param_groups, strict=True)):
            yield from _settings_that_differ(f"group {place} of optimizer {number}", ours, right)
    schedulers = [each for loss in reference.losses for each in loss.schedulers]
    for number, (there, here) in enumerate(zip(updater["schedulers"], schedulers, strict=True)):
        # torch's own, as what it is wrapped in saves both sides' state
        own = here.scheduler if isinstance(here, ByMetric) else here
        # the training loss that it went by is each side's own
        allowed = of_outputs if isinstance(own, ReduceLROnPlateau) else _SAME
        values = from_json(there)
        if isinstance(values, Mapping):
            yield from _settings_that_differ(f"scheduler {number}", values, own.state_dict(), allowed)
    if (scale := reference.scale).is_used and (
        there := saved.values.get(SCALE, {}).get("scale")
    ) != scale.value:
        yield f"The loss scale is {'not in the checkpoint' if there is None else f'{there:g} in the checkpoint'}, and {scale.value:g} on one device."


def _settings_that_differ(
    where: str, ours: Mapping[str, Any], right: Mapping[str, Any], allowed: float = _SAME
) -> Iterator[str]:
    for name, value in right.items():
        if name in _LEFT_OUT:
            continue
        if name not in ours:
            if isinstance(value, bool | int | float | str):
                yield f"{name} in {where} is not in the checkpoint, and {value} on one device."
            continue
        if isinstance(value, bool | str) and ours[name] != value:
            yield f"{name} in {where} is {ours[name]} in the checkpoint and {value} on one device."
        a, b = _numbers(ours[name]), _numbers(value)
        if (
            a is not None
            and b is not None
            and not (len(a) == len(b) and all(_close(*pair, allowed) for pair in zip(a, b, strict=True)))
        ):
            yield f"{name} in {where} is {_shown(a)} in the checkpoint and {_shown(b)} on one device."


def _numbers(value: Any) -> list[float] | None:
    values = list(value) if isinstance(value, list | tuple) else [value]
    if any(isinstance(each, bool) or not isinstance(each, int | float | Tensor) for each in values):
        return None
    return [float(each) for each in values if not isinstance(each, Tensor) or each.numel() == 1]


def _close(a: float, b: float, allowed: float) -> bool:
    return math.isclose(a, b, rel_tol=allowed) or (math.isnan(a) and math.isnan(b))


def _shown(values: list[float]) -> str:
    return ", ".join(f"{each:g}" for each in values)


def _weight_errors(
    saved: Checkpoint, reference: Reference, tolerance: Callable[[str], float]
) -> Iterator[TensorError]:
    stored = saved.stored_weights()
    state = reference.model.state_dict()
    right = {name: each for name, each in state.items() if isinstance(each, Tensor)}
    for name, tensor in right.items():
        ours = stored.tensor(name) if name in stored.entries else None
        yield compared_with(name, ours, tensor, reference.step, tolerance(name))


def _state_errors(
    saved: Checkpoint,
    reference: Reference,
    tolerance: Callable[[str], float],
    moved: Callable[[Tensor, str], float],
) -> tuple[list[TensorError], list[str]]:
    names = {id(each): name for name, each in reference.updated.all.items()}
    keys = {
        key.removesuffix(".json").removesuffix(".stacked"): key
        for key in saved.keys()  # noqa: SIM118
        if key.startswith(STATE)
    }
    errors: list[TensorError] = []
    facts: list[str] = []
    for optimizer in (each for loss in reference.losses for each in loss.optimizers):
        for parameter, state in optimizer.state.items():
            if not isinstance(parameter, Tensor) or id(parameter) not in names or not parameter.numel():
                continue  # of a parameter without elements no rank has a state
            name = names[id(parameter)]
            for key, value in state.items():
                path = f"{STATE}{name}/{key}"
                if path not in keys:
                    facts.append(f"The checkpoint has no {key} of {name}, and one device has.")
                elif (found := _read(saved, keys[path])) is not None and isinstance(value, Tensor):
                    allowed = 0.0 if key == "step" else max(tolerance(name), moved(parameter, key))
                    errors.append(compared_with(f"{key} of {name}", found, value, reference.step, allowed))
    for name, parameter in reference.updated.all.items():
        if (path := f"{STATE}{name}/{MASTER}") in keys and (found := _read(saved, path)) is not None:
            errors.append(compared_with(f"copy of {name}", found, parameter, reference.step, tolerance(name)))
    return errors, facts


def _average_errors(
    saved: Checkpoint, reference: Reference, averages: Mapping[str, Tensor], tolerance: Callable[[str], float]
) -> tuple[list[TensorError], list[str]]:
    """Of moving averages of parameters."""
    paths = {name: f"{STATE}{name}/{AVERAGE}" for name in averages}
    known = {name: path for name, path in paths.items() if path in saved.keys()}  # noqa: SIM118
    errors = [
        compared_with(
            f"average of {name}", _read(saved, path), averages[name], reference.step, tolerance(name)
        )
        for name, path in known.items()
    ]
    return errors, [
        f"The checkpoint has no average of {name}, and one device has."
        for name in paths
        if name not in known and averages[name].numel()
    ]


def _read(saved: Checkpoint, key: str) -> Tensor | None:
    shape = saved.shape(key)
    flat = saved.read(key, 0, math.prod(shape))
    if key.endswith(".json"):
        value = from_json(json.loads(flat.numpy().tobytes()))
        return (
            torch.tensor(float(value))
            if isinstance(value, int | float)
            else value
            if isinstance(value, Tensor)
            else None
        )
    return flat.view(shape)
