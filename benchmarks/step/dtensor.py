"""The benchmark GPT through DTensor: cut by hand into columns and rows, the vocabulary divided in the
embedding, the head and the loss."""

from __future__ import annotations

import torch.distributed as dist
from gpt import GPT
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def wrap_dtensor(model: GPT) -> nn.Module:
    """As the tutorial on tensor parallelism of PyTorch has it, without sequence parallelism.

    Activations inside a block are plain tensors (`use_local_output`), which is what costs DTensor least.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns = {f"blocks.*.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")}
    rows = {f"blocks.*.{name}": RowwiseParallel() for name in ("out", "down")}
    vocabulary = {
        "token": RowwiseParallel(input_layouts=Replicate()),
        # the loss works on the parts: `loss_parallel`
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    tied = model.head.weight is model.token.weight
    parallelize_module(model, mesh, {**columns, **rows, **vocabulary})
    if tied:  # which it leaves as two
        model.head.weight = model.token.weight
    return model
