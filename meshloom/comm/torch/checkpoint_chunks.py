"""A box of a tensor as `torch.distributed.checkpoint` writes and reads it, by its protocol for tensors that are spread over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


def box(start: Sequence[int], shape: torch.Size) -> list[ChunkStorageMetadata]:
    """What is read, or written, of a box that begins at `start`; nothing of an empty one."""
    return [ChunkStorageMetadata(torch.Size(start), shape)] if shape.numel() else []


def written(name: str, values: Tensor, start: Sequence[int], whole: torch.Size) -> list[WriteItem]:
    """What writes `values`, a box of a tensor of the shape `whole`."""
    properties = TensorProperties.create_from_tensor(values)
    return [
        WriteItem(
            MetadataIndex(name, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, whole),
        )
        for chunk in box(start, values.shape)
    ]
