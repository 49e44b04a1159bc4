"""Fuses linear layers or convolutions with the resharding of their input, if nothing else uses it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from meshloom.program.ir.nodes import Node, Ref, refs_in, users_by_value
from meshloom.program.operators.collectives import Transition
from meshloom.program.operators.convolutions import Convolution, GatheredConvolutions
from meshloom.program.operators.linears import GatheredLinears
from meshloom.program.operators.partial import convolution_of_nothing

aten = torch.ops.aten


def with_gathered_layers(nodes: Sequence[Node], kept: frozenset[str]) -> tuple[Node, ...]:
    """The nodes with `GatheredLinears` and `GatheredConvolutions` in them. kept: values that are used after
    the last node.

    All layers of one input are computed at the first of them, so their operands must exist by then.
    """
    users = users_by_value(nodes)
    place = {node.name: number for number, node in enumerate(nodes)}
    groups: dict[str, list[Node]] = {}  # first layer -> all layers with its input
    reshards: dict[str, Node] = {}
    for node in nodes:
        layers = users.get(node.name, [])
        if not layers or node.name in kept or not _replicates(node):
            continue
        if not all(_has_input(layer, node) and not layer.kwargs for layer in layers):
            continue
        are_linear = all(layer.target is aten.linear.default for layer in layers)
        if not are_linear and not all(_convolution(layer) is not None for layer in layers):
            continue
        first = place[layers[0].name]
        if all(place.get(ref.name, -1) < first for layer in layers for ref in layer.operands()):
            groups[layers[0].name] = layers
            reshards[layers[0].name] = node
    gone = {reshard.name for reshard in reshards.values()}
    index_of = {
        layer.name: (first, number) for first, layers in groups.items() for number, layer in enumerate(layers)
    }
    found: list[Node] = []
    for node in nodes:
        if node.name in gone:
            continue
        if node.name in groups:
            found.append(_fused(reshards[node.name], groups[node.name]))
        if node.name in index_of:
            first, number = index_of[node.name]
            args = (Ref(_name(reshards[first])), number)
            node = replace(node, target=operator.getitem, args=args, kwargs={})
        found.append(node)
    return tuple(found)


def _replicates(node: Node) -> bool:
    target = node.target
    return (
        isinstance(target, Transition)
        and target.target == "part"
        and target.after.is_whole
        and target.source in ("invariant", "part")
    )


def _has_input(layer: Node, reshard: Node) -> bool:
    """Whether a layer, outside of autocast, has the resharded value as its input and as no other operand."""
    if layer.context.autocast or not layer.context.grad:
        return False
    operands = list(layer.operands())
    return operands[0].name == reshard.name and all(ref.name != reshard.name for ref in operands[1:])


def _convolution(node: Node) -> Convolution | None:
    """The node as a convolution; None if it is none, or one with groups."""
    target, settings = node.target, node.args[3:]
    if target is convolution_of_nothing and node.outputs[0].shape[1] == 0:
        target, settings = node.args[4], node.args[5:]
    if target not in _CONVOLUTIONS:
        return None
    dims = _CONVOLUTIONS[target]
    *given, groups = (*settings, *_DEFAULTS[len(settings) :])
    if groups != 1:
        return None
    stride, padding, dilation = (
        (each,) * dims if isinstance(each, int) else tuple(each) * (dims // len(each)) for each in given
    )
    biased = len(node.args) > 2 and isinstance(node.args[2], Ref)
    return Convolution(operator=target, stride=stride, padding=padding, dilation=dilation, biased=biased)


_CONVOLUTIONS: dict[Any, int] = {aten.conv1d.default: 1, aten.conv2d.default: 2, aten.conv3d.default: 3}
_DEFAULTS = (1, 0, 1, 1)  # stride, padding, dilation, groups


def _fused(reshard: Node, layers: Sequence[Node]) -> Node:
    operands = [list(refs_in(layer.args)) for layer in layers]
    found = [each for layer in layers if (each := _convolution(layer)) is not None]
    linears = GatheredLinears(change=reshard.target, biased=tuple(len(refs) == 3 for refs in operands))
    return replace(
        reshard,
        name=_name(reshard),
        target=GatheredConvolutions(change=reshard.target, layers=tuple(found)) if found else linears,
        args=(reshard.args[0], *(ref for refs in operands for ref in refs[1:])),
        path=layers[0].path,
        line=layers[0].line,
        outputs=tuple(layer.outputs[0] for layer in layers),
    )


def _name(reshard: Node) -> str:
    return f"{reshard.name}_layers"
