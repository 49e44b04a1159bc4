"""Puts linear layers together with the change of placement of their input, where all of its users are such layers."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace

import torch

from meshloom.graph.collectives import Transition
from meshloom.graph.linears import GatheredLinears
from meshloom.graph.nodes import Node, Ref


def with_gathered_linears(nodes: Sequence[Node], kept: frozenset[str]) -> tuple[Node, ...]:
    """The same nodes with `GatheredLinears` in them. kept: values that are read from outside.

    The layers of one input are computed where the first of them was, so what they use has to be there by then.
    """
    users: dict[str, list[Node]] = {}
    place = {node.name: number for number, node in enumerate(nodes)}
    for node in nodes:
        for ref in dict.fromkeys(node.operands()):
            users.setdefault(ref.name, []).append(node)
    groups: dict[str, list[Node]] = {}  # first layer -> all layers with its input
    changes: dict[str, Node] = {}
    for node in nodes:
        layers = users.get(node.name, [])
        if not (_replicates(node) and layers and node.name not in kept and all(_is_layer(layer, node) for layer in layers)):
            continue
        first = place[layers[0].name]
        if all(place.get(ref.name, -1) < first for layer in layers for ref in layer.operands()):
            groups[layers[0].name] = layers
            changes[layers[0].name] = node
    gone = {change.name for change in changes.values()}
    found: list[Node] = []
    for node in nodes:
        if node.name in gone:
            continue
        if node.name in groups:
            found.append(_joined(changes[node.name], groups[node.name]))
        layers = next((first for first, group in groups.items() if any(layer.name == node.name for layer in group)), None)
        if layers is None:
            found.append(node)
        else:
            number = [layer.name for layer in groups[layers]].index(node.name)
            found.append(replace(node, target=operator.getitem, args=(Ref(_name(changes[layers])), number), kwargs={}))
    return tuple(found)


def _replicates(node: Node) -> bool:
    target = node.target
    return isinstance(target, Transition) and target.target == "part" and target.after.is_whole and target.source in ("invariant", "part")


def _is_layer(node: Node, change: Node) -> bool:
    """A linear layer, outside of autocast, whose input and nothing else is the changed value."""
    if node.target is not torch.ops.aten.linear.default or node.kwargs or node.context.autocast or not node.context.grad:
        return False
    operands = list(node.operands())
    return operands[0].name == change.name and all(ref.name != change.name for ref in operands[1:])


def _joined(change: Node, layers: Sequence[Node]) -> Node:
    operands = [list(layer.operands()) for layer in layers]
    return replace(
        change,
        name=_name(change),
        target=GatheredLinears(change=change.target, biased=tuple(len(refs) == 3 for refs in operands)),
        args=(change.args[0], *(ref for refs in operands for ref in refs[1:])),
        path=layers[0].path,
        line=layers[0].line,
        outputs=tuple(layer.outputs[0] for layer in layers),
    )


def _name(change: Node) -> str:
    return f"{change.name}_linears"
