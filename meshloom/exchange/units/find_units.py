"""The units of a model: which parameters zero=3 gathers together, and for whose forward.

blocks that repeat    modules of one ModuleList, ModuleDict or Sequential that have the same type and shapes
large parts           modules with large parameters of their own, outside of blocks (embeddings, heads)
the rest              everything else, and what several of the others use (tied parameters)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from meshloom.core.errors import JobError
from meshloom.exchange.units.unit_slices import UnitParameters
from meshloom.program.ir.written_parameters import written_parameters

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_units(
    model: nn.Module,
    *,
    chosen: Sequence[str | type[nn.Module]] | None = None,
    large_bytes: int,
) -> list[UnitParameters]:
    """The rest first, then the others in the model's order. Every parameter is in one unit, but for those that count as
    buffers (`written_parameters`), which are in none.

    chosen: names or types of the modules that are units, in
        place of those that are found; all other parameters are then the rest. large_bytes: parameters of a
        module's own that make it a unit.

    >>> model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    >>> [(unit.name, [name for name, _ in unit.named]) for unit in find_units(model, large_bytes=100)]
    [('the rest', ['2.weight', '2.bias']), ('0', ['0.weight', '0.bias']), ('1', ['1.weight', '1.bias'])]
    """
    modules = dict(_chosen(model, chosen) if chosen is not None else _repeated("", model))
    if chosen is None:
        modules |= dict(_large(model, modules.values(), large_bytes))
    # the one unit that uses a parameter; "": several do, or what is no unit
    user: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        unit = _unit_of(name, modules)
        user[id(parameter)] = unit if user.get(id(parameter), unit) == unit else ""
    named: dict[str, list[tuple[str, nn.Parameter]]] = {"": [], **{name: [] for name in modules}}
    written = written_parameters(model)
    for name, parameter in model.named_parameters():
        if name in written:
            continue
        named[user[id(parameter)]].append((name, parameter))
    return [
        UnitParameters(name=unit or "the rest", module=modules.get(unit), named=each)
        for unit, each in named.items()
        if each
    ]


def held_units(units: Sequence[UnitParameters], model: nn.Module) -> list[UnitParameters]:
    """What a rank holds of the units of the full model, whose tensors may have been replaced by shards since or
    by tensors on the meta device."""
    here = {name: each for name, each in model.named_parameters() if not each.is_meta}
    held = [
        replace(unit, named=[(name, here[name]) for name, _ in unit.named if name in here]) for unit in units
    ]
    return [unit for unit in held if unit.named]


def _unit_of(name: str, modules: dict[str, nn.Module]) -> str:
    """The innermost of `modules` that a parameter is in; "": none."""
    path = name
    while path:
        path = path.rpartition(".")[0]
        if path in modules:
            return path
    return ""


def _chosen(model: nn.Module, chosen: Sequence[str | type[nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    modules = dict(model.named_modules())
    for each in chosen:
        found = [
            (name, module)
            for name, module in modules.items()
            if name and (name == each if isinstance(each, str) else isinstance(module, each))
        ]
        if not found:
            what = f"module {each!r}" if isinstance(each, str) else f"module of type {each.__name__}"
            raise JobError(
                f"Job(units=...) names {what}, and the model has none. It has {', '.join(list(modules)[1:6])}, ..."
            )
        yield from (pair for pair in found if not _is_script(pair[1]))


def _repeated(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Outermost blocks, by name."""
    children = [(name, child) for name, child in module.named_children() if not _is_script(child)]
    kinds = [_kind(child) for _, child in children]
    for (name, child), kind in zip(children, kinds, strict=True):
        inside = f"{path}.{name}" if path else name
        if isinstance(module, CONTAINERS) and kind is not None and kinds.count(kind) > 1:
            yield inside, child
        else:
            yield from _repeated(inside, child)


def _kind(module: nn.Module) -> Any:
    """What two blocks have in common; None: it has no parameters."""
    parameters = [(name, tuple(each.shape), each.dtype) for name, each in module.named_parameters()]
    return (type(module), tuple(parameters)) if parameters else None


def _large(
    model: nn.Module, blocks: Collection[nn.Module], large_bytes: int
) -> Iterator[tuple[str, nn.Module]]:
    inside = {id(module) for block in blocks for module in block.modules()}
    scripted = {id(each) for script in model.modules() if _is_script(script) for each in script.modules()}
    for name, module in model.named_modules():
        own = sum(each.nbytes for each in module.parameters(recurse=False))
        if name and own >= large_bytes and id(module) not in inside | scripted:
            yield name, module


def _is_script(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)
