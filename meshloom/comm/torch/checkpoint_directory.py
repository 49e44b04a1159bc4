"""Directories of `torch.distributed.checkpoint`: written by one process, read box by box by any.

    directory = TorchDirectory(Path("fsdp/step-100"))
    directory.tensors["model", "head.weight"].shape                   by its place in the state_dict that was saved
    directory.read(("model", "head.weight"), (0, 0), (384, 64))       its first 384 rows

Of a tensor that ranks have saved in parts, only the parts that a box meets are read. Nothing is unpickled but
torch's own descriptions of tensors and files.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from meshloom.checkpoint.format import TORCHS_META
from meshloom.core.errors import CheckpointError, first_line

Place = tuple[Any, ...]  # keys of nested dicts, numbers in lists
_DESCRIPTIONS = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_OTHERS = {("torch", "Size"), ("torch.serialization", "_get_layout")}


def save_directory(state: Mapping[str, Any], path: Path) -> None:
    """Saves a state_dict, nested or not, that `torch.distributed.checkpoint.load` reads on any number of
    ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is one process
        dcp.save(dict(state), checkpoint_id=str(path), no_dist=True)


class TorchDirectory:
    """What was saved. tensors: by place, without elements (on the meta device). others: the places of what is no
    tensor.

    Raises `CheckpointError` if torch's description of it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stored = _read_description(path)
        self._reader = dcp.FileSystemReader(str(path))
        self._reader.set_up_storage_reader(self._stored, True)
        self.tensors: dict[Place, Tensor] = {}
        self.others: list[Place] = []
        self._names: dict[Place, str] = {}
        places: Mapping[str, Place] = self._stored.planner_data or {}
        for name, each in self._stored.state_dict_metadata.items():
            place = tuple(places.get(name, (name,)))
            self._names[place] = name
            if isinstance(each, TensorStorageMetadata):
                self.tensors[place] = torch.empty(each.size, dtype=each.properties.dtype, device="meta")
            else:
                self.others.append(place)

    def read(self, place: Place, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A box of a tensor, on the CPU."""
        name = self._names[place]
        stored = self._stored.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata)
        box = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
        into = torch.empty(list(sizes), dtype=stored.properties.dtype)
        items = create_read_items_for_chunk_list(name, stored, [box]) if into.numel() else []
        if sum(torch.Size(each.lengths).numel() for each in items) != into.numel():
            raise CheckpointError(f"{self.path} does not hold all elements of {name}.")
        self._read(items, _Target(into))
        return into

    def value(self, place: Place) -> Any:
        """What is no tensor, if it is made of plain values."""
        index, nothing = MetadataIndex(self._names[place]), torch.Size((0,))
        target = _Target(torch.empty(0))
        item = ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)
        self._read([item], target)
        return target.value

    def _read(self, items: Sequence[ReadItem], target: _Target) -> None:
        try:
            self._reader.read_data(LoadPlan(list(items)), target).wait()
        except (OSError, RuntimeError, EOFError, KeyError, ValueError, pickle.UnpicklingError) as error:
            first = first_line(error)
            raise CheckpointError(f"{self.path} cannot be read: {first}") from error


class _Target(LoadPlanner):
    """Where one read goes: into a tensor, or what is no tensor to `value`."""

    def __init__(self, into: Tensor) -> None:
        self._into = into
        self.value: Any = None

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part = self._into
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.value = torch.load(value, weights_only=True)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It is in its place."""

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """What to read is given."""

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan


class _Descriptions(pickle.Unpickler):
    """Of tensors and files; anything else in the pickle is an error, and not run."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        found = None
        plain = module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype)
        if plain or module_name in _DESCRIPTIONS or (module_name, global_name) in _OTHERS:
            found = super().find_class(module_name, global_name)
        elif module_name.split(".")[0] == "pathlib" and global_name.endswith("Path"):
            found = super().find_class("pathlib", global_name)
        # of these modules, what they define: not what they import
        if found is None or (isinstance(found, type) and found.__module__.split(".")[0] not in _ROOTS):
            raise pickle.UnpicklingError(f"it refers to {module_name}.{global_name}")
        return found


_ROOTS = ("torch", "pathlib")


def _read_description(path: Path) -> Metadata:
    try:
        with (path / TORCHS_META).open("rb") as file:
            found = _Descriptions(file).load()
        names = [each.relative_path for each in found.storage_data.values()]
        if not isinstance(found, Metadata) or any(Path(name).name != name for name in names):
            raise pickle.UnpicklingError("it is no description of files in this directory")
    except Exception as error:  # whatever damaged bytes lead to
        first = first_line(error)
        raise CheckpointError(
            f"{path / TORCHS_META} cannot be read as what torch.distributed.checkpoint writes: {first}."
        ) from error
    return found
