"""A directory of `torch.distributed.checkpoint` as a checkpoint to go on from.

    {"model": {name: tensor}, "optimizer": {"state": {name: {key: value}}, "param_groups": [{..., "params": [name]}]}}

as `torch.distributed.checkpoint.state_dict.get_state_dict` lays it out, of programs with DDP, FSDP or one device, and
as `meshloom export --to dcp --optimizer` writes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshloom.checkpoint.checkpoint import Checkpoint
from meshloom.checkpoint.format import STATE
from meshloom.checkpoint.json_values import to_json
from meshloom.comm.torch.checkpoint_directory import Place, TorchDirectory
from meshloom.core.errors import CheckpointError

MODEL, OPTIMIZER, OURS = "model", "optimizer", "meshloom"
_JSON = ".json"


class TorchCheckpoint:
    """weights: name -> tensor without elements. keys: of the optimizers' state, as a `Checkpoint` has them, with their
    shapes. groups: each with the names of its parameters under "params". step: updates that were made, None: nothing
    says so. values: of our own export, else empty.

    Raises `CheckpointError` if the directory does not have this layout.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._directory = TorchDirectory(path)
        self.weights = {
            str(place[1]): each
            for place, each in self._directory.tensors.items()
            if len(place) == 2 and place[0] == MODEL
        }
        if not self.weights:
            tops = sorted({str(place[0]) for place in (*self._directory.tensors, *self._directory.others)})
            raise CheckpointError(
                f'{path} has no "model" with tensors by name; it has {", ".join(tops[:8]) or "nothing"}. Save '
                '{"model": ..., "optimizer": ...} as torch.distributed.checkpoint.state_dict.get_state_dict returns them.'
            )
        self._places: dict[str, Place] = {}
        self.keys: dict[str, tuple[int, ...]] = {}
        for place in (*self._directory.tensors, *self._directory.others):
            if len(place) == 4 and place[:2] == (OPTIMIZER, "state"):
                key = f"{STATE}{place[2]}/{place[3]}"
                if place in self._directory.tensors:
                    self.keys[key] = tuple(self._directory.tensors[place].shape)
                else:
                    key += _JSON
                    self.keys[key] = (len(self._json(place)),)
                self._places[key] = place
        self.groups = self._read_groups()
        ours = json.loads(self._directory.value((OURS,))) if (OURS,) in self._directory.others else {}
        self.values: Mapping[str, Any] = ours.get("values") or {}
        self.step: int | None = ours["step"] if ours else self._counted()

    def weight(self, name: str) -> Tensor:
        """A parameter or buffer in full shape."""
        shape = self.weights[name].shape
        return self._directory.read((MODEL, name), [0] * len(shape), shape)

    def read(self, key: str, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` of the flattened state `key`; of its rows only those are read that hold some."""
        place, shape = self._places[key], self.keys[key]
        if key.endswith(_JSON):
            return self._json(place)[start:stop]
        if not shape or start >= stop:
            return self._directory.read(place, [0] * len(shape), shape).reshape(-1)[start:stop]
        row = math.prod(shape[1:])
        first, last = start // row, -(-stop // row)
        rows = self._directory.read(
            place, [first] + [0] * (len(shape) - 1), [last - first, *shape[1:]]
        ).reshape(-1)
        return rows[start - first * row : stop - first * row]

    def as_checkpoint(self, values: Mapping[str, Any]) -> Checkpoint:
        """What is known of it before its tensors are read, to be compared with a job. values: as a checkpoint of
        the run that goes on would have them."""
        meta = {
            "step": self.step or 0,
            "values": values,
            "plan": "torch.distributed.checkpoint",
            "fingerprint": {name: f"{list(each.shape)} {each.dtype}" for name, each in self.weights.items()},
            "pieces": {},
            "files": {},
            "note": self._note(),
        }
        return Checkpoint(self.path, meta)

    def _note(self) -> str:
        state = "" if self.keys else " It has no optimizer's state, which begins anew."
        if self.values:
            return f"Going on from {self.path}, which meshloom has exported after step {self.step}.{state}"
        counted = (
            f"its optimizer's state counts {self.step} updates, so this run goes on after step {self.step}, with the data that this job reads then"
            if self.step is not None
            else "nothing in it says how many updates were made, so this run begins with step 1 and the first data"
        )
        return f"Going on from {self.path}, of torch.distributed.checkpoint: {counted}. Schedulers begin anew.{state}"

    def _json(self, place: Place) -> Tensor:
        """A plain value of the state, as pieces of checkpoints have it."""
        text = json.dumps(to_json(self._directory.value(place))).encode()
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def _read_groups(self) -> list[dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        for place in (*self._directory.others, *self._directory.tensors):
            if len(place) == 4 and place[:2] == (OPTIMIZER, "param_groups"):
                value = (
                    self._directory.value(place)
                    if place in self._directory.others
                    else self._directory.read(
                        place,
                        [0] * self._directory.tensors[place].ndim,
                        self._directory.tensors[place].shape,
                    )
                )
                found.setdefault(place[2], {})[place[3]] = value
        return [found[number] for number in sorted(found)]

    def _counted(self) -> int | None:
        """The largest count of updates that the state has of a parameter."""
        steps = [key for key, shape in self.keys.items() if key.endswith("/step") and math.prod(shape) == 1]
        return max((int(self.read(key, 0, 1)) for key in steps), default=None)
