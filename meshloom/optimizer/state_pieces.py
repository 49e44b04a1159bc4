"""An optimizer's state as pieces of full-shape tensors under the parameters' names, and back.

A state tensor that has a value per element (momentum) is saved as the piece that this rank holds, and loaded
as the piece that it holds then, under any plan. Everything else (a step counter, a factored variance) is
saved in full by the rank that holds the parameter's first element, and loaded by every rank that holds any.
Plain values are saved as JSON in a tensor of bytes, because a rank that holds nothing of a parameter does not
know them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshloom.checkpoint.checkpoint import Piece
from meshloom.checkpoint.format import STATE
from meshloom.checkpoint.json_values import NotPlainError, from_json, to_json
from meshloom.core.errors import CheckpointError, JobError
from meshloom.parameters.shards import Shards

_JSON, _STACKED = ".json", ".stacked"  # a plain value; a list of tensors of one shape
Read = Callable[[str, int, int], Tensor]  # of a key, elements from here to there, flat


@dataclass(frozen=True)
class OwnedSlice:
    """What an optimizer updates here as one of its parameters, in place of parameter `name` [shape].

    tensor: elements `start` to `stop`, flat, of the parameter, or of this rank's shard of it where it is
        sharded over tp by `shards`.
    """

    name: str
    tensor: nn.Parameter
    start: int
    stop: int
    shape: tuple[int, ...]
    saves: bool = True  # False where another rank holds the same and saves it
    shards: Shards | None = None

    def piece(self, key: str, flat: Tensor) -> Piece:
        """Of a tensor under this key, the same elements, flat."""
        if self.shards is None:
            return Piece(key, flat, self.start, self.stop, self.shape)
        divided = self.shards.pieces[self.name]
        return Piece(key, flat, self.start, self.stop, divided.shape, divided.held[self.shards.rank])

    def cut(self, whole: Tensor) -> Tensor:
        """The same elements of another tensor [shape], in the shape of `tensor`: a copy."""
        part = self.shards.take(self.name, whole) if self.shards else whole
        return part.reshape(-1)[self.start : self.stop].view(self.tensor.shape).clone()


def state_pieces(
    optimizer: Optimizer, held: Sequence[OwnedSlice], *, self_contained: bool = False
) -> list[Piece]:
    """State of `held`.

    self_contained: what is saved in full comes with every slice, so that this rank's pieces can be loaded
        without those of others.
    """
    pieces: list[Piece] = []
    for each in held:
        state: Mapping[str, Any] = optimizer.state.get(each.tensor, {}) if each.saves else {}
        for key, value in state.items():
            path = _path(each.name, key)
            if (
                isinstance(value, Tensor)
                and value.shape == each.tensor.shape
                and value.ndim > 0
                and value.numel() > 0
            ):
                pieces.append(each.piece(path, value.detach().reshape(-1)))
            elif each.start < each.stop and (self_contained or each.start == 0):
                pieces.append(_whole(path, value))
    return pieces


def check_state(optimizer: Optimizer, held: Sequence[OwnedSlice]) -> None:
    """Raises `JobError` where `state_pieces` or `settings` would. Nothing is copied."""
    settings(optimizer)
    for each in held:
        state: Mapping[str, Any] = optimizer.state.get(each.tensor, {})
        for key, value in state.items():
            path = _path(each.name, key)
            if not isinstance(value, Tensor) and not _are_alike(value):
                _text(path, value)


def copy_pieces(held: Sequence[OwnedSlice], kind: str) -> list[Piece]:
    """As `state_pieces`, of the tensors themselves: copies of parameters, under the key `kind`: in another precision
    (`MASTER`), or averages (`AVERAGE`)."""
    return [
        each.piece(copy_key(each.name, kind), each.tensor.detach())
        for each in held
        if each.shards or each.tensor.numel()
    ]


def copy_key(name: str, kind: str) -> str:
    """The key of the copy of parameter `name`."""
    return f"{STATE}{name}/{kind}"


def load_copies(held: Sequence[OwnedSlice], path: str, shape: Sequence[int], read: Read, kind: str) -> None:
    """Restores what `copy_pieces` gave of one key."""
    for each in held:
        if path == copy_key(each.name, kind):
            each.tensor.data.copy_(_load(path, each, read, tuple(shape)))


def state_loader(
    of: Sequence[tuple[Optimizer, Sequence[OwnedSlice]]],
    placed: Callable[[Optimizer, nn.Parameter], None] | None = None,
) -> Callable[[str, Sequence[int], Read], None]:
    """Clears these optimizers' state, and returns the function that restores a saved key.

    Its arguments: the key, its full shape, and what reads it. Keys that are not of optimizers are ignored. placed:
    called after each restored value, with the optimizer and parameter that it is state of.
    """
    by_name: dict[str, list[tuple[Optimizer, OwnedSlice]]] = {}
    for optimizer, held in of:
        optimizer.state.clear()
        for each in held:
            by_name.setdefault(each.name, []).append((optimizer, each))

    def take(path: str, shape: Sequence[int], read: Read) -> None:
        if not path.startswith(STATE):
            return
        name, key = path.removeprefix(STATE).rsplit("/", 1)
        for optimizer, held in by_name.get(name, ()):
            value = place_state(_load(path, held, read, tuple(shape)), key, held.tensor, optimizer)
            key_in_state = key.removesuffix(_JSON).removesuffix(_STACKED)
            optimizer.state.setdefault(held.tensor, {})[key_in_state] = value
            if placed:
                placed(optimizer, held.tensor)

    return take


def settings(optimizer: Optimizer) -> dict[str, Any]:
    """The hyperparameters of every group and state that belongs to no parameter, as JSON."""
    shared = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    try:
        groups = [
            to_json({key: value for key, value in group.items() if key not in ("params", "param_names")})
            for group in optimizer.param_groups
        ]
        return {"kind": type(optimizer).__name__, "groups": groups, "shared": to_json(shared)}
    except NotPlainError as error:
        raise JobError(
            f"{type(optimizer).__name__} cannot be saved: in a group or its shared state, {error}. "
            "Keep numbers, strings, small tensors and lists of them there."
        ) from None


def load_settings(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Restore what `settings` returned."""
    if saved["kind"] != type(optimizer).__name__ or len(saved["groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"The checkpoint's optimizer is {saved['kind']} with {len(saved['groups'])} group(s), the job's is {type(optimizer).__name__} with "
            f"{len(optimizer.param_groups)}. Resume with the optimizer that was saved, or start a new run."
        )
    for group, values in zip(optimizer.param_groups, saved["groups"], strict=True):
        for key, value in from_json(values).items():
            if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                group[key].copy_(value)  # a scheduler may hold this very tensor
            else:
                group[key] = value
    optimizer.state.update(from_json(saved["shared"]))


def _path(name: str, key: Any) -> str:
    if not isinstance(key, str) or "/" in key:
        raise JobError(
            f"The optimizer keeps state of {name} under {key!r}. Use a string without '/', so that it can be saved."
        )
    return f"{STATE}{name}/{key}"


def _whole(path: str, value: Any) -> Piece:
    if isinstance(value, Tensor):
        return Piece(path, value.detach().reshape(-1), 0, value.numel(), tuple(value.shape))
    if _are_alike(value):
        stacked = torch.stack(value).detach()
        return Piece(path + _STACKED, stacked.reshape(-1), 0, stacked.numel(), tuple(stacked.shape))
    text = _text(path, value)
    return Piece(
        path + _JSON, torch.frombuffer(bytearray(text), dtype=torch.uint8), 0, len(text), (len(text),)
    )


def _text(path: str, value: Any) -> bytes:
    try:
        return json.dumps(to_json(value)).encode()
    except NotPlainError as error:
        raise JobError(
            f"State {path} cannot be saved: {error}. Keep tensors, numbers, strings and lists of them in an optimizer's state."
        ) from None


def _load(path: str, held: OwnedSlice, read: Read, shape: tuple[int, ...]) -> Any:
    if path.endswith(_JSON):
        return from_json(json.loads(read(path, 0, shape[0]).numpy().tobytes()))
    count = 1
    for size in shape:
        count *= size
    if path.endswith(_STACKED):
        return list(read(path, 0, count).view(shape).unbind())
    if shape != held.shape:
        return read(path, 0, count).view(shape)
    return (
        held.cut(read(path, 0, count).view(shape))
        if held.shards
        else read(path, held.start, held.stop).view(held.tensor.shape)
    )


def place_state(value: Any, key: str, parameter: nn.Parameter, optimizer: Optimizer) -> Any:
    """Put a state tensor where torch's optimizers keep it: beside the parameter, step counters on the
    host."""
    if _are_alike(value):
        return [each.to(parameter.device, copy=True) for each in value]
    if not isinstance(value, Tensor):
        return value
    group = next(
        group for group in optimizer.param_groups if any(each is parameter for each in group["params"])
    )
    on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
    return value.to("cpu" if on_host else parameter.device, copy=True)


def _are_alike(values: Any) -> bool:
    """Whether this is a list of tensors that can be stacked (LBFGS keeps a history of them)."""
    first = values[0] if isinstance(values, list) and values else None
    return isinstance(first, Tensor) and all(
        isinstance(each, Tensor) and each.shape == first.shape and each.dtype == first.dtype
        for each in values
    )
