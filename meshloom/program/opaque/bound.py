"""Opaque calls of a program bound to the modules of one rank, which run them."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshloom.core.modules.class_code import has_batch_norms
from meshloom.core.modules.named_leaves import function_name, is_function
from meshloom.core.moments.leaf_draws import call_of_leaf
from meshloom.program.ir.draws import CountDraws
from meshloom.program.ir.nodes import Node, Ref, refs_in, submodule
from meshloom.program.ir.program import Program
from meshloom.program.ir.sparse_constants import memory_of
from meshloom.program.opaque.call import (
    FUNCTION,
    ChangedCallError,
    OpaqueCall,
    OpaqueError,
    instead_of,
    place_of,
    plain_text_of,
)
from meshloom.program.opaque.functions import function_of, modules_of_call
from meshloom.program.opaque.module_tensors import ModuleTensors
from meshloom.program.opaque.operator import OPAQUE, is_opaque


def bound(program: Program, model: nn.Module) -> Program:
    """The program with opaque calls run by the submodules of `model`; itself if it has none."""
    if not any(map(is_opaque, program.nodes)):
        return program
    return replace(program, nodes=tuple(_bound(node, model) for node in program.nodes))


def _bound(node: Node, model: nn.Module) -> Node:
    if not is_opaque(node):
        return node
    path, text = node.args[2:]
    module = modules_of_call(path, model) if is_function(path) else submodule(model, path)
    return replace(node, target=OpaqueModule(module, path, OpaqueCall.of(text)))


def with_needs(program: Program) -> Program:
    """The program whose opaque calls know which of their results it uses, and whether anything draws after them.

    Raises `OpaqueError` for a call that draws as often as values say while something after it draws, too.
    """
    if not any(map(is_opaque, program.nodes)):
        return program
    kept = {ref.name for ref in refs_in((program.outputs, tuple(program.updates.values())))}
    used = kept | {ref.name for node in program.nodes for ref in node.operands()}
    drawing = [at for at, node in enumerate(program.nodes) if node.num_draws]
    nodes: list[Node] = []
    for at, node in enumerate(program.nodes):
        if is_opaque(node):
            inputs, state, path, text = node.args
            picks = [
                each
                for each in program.nodes
                if each.target is operator.getitem and each.args[0] == Ref(node.name)
            ]
            call = replace(
                OpaqueCall.of(text),
                needed=tuple(sorted({each.args[1] for each in picks if each.name in used})),
                is_last_to_draw=not drawing or drawing[-1] <= at,
            )
            if not call.draws_alike and not call.is_last_to_draw:
                raise OpaqueError(
                    path, "how often it draws depends on values, and something after it draws, too"
                )
            node = replace(node, args=(inputs, state, path, call.text()))
        nodes.append(node)
    return replace(program, nodes=tuple(nodes))


class OpaqueModule:
    """A call of a module, or of a function with modules, as the target of a node."""

    _schema = OPAQUE._schema

    def __init__(self, module: nn.Module, path: str, call: OpaqueCall) -> None:
        self.opaque_call = call
        self._module, self._path = module, path
        self._modules = list(module.modules())
        self._tensors = ModuleTensors(module, call.state)
        self._function = function_of(path, call.closed_over) if call.method == FUNCTION else None
        self._drawing = function_name(path) if self._function else path
        self.has_batch_norms = has_batch_norms(self._modules)

    def __str__(self) -> str:
        return str(OPAQUE)

    def __call__(
        self, inputs: Sequence[Tensor], state: Sequence[Tensor], path: str, text: str
    ) -> list[Tensor]:
        """The results of the call."""
        call = self.opaque_call
        args, kwargs = call.arguments(inputs, list(self._module.children()) if self._function else ())
        counter = CountDraws() if call.num_draws else None
        before = torch.default_generator.get_state() if counter is None else None
        with (
            self._tensors.running_on(state, call.written, call.trained_writes),
            self._in_modes(),
            call_of_leaf(self._drawing, call.number),
            counter or nullcontext(),
        ):
            returned: Any = self._run(args, kwargs)
            left = self._left()
        drew = counter.count if counter else int(not torch.equal(before, torch.default_generator.get_state()))  # pyright: ignore[reportArgumentType]
        if drew != call.num_draws and not call.is_last_to_draw:
            raise ChangedCallError(
                f"{self._name()} draws as often as its values say: {call.num_draws} times at the capture and not in this batch, so later draws cannot be "
                f"those of one device. {instead_of(self._path)}".strip(),
            )
        return self._results(returned, left, {memory_of(each) for each in inputs})

    def _left(self) -> list[Any]:
        """What it has left in attributes."""
        return [vars(submodule(self._module, below)).get(name) for below, name in self.opaque_call.attributes]

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._function:
            return self._function(*args, **kwargs)
        if self.opaque_call.method == "forward":
            return self._module.forward(*args, **kwargs)
        return self._module(*args, **kwargs)

    def _results(self, returned: Any, left: Sequence[Any], given: Collection[int]) -> list[Tensor]:
        """given: the memory of what the call was given, of which results are no views."""
        call = self.opaque_call
        leaves = tree_leaves(returned)
        found = [leaves[place] for place in call.places if place < len(leaves)] + list(left)
        needed = range(len(call.results)) if call.needed is None else call.needed
        shapes = [tuple(each.shape) if isinstance(each, Tensor) else None for each in found]
        wanted = [each.shape for each in call.results]
        if len(leaves) != call.num_leaves or any(shapes[number] != wanted[number] for number in needed):
            raise ChangedCallError(
                f"{self._name()} returned tensors of shapes {shapes} for this batch, and of {wanted} when the loss was captured: they depend on values. "
                f"{instead_of(self._path)}".strip(),
            )
        if plain_text_of(leaves) != call.returned:
            raise ChangedCallError(
                f"{self._name()} returned other numbers besides tensors for this batch than when the loss was captured: they depend on values. "
                f"{instead_of(self._path)}".strip(),
            )
        return [
            value.clone()
            if isinstance(value, Tensor) and memory_of(value) in given
            else value
            if isinstance(value, Tensor)
            else torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype)
            for value, meta in zip(found, call.results, strict=True)
        ]

    def _name(self) -> str:
        kind = "" if self._function else f" ({type(self._module).__name__})"
        return f"{place_of(self._path)}{kind}, a leaf,"

    @contextmanager
    def _in_modes(self) -> Iterator[None]:
        """The modules train or evaluate as when captured."""
        changed = [
            (each, each.training)
            for each, mode in zip(self._modules, self.opaque_call.modes, strict=True)
            if each.training != mode
        ]
        for each, mode in changed:
            each.training = not mode
        try:
            yield
        finally:
            for each, mode in changed:
                each.training = mode
