"""The modules, parameters and buffers of a model, and which of them something else knows."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


class ModelParts:
    """The modules of a model, and their parameters and buffers, each once."""

    def __init__(self, model: nn.Module) -> None:
        self.modules: list[nn.Module] = []
        self.tensors: list[Tensor] = []
        self.names: dict[int, str] = {}
        self._entries: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for path, module in model.named_modules():
            self.modules.append(module)
            self.names[id(module)] = path
            for kind in ("_parameters", "_buffers"):
                held: dict[str, Any] = vars(module).get(kind, {})  # none of a traced one
                for name, each in held.items():
                    if has_memory(each):
                        if id(each) not in self._entries:
                            self.tensors.append(each)
                            self.names[id(each)] = f"{path}.{name}" if path else name
                        self._entries.setdefault(id(each), []).append((held, name))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those among the tensors."""
        return [each for each in self.tensors if isinstance(each, nn.Parameter)]

    def known_elsewhere(self) -> tuple[list[nn.Module], list[Tensor]]:
        """The modules and tensors that something besides modules may refer to, or to whose memory: another tensor, an
        array, a file."""
        children = Counter(
            id(child) for each in self.modules for child in vars(each).get("_modules", {}).values()
        )
        children[id(self.modules[0])] += 1  # the caller
        modules = _with_more_references(self.modules, children)
        entries = Counter({key: len(places) for key, places in self._entries.items()})
        tensors = _with_more_references(self.tensors, entries)
        if tensors:  # a recurrent layer has a list of its weights
            entries.update(id(each) for each, _, _ in self._attributes())
            tensors = _with_more_references(self.tensors, entries)
        seen = {id(each) for each in tensors}
        together = Counter(map(memory_of, self.tensors))
        uses = _uses(torch.empty(0)) - 1
        for each in self.tensors:
            more = _uses(each) - together[memory_of(each)] > uses or is_foreign(each)
            if more and id(each) not in seen:
                tensors.append(each)
        return modules, tensors

    def copy(self, tensors: Iterable[Tensor]) -> None:
        """Gives them, and what else the modules have of their memory, memory of their own, whole storages where there is
        more than one of it. A buffer is replaced by another tensor, a parameter stays the same one."""
        wanted = dict.fromkeys(map(memory_of, tensors))
        together: dict[int, dict[int, Tensor]] = {memory: {} for memory in wanted}
        places = {key: list(entries) for key, entries in self._entries.items()}
        for each in self.tensors:
            if memory_of(each) in together:
                together[memory_of(each)][id(each)] = each
        for each, entries, name in list(self._attributes()) if wanted else ():
            if has_memory(each) and memory_of(each) in together and isinstance(entries, dict):
                together[memory_of(each)][id(each)] = each
                places.setdefault(id(each), []).append((entries, name))
        for found in together.values():
            for each, own in zip(found.values(), _copies(list(found.values())), strict=True):
                if isinstance(each, nn.Parameter):
                    each.data = own
                    continue
                own.requires_grad_(each.requires_grad)
                for entries, name in places[id(each)]:
                    entries[name] = own

    def _attributes(self) -> Iterator[tuple[Tensor, Any, Any]]:
        """Tensors in the modules' attributes and in lists there, with what they are in, and where."""
        for module in self.modules:
            for name, value in vars(module).items():
                if isinstance(value, Tensor):
                    yield value, vars(module), name
                elif type(value) is list:
                    yield from (
                        (each, value, index) for index, each in enumerate(value) if isinstance(each, Tensor)
                    )


def _with_more_references(values: list[Any], known: Counter[int]) -> list[Any]:
    """Those that are referred to oftener than is known."""
    # the last one shows what a value has that nothing refers to
    counted = [*values, nn.Identity() if values and isinstance(values[0], nn.Module) else torch.empty(0)]
    references = [sys.getrefcount(counted[index]) for index in range(len(counted))]
    return [
        each
        for each, found in zip(values, references, strict=False)
        if found - known[id(each)] - 1 > references[-1]  # 1: of `values`
    ]


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    """Of tensors in one storage, which overlap as they do."""
    first = tensors[0].detach()
    if len(tensors) == 1 or any(each.dtype != first.dtype for each in tensors):
        return [each.detach().clone() for each in tensors]
    size = first.untyped_storage().nbytes() // first.itemsize
    whole = first.as_strided((size,), (1,), 0).clone()
    return [whole.as_strided(each.shape, each.stride(), int(each.storage_offset())) for each in tensors]


def has_memory(value: Any) -> bool:
    """Whether it is a tensor, of no class of its own, with memory here."""
    return (
        type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided and value.device.type == "cpu"
    )


def memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def _uses(tensor: Tensor) -> int:
    count: Any = torch._C  # pyright: ignore[reportPrivateUsage]
    return count._storage_Use_Count(memory_of(tensor))


def is_foreign(tensor: Tensor) -> bool:
    """Whether its memory is not torch's own: an array's, or a file's."""
    return not tensor.untyped_storage().resizable()
