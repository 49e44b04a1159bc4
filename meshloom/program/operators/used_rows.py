"""Which rows of tables the programs of a step look up.

Programs compute gradients of embeddings dense. Their rows travel between replicas (`exchange/sparse_gradients.py`), and
a row that was used counts even where its gradient is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshloom.comm.pieces import Pieces
from meshloom.core.modules.named_leaves import is_within, modules_of
from meshloom.program.ir.nodes import Node, Ref
from meshloom.program.ir.program import Program
from meshloom.program.operators.collectives import Transition
from meshloom.program.operators.embedding_bag import BagsOfPart
from meshloom.program.operators.partial import embedding_of_part

aten = torch.ops.aten
# operator -> the positions of `padding_idx` and of `sparse` among its arguments; None: it has none
_LOOKUPS: dict[Any, tuple[int | None, int]] = {
    aten.embedding.default: (2, 4),
    aten.embedding_bag.default: (None, 5),
    aten.embedding_bag.padding_idx: (8, 5),
}


class UsedRows:
    """Of `tables`, name -> number of rows in the whole table. Programs' indices count whole tables, also where ranks
    hold parts."""

    def __init__(self, tables: Mapping[str, int], device: torch.device) -> None:
        self.flags = torch.zeros(sum(tables.values()), dtype=torch.uint8, device=device)
        self._of = dict(zip(tables, self.flags.split(list(tables.values())), strict=True))

    def begin(self) -> None:
        """Forgets the rows of the step before."""
        self.flags.zero_()

    def of(self, name: str, pieces: Pieces | None = None, rank: int = 0) -> Tensor | None:
        """Whether each row, or each that `rank` has in `pieces`, was used: bool [rows]. None: no such table."""
        used = self._of[name] != 0 if name in self._of else None
        runs = pieces.held[rank][0] if pieces else None
        if used is None or runs is None:
            return used
        return torch.cat([used[:0], *(used[start:stop] for start, stop in runs)])

    def note(self, name: str, index: Tensor, padding: int | None) -> None:
        """Rows `index` are used, except row `padding`, which has no gradient."""
        flags = self._of.get(name)
        if flags is None:  # before the first step
            return
        apart = padding is not None and padding >= 0
        kept = flags[padding].clone() if apart else None
        flags[index.reshape(-1).long()] = 1
        if kept is not None:
            flags[padding] = kept

    def recorded(self, program: Program) -> Program:
        """The program with its lookups noted, and their gradients dense."""
        values = {each.value: name for name, each in program.parameters.items() if name in self._of}
        nodes: list[Node] = []
        for node in program.nodes:
            first = node.args[0] if node.args else None
            name = values.get(first.name) if isinstance(first, Ref) else None
            if name is not None and isinstance(node.target, Transition):
                values[node.name] = name
            nodes.append(self._changed(node, name))
        return replace(program, nodes=tuple(nodes))

    def watch(self, model: nn.Module, paths: Collection[str]) -> ExitStack:
        """Notes what modules within `paths` look up, which run as written, until the returned stack is closed."""
        names = {id(each): name for name, each in model.named_parameters() if name in self._of}
        undo = ExitStack()
        for path, module in model.named_modules():
            if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
                continue
            # as registered: a parametrized weight is computed where it is read, and its parametrization may write buffers
            table = id(dict(module.named_parameters(recurse=False)).get("weight"))
            if table in names and any(is_within(path, each) for each in modules_of(paths)):
                before = self._before(names[table])
                undo.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        return undo

    def _before(self, name: str) -> Callable[..., None]:
        def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.note(name, args[0] if args else kwargs["input"], module.padding_idx)

        return before

    def _changed(self, node: Node, name: str | None) -> Node:
        if node.target in _LOOKUPS:
            padding, sparse = _LOOKUPS[node.target]
            if len(node.args) > sparse and node.args[sparse]:
                node = replace(node, args=(*node.args[:sparse], False, *node.args[sparse + 1 :]))
            if node.kwargs.get("sparse"):
                node = replace(node, kwargs={**node.kwargs, "sparse": False})
            given = node.args[padding] if padding is not None and len(node.args) > padding else None
            row = given if given is not None else node.kwargs.get("padding_idx")
        elif node.target is embedding_of_part:
            row = node.args[3]
        elif isinstance(node.target, BagsOfPart):
            row = node.target.padding
        else:
            return node
        return node if name is None else replace(node, target=NotedLookup(self, name, node.target, row))


@dataclass(frozen=True, eq=False)
class NotedLookup:
    """A lookup whose rows are noted. padding: the row that has no gradient; negative or None: there is none."""

    used: UsedRows
    name: str
    target: Callable[..., Any]
    padding: int | None

    def __call__(self, weight: Tensor, index: Tensor, *args: Any, **kwargs: Any) -> Any:
        """What `target` returns."""
        self.used.note(self.name, index, self.padding)
        return self.target(weight, index, *args, **kwargs)
