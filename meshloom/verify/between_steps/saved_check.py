"""A checkpoint's files against one device, and against another checkpoint of the same step: parameters, buffers, the optimizer's state, its groups and
the schedule, by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshloom.checkpoint.checkpoint import Checkpoint
from meshloom.checkpoint.format import AVERAGE, MASTER, STATE
from meshloom.checkpoint.json_values import from_json
from meshloom.replica.replica_state import SCALE
from meshloom.verify.between_steps.checks import BetweenSteps, TensorError, compared_with, same_bits
from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference.reference_optimizers import needs_closure
from meshloom.verify.reference.step_records import named_settings, same_setting, shown_setting

_MOST = 8  # facts


def check_saved(
    path: Path, what: str, reference: Reference, tolerance: Callable[[str], float], of_outputs: float
) -> BetweenSteps:
    """Compare the checkpoint in `path` with the reference. tolerance: of what a parameter's
    optimizer computes, by name. of_outputs: of what forwards compute."""
    saved = Checkpoint.open(path)
    stored, facts = saved.stored_weights(), [*_facts(saved, reference, of_outputs)]
    errors: list[TensorError] = []
    for name, right in reference.model.state_dict().items():
        if isinstance(right, Tensor):
            ours = stored.tensor(name) if name in stored.entries else None
            errors.append(compared_with(name, ours, right, reference.step, tolerance(name)))
    keys = {
        key.removesuffix(".json").removesuffix(".stacked"): key
        for key in saved.keys()  # noqa: SIM118
        if key.startswith(STATE)
    }
    for name, key, right, allowed in _kept(reference, tolerance):
        if (known := keys.get(f"{STATE}{name}/{key}")) is None:
            facts += [] if key == MASTER else [f"The checkpoint has no {key} of {name}, and one device has."]
        elif (found := _read(saved, known)) is not None and isinstance(right, Tensor):
            errors.append(compared_with(f"{key} of {name}", found, right, reference.step, allowed))
    owners = [each.name.rpartition(" of ")[2].rpartition(".")[0] for each in errors if not each.passed]
    first, said = owners[0] or "the whole model" if owners else None, f"{what} after step {reference.step}"
    return BetweenSteps(what=said, errors=errors, facts=facts, first_module=first)


def same_files(path: Path, other: Path, what: str, *, with_values: bool = False) -> BetweenSteps:
    """Compare two checkpoints of one step, whose values must be the same bits. with_values: those that both have beside tensors, too."""
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
    facts = facts[:_MOST] + ([*_differing("", one.values, two.values)] if with_values else [])
    first = wrong[0].rpartition(".")[0] or "the whole model" if wrong else None
    return BetweenSteps(what=f"{what}, after step {one.step - 1}", facts=facts, first_module=first)


def _differing(where: str, right: Any, found: Any) -> Iterator[str]:
    """Values of JSON that are others, a sentence each."""
    kinds = type(right), type(found)
    if kinds == (dict, dict):
        right, found = _by_keys(right), _by_keys(found)
        for key, value in right.items():
            yield from _differing(f"{where}.{key}".lstrip("."), value, found.get(key))
    elif kinds == (list, list) and len(right) == len(found):
        for number, (one, other) in enumerate(zip(right, found, strict=True)):
            yield from _differing(f"{where}[{number}]", one, other)
    elif str(right) != str(found):
        yield f"{where} is {found} instead of {right}."


def _by_keys(given: Any) -> dict[str, Any]:
    """A dict; one that is kept as its pairs (`checkpoint/json_values.py`), by the names of its keys."""
    pairs = given.get("dict") if len(given) == 1 else None
    return {str(key): each for key, each in pairs} if isinstance(pairs, list) else given


def _facts(saved: Checkpoint, reference: Reference, of_outputs: float) -> Iterator[str]:
    if saved.step != reference.step + 1:
        yield f"The checkpoint says step {saved.step}, and {reference.step + 1} are done."
    updater = saved.values["updater"]
    ours = named_settings(
        [[from_json(group) for group in each["groups"]] for each in updater["optimizers"]],
        [*map(from_json, updater["schedulers"])],
    )
    for what, value in named_settings(
        [each.param_groups for each in reference.optimizers],
        [each.state_dict() for each in (*reference.schedulers, *reference.by_metric)],
    ).items():
        # the training loss that a scheduler goes by is each side's own
        if what not in ours:
            yield f"{what} is not in the checkpoint, and {shown_setting(value)} on one device."
        elif not same_setting(what, ours[what], value, of_outputs):
            yield f"{what} is {shown_setting(ours[what])} in the checkpoint and {shown_setting(value)} on one device."
    there, scale = saved.values.get(SCALE, {}).get("scale"), reference.scale
    if scale.is_used and there != scale.value:
        yield f"The loss scale is {'not in the checkpoint' if there is None else f'{there:g} in the checkpoint'}, and {scale.value:g} on one device."


def _kept(reference: Reference, tolerance: Callable[[str], float]) -> Iterator[tuple[str, str, Any, float]]:
    """What one device keeps of parameters: the parameter's name, the key, the value, and its tolerance."""
    names = {id(each): name for name, each in reference.updated.all.items()}
    # steps after resuming tell whether those that evaluate the loss, in whose state rounding grows, have theirs
    for optimizer in (each for each in reference.optimizers if not needs_closure(each)):
        for parameter, state in optimizer.state.items():
            # of a parameter without elements no rank has a state
            if (name := names.get(id(parameter))) is not None and parameter.numel():
                for key, value in state.items():
                    yield name, key, value, 0.0 if key == "step" else tolerance(name)
    for key, tensors in ((MASTER, reference.updated.all), (AVERAGE, reference.averages)):
        for name, each in tensors.items():
            if each.numel():
                yield name, key, each, tolerance(name)


def _read(saved: Checkpoint, key: str) -> Tensor | None:
    shape = saved.shape(key)
    flat = saved.read(key, 0, math.prod(shape))
    if key.endswith(".json"):
        value = from_json(json.loads(flat.numpy().tobytes()))
        value = torch.tensor(float(value)) if isinstance(value, int | float) else value
        return value if isinstance(value, Tensor) else None
    return flat.view(shape)
