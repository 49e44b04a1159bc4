"""Puts linear layers, or convolutions, together with the change of placement of their input, where all of its
users are such layers."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from meshloom.program.ir.nodes import Node, Ref, refs_in
from meshloom.program.operators.collectives import Transition
from meshloom.program.operators.convolutions import Convolution, GatheredConvolutions
from meshloom.program.operators.linears import GatheredLinears
from meshloom.program.operators.partial import convolution_of_nothing

aten = torch.ops.aten


def with_gathered_layers(nodes: Sequence[Node], kept: frozenset[str]) -> tuple[Node, ...]:
    """The same nodes with `GatheredLinears` and `GatheredConvolutions` in them. kept: values that are read
    from outside.

    The layers of one input are computed where the first of them was, so what they use has to be there by
    then.
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
        if not (
            _replicates(node)
            and layers
            and node.name not in kept
            and (_are_linear(layers, node) or _are_convolutions(layers, node))
        ):
            continue
        first = place[layers[0].name]
        if all(place.get(ref.name, -1) < first for layer in layers for ref in layer.operands()):
            groups[layers[0].name] = layers
            changes[layers[0].name] = node
    gone = {change.name for change in changes.values()}
    picked = {
        layer.name: (first, number) for first, layers in groups.items() for number, layer in enumerate(layers)
    }
    found: list[Node] = []
    for node in nodes:
        if node.name in gone:
            continue
        if node.name in groups:
            found.append(_joined(changes[node.name], groups[node.name]))
        if node.name in picked:
            first, number = picked[node.name]
            found.append(
                replace(node, target=operator.getitem, args=(Ref(_name(changes[first])), number), kwargs={})
            )
        else:
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


def _are_linear(layers: Sequence[Node], change: Node) -> bool:
    return all(
        layer.target is aten.linear.default and not layer.kwargs and _reads(layer, change) for layer in layers
    )


def _are_convolutions(layers: Sequence[Node], change: Node) -> bool:
    return all(
        _reads(layer, change) and not layer.kwargs and _convolution(layer) is not None for layer in layers
    )


def _reads(layer: Node, change: Node) -> bool:
    """Whether a layer, outside of autocast, has the changed value for its input and nothing else."""
    if layer.context.autocast or not layer.context.grad:
        return False
    operands = list(layer.operands())
    return operands[0].name == change.name and all(ref.name != change.name for ref in operands[1:])


def _convolution(node: Node) -> Convolution | None:
    """The node as a layer; None if it is no convolution, or one in groups."""
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
    return Convolution(
        operator=target,
        stride=stride,
        padding=padding,
        dilation=dilation,
        biased=len(node.args) > 2 and isinstance(node.args[2], Ref),
    )


_CONVOLUTIONS: dict[Any, int] = {aten.conv1d.default: 1, aten.conv2d.default: 2, aten.conv3d.default: 3}
_DEFAULTS = (1, 0, 1, 1)  # stride, padding, dilation, groups


def _joined(change: Node, layers: Sequence[Node]) -> Node:
    operands = [list(refs_in(layer.args)) for layer in layers]
    found = [each for layer in layers if (each := _convolution(layer)) is not None]
    linears = GatheredLinears(change=change.target, biased=tuple(len(refs) == 3 for refs in operands))
    return replace(
        change,
        name=_name(change),
        target=GatheredConvolutions(change=change.target, layers=tuple(found)) if found else linears,
        args=(change.args[0], *(ref for refs in operands for ref in refs[1:])),
        path=layers[0].path,
        line=layers[0].line,
        outputs=tuple(layer.outputs[0] for layer in layers),
    )


def _name(change: Node) -> str:
    return f"{change.name}_layers"
