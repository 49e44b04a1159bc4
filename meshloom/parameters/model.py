"""A replica's model: built by the job, compared with those of other ranks, initialised with rank 0's
values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.comm.group import Group
from meshloom.core.errors import JobError
from meshloom.core.job import Job
from meshloom.core.modules.built import built
from meshloom.core.moments.modes import as_trained
from meshloom.core.moments.numerics import numeric_settings
from meshloom.core.plan import Plan
from meshloom.core.random import model_seed, seed_everything
from meshloom.data.to_device import convert_tensors
from meshloom.parameters.values.building import described
from meshloom.parameters.values.keyed_init import call_model
from meshloom.program.ir.nodes import submodule
from meshloom.program.ir.sparse_constants import keep_as_constants, sparse_attributes


def build_model(job: Job, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """The job's model, in the mode that it trains in."""
    seed_everything(model_seed(job.seed))
    return _as_trained(call_model(job).to(device), dtype)


def describe_model(job: Job, dtype: torch.dtype | None) -> nn.Module:
    """The same with parameters on the meta device. Raises `NotDescribableError`."""
    seed_everything(model_seed(job.seed))
    return described(lambda: _as_trained(built(job.model), dtype))


def _as_trained(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    convert_tensors(model, dtype)
    return as_trained(keep_as_constants(model))


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The named trainable parameters. Raises `JobError` if there are none."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        raise JobError(
            "The model has no trainable parameters: every parameter has requires_grad=False, or there are none."
        )
    return named


def facts(job: Job, plan: Plan, model: nn.Module) -> dict[str, Any]:
    """What must be equal on all ranks before anything is exchanged."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    described = {
        name: f"{list(tensor.shape)} {tensor.dtype}" + (" trainable" if tensor.requires_grad else "")
        for name, tensor in tensors.items()
    }
    settings = {
        name: getattr(job, name)
        for name in (
            "batch_size",
            "steps",
            "seed",
            "init",
            "shuffle",
            "drop_last",
            "clip_grad_norm",
            "checkpoint_every",
            "checkpoint",
        )
    }
    sparse = {each.name: each.digest() for each in sparse_attributes(model)}
    given = {"weights": "from files"} if job.weights is not None else {}
    torchs = {f"torch's setting of {name}": value for name, value in numeric_settings().items()}
    return {"plan": str(plan), **settings, **torchs, **given, **described, **sparse}


def copy_from_first(model: nn.Module, group: Group, skip: Collection[str] = ()) -> None:
    """Sets all replicas' parameters and buffers to those of the first one, except those named in `skip`."""
    if group.size == 1:
        return
    works = []
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in skip:
                continue
            contiguous = tensor.detach().contiguous()
            works.append((group.broadcast(contiguous, 0), tensor, contiguous))
    for work, tensor, contiguous in works:
        work.wait()
        if contiguous.data_ptr() != tensor.data_ptr():
            tensor.data.copy_(contiguous)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, tied ones once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def make_row_major(model: nn.Module) -> None:
    """Gives parameters of another layout (a transposed matrix, channels last) row-major memory, of which ranks own slices.
    Those without memory get the shape of one."""
    for each in model.parameters():
        if each.is_contiguous() or each.is_meta or each.layout != torch.strided:
            continue
        if each.untyped_storage().nbytes():
            each.data = each.data.contiguous()
        else:
            each.data = torch.empty(each.shape, dtype=each.dtype, device=each.device)
            each.untyped_storage().resize_(0)


def all_named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, by all of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def replace_tensors(model: nn.Module, make: Callable[[list[str], Tensor], Tensor | None]) -> None:
    """Replaces parameters and buffers by what `make` returns for all names of one and its value; None keeps
    it.

    A parameter is replaced by a new parameter, trainable if the old one was.
    """
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in all_named(model):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    for key, tensor in tensors.items():
        made = make(names[key], tensor)
        if made is None:
            continue
        placed = (
            nn.Parameter(made, requires_grad=tensor.requires_grad)
            if isinstance(tensor, nn.Parameter)
            else made
        )
        for name in names[key]:
            path, _, attribute = name.rpartition(".")
            # a recurrent layer's own list of weights is updated too
            setattr(submodule(model, path), attribute, placed)
