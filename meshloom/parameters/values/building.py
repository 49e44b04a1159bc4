"""A model's parameters described without values, and built with them on one rank of a host after another.

described     every rank at once   its parameters are on the meta device; buffers and other tensors are real
in turn       rank 0, 1, 2, ...    each builds the whole model, keeps its share, and lets go of the rest
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from meshloom.checkpoint.resuming import check_together
from meshloom.comm.group import Group
from meshloom.comm.objects import collect
from meshloom.core.errors import MeshloomError, first_line
from meshloom.core.modules.module_caches import no_tensors_kept
from meshloom.core.moments.uncompiled import uncompiled
from meshloom.program.ir.replaced import replaced

# what code raises that reads a tensor without values, or goes on with what it has read
READS = (RuntimeError, TypeError, ValueError, AssertionError, AttributeError)
_REGISTERED = {"_parameters", "_buffers", "_modules"}
_HOOKS = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}


class NotDescribableError(Exception):
    """The model cannot be built without the values of its parameters."""


def described(build: Callable[[], nn.Module]) -> nn.Module:
    """What `build` returns, with parameters on the meta device. Raises `NotDescribableError`.

    >>> model = described(lambda: nn.BatchNorm1d(3))
    >>> model.weight.is_meta, model.running_var
    (True, tensor([1., 1., 1.]))
    """
    memory: dict[int, int] = {}  # of parameters, by identity, as they were registered
    try:
        with no_tensors_kept(), uncompiled(), _on_meta(memory):
            model = build()
    except MeshloomError:
        raise
    except READS as error:
        raise NotDescribableError(first_line(error)) from error
    owners: dict[int, str] = {}
    for name, each in model.named_parameters():
        owner = owners.setdefault(memory.get(id(each), id(each)), name)
        if owner != name:
            raise NotDescribableError(f"{name} lies in the memory of {owner}")
    for name in _computed(model):
        raise NotDescribableError(f"{name} is made of them")
    return model


def _computed(model: nn.Module) -> Iterator[str]:
    """What modules hold beside parameters and buffers that has no values, so that a forward cannot read it. Where a pre-hook
    runs before each forward, as that of `weight_norm`, it computes its tensor anew."""
    own = {id(each) for each in (*model.parameters(), *model.buffers())}
    for path, module in model.named_modules():
        hooked = bool(vars(module).get("_forward_pre_hooks"))
        for name, value in vars(module).items():
            if name in _REGISTERED or (hooked and isinstance(value, Tensor)):
                continue
            for leaf in tree_leaves(value):
                tensors = (*leaf.parameters(), *leaf.buffers()) if isinstance(leaf, nn.Module) else (leaf,)
                if any(isinstance(each, Tensor) and each.is_meta and id(each) not in own for each in tensors):
                    yield f"{name} of {path or 'the model'}"


@contextmanager
def _on_meta(memory: dict[int, int]) -> Iterator[None]:
    register: Any = nn.Module.register_parameter
    alive: list[StorageWeakRef] = []  # addresses are not used again while these exist
    before: dict[Any, Any] = {}  # storage of a parameter on the meta device -> the one that it had

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is None or is_lazy(param) or param.layout != torch.strided:
            return
        if type(param) is not nn.Parameter:
            raise NotDescribableError(f"{name} of {type(module).__name__} is a {type(param).__name__}")
        storage = StorageWeakRef(param.untyped_storage())
        alive.append(storage)
        memory[id(param)] = before.get(storage.cdata, storage.cdata)
        if not param.is_meta:
            swap_memory(param, torch.empty_like(param.detach(), device="meta"))
            placed = StorageWeakRef(param.untyped_storage())
            alive.append(placed)
            before[placed.cdata] = storage.cdata

    with replaced(nn.Module, "register_parameter", on_meta):
        yield


def swap_memory(parameter: nn.Parameter, tensor: Tensor) -> None:
    """Gives a parameter the memory of a tensor on another device; it stays the same object, with its hooks. Raises
    `NotDescribableError` where something else looks at it."""
    hooks = {kind: list((getattr(parameter, kind) or {}).values()) for kind in _HOOKS}
    new = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    try:
        torch._C._swap_tensor_impl(parameter, new)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    except RuntimeError as error:
        raise NotDescribableError(str(error)) from error
    for kind, register in _HOOKS.items():
        if hooks[kind]:
            setattr(parameter, kind, None)
            for hook in hooks[kind]:
                getattr(parameter, register)(hook)


def without_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor like this one on a device, whose storage has no bytes yet."""
    empty = torch.empty_like(tensor.detach(), device=device)
    empty.untyped_storage().resize_(0)
    return empty


def give_memory(tensor: Tensor) -> None:
    """To one that is `without_memory`; its values are up to who reads it next."""
    if not tensor.untyped_storage().nbytes():
        tensor.untyped_storage().resize_(tensor.nbytes)


@dataclass(frozen=True, kw_only=True)
class BuildingOrder:
    """The ranks of each host, one after another. mine: this rank's number on its host. count: of the host with most
    ranks."""

    world: Group
    mine: int
    count: int

    @staticmethod
    def of(world: Group, host: str) -> BuildingOrder:
        """host: equal on the ranks of one host."""
        hosts: list[str] = collect(world, host)
        return BuildingOrder(
            world=world, mine=hosts[: world.rank].count(host), count=max(hosts.count(each) for each in hosts)
        )

    def each(self, work: Callable[[], None]) -> None:
        """Calls `work` on one rank of each host after another; no rank waits for longer than one of these takes. Raises the
        same error on all ranks."""
        for turn in range(self.count):
            check_together(self.world, work if turn == self.mine else lambda: None)
