"""The optimizers' state of a checkpoint as torch has it: by parameter, with the settings of groups."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from meshloom.checkpoint.checkpoint import Checkpoint
from meshloom.checkpoint.format import AVERAGE, MASTER, STATE
from meshloom.checkpoint.json_values import from_json
from meshloom.core.errors import CheckpointError

_JSON = ".json"


@dataclass(frozen=True, kw_only=True)
class ExportedState:
    """One optimizer's. state: parameter -> key -> value, tensors in full shape, each read as it is touched. groups:
    settings with the parameters' names under "params". shared: what belongs to no parameter."""

    kind: str
    state: Mapping[str, Mapping[str, Any]]
    groups: list[dict[str, Any]]
    shared: Mapping[str, Any]

    def numbered(self) -> dict[str, Any]:
        """What the optimizer's `load_state_dict` takes: parameters by number."""
        names = [name for group in self.groups for name in group["params"]]
        numbers = {name: number for number, name in enumerate(names)}
        return {
            "state": {
                **{numbers[name]: dict(values) for name, values in self.state.items()},
                **self.shared,
            },
            "param_groups": [
                {**group, "params": [numbers[name] for name in group["params"]]} for group in self.groups
            ],
        }


def optimizer_states(checkpoint: Checkpoint) -> list[ExportedState]:
    """Of each optimizer. Raises `CheckpointError` for a checkpoint without it, or without the names in groups."""
    updater = checkpoint.values.get("updater") if isinstance(checkpoint.values, Mapping) else None
    if updater is None:
        raise CheckpointError(
            f"{checkpoint.path} has no optimizer's state of ranks that step together (it was saved by servers of exchange=async, or by another "
            "program). Export it without --optimizer."
        )
    by_name: dict[str, dict[str, Any]] = {}
    for path in checkpoint.keys():  # noqa: SIM118
        if path.startswith(STATE) and not path.endswith((f"/{MASTER}", f"/{AVERAGE}")):
            name, key = path.removeprefix(STATE).rsplit("/", 1)
            by_name.setdefault(name, {})[key.removesuffix(_JSON)] = _value(checkpoint, path)
    found: list[ExportedState] = []
    for saved in updater["optimizers"]:
        if "names" not in saved:
            raise CheckpointError(
                f"{checkpoint.path} is of a version that does not say which parameters are in which group of {saved['kind']}. Resume from it, save, and "
                "export that; or export without --optimizer."
            )
        groups = [
            {**from_json(group), "params": list(names)}
            for group, names in zip(saved["groups"], saved["names"], strict=True)
        ]
        names = [name for group in groups for name in group["params"]]
        found.append(
            ExportedState(
                kind=saved["kind"],
                state={name: by_name[name] for name in names if name in by_name},
                groups=groups,
                shared=from_json(saved["shared"]),
            )
        )
    return found


def by_name(checkpoint: Checkpoint) -> dict[str, Any]:
    """All optimizers' as `torch.distributed.checkpoint.state_dict.get_state_dict` returns it. Raises
    `CheckpointError` if that has no place for something."""
    states = optimizer_states(checkpoint)
    for each in states:
        if each.shared:
            raise CheckpointError(
                f"{each.kind} keeps {', '.join(map(str, each.shared))} for no parameter of its own, for which torch.distributed.checkpoint has no place. Use "
                "--to torch."
            )
    return {
        "state": {name: dict(values) for each in states for name, values in each.state.items()},
        "param_groups": [group for each in states for group in each.groups],
    }


def _value(checkpoint: Checkpoint, path: str) -> Any:
    shape = checkpoint.shape(path)
    flat: Tensor = checkpoint.read(path, 0, math.prod(shape))
    if path.endswith(_JSON):
        return from_json(json.loads(flat.numpy().tobytes()))
    return flat.view(shape)
