"""What a divided program makes once for users in several stages is made in each of their stages.

    a change of a parameter's placement     the parameter is held in every stage that uses it, and its value is sent to none
    layers of one input, run together       those of each stage together, with their own parameters

Else parameters would lie in the first of those stages, whatever was asked for.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace

from torch.utils._pytree import tree_map_only

from meshloom.graph.collectives import Transition
from meshloom.graph.gathered import GatheredLayers
from meshloom.graph.nodes import Node, Ref, refs_in
from meshloom.graph.program import Program


def layers_apart(part: Program, stage_of: Mapping[str, int]) -> Program:
    """The program with layers of one input run together only where they are in one stage. stage_of: of the layers."""
    layers: dict[str, list[Node]] = {}  # of what is run together, in order
    for node in part.nodes:
        if node.target is operator.getitem and isinstance(node.args[0], Ref):
            layers.setdefault(node.args[0].name, []).append(node)
    nodes: list[Node] = []
    picked: dict[str, Node] = {}
    for node in part.nodes:
        if not isinstance(node.target, GatheredLayers):
            nodes.append(picked.get(node.name, node))
            continue
        members = layers[node.name]
        stages = sorted({stage_of[each.name] for each in members})
        if len(stages) == 1:
            nodes.append(node)
            continue
        given, *weights = refs_in(node.args)
        parted = node.target.parted(weights)
        for stage in stages:
            own = [each for each in members if stage_of[each.name] == stage]
            numbers = [int(each.args[1]) for each in own]
            used = [ref for number in numbers for ref in parted[number] if ref is not None]
            name = f"{node.name}_{stage}"
            nodes.append(
                replace(
                    node, name=name, target=node.target.only(numbers), args=(given, *used), outputs=tuple(node.outputs[number] for number in numbers)
                )
            )
            picked |= {each.name: replace(each, args=(Ref(name), at)) for at, each in enumerate(own)}
    return replace(part, nodes=tuple(nodes), _runners={})


def changes_apart(part: Program, stage_of: Mapping[str, int]) -> tuple[Program, dict[str, int]]:
    """The program with a change of a parameter's placement for every stage that uses it, and the stage of every node. stage_of: of all nodes."""
    variables = {each.value for each in (*part.parameters.values(), *part.buffers.values())}
    stages: dict[str, set[int]] = {}
    for node in part.nodes:
        for ref in node.operands():
            stages.setdefault(ref.name, set()).add(stage_of[node.name])
    several = {
        node.name: stages[node.name]
        for node in part.nodes
        if isinstance(node.target, Transition) and next(node.operands()).name in variables and len(stages.get(node.name, ())) > 1
    }
    found = dict(stage_of)
    nodes: list[Node] = []
    for node in part.nodes:
        if node.name in several:
            copies = [replace(node, name=f"{node.name}_{stage}") for stage in sorted(several[node.name])]
            found |= dict(zip((each.name for each in copies), sorted(several[node.name]), strict=True))
            nodes += copies
            continue
        renamed = {ref.name: Ref(f"{ref.name}_{stage_of[node.name]}") for ref in node.operands() if ref.name in several}
        nodes.append(_renamed(node, renamed) if renamed else node)
    return replace(part, nodes=tuple(nodes), _runners={}), found


def _renamed(node: Node, renamed: Mapping[str, Ref]) -> Node:
    """The node with other references."""
    args, kwargs = tree_map_only(Ref, lambda ref: renamed.get(ref.name, ref), (node.args, dict(node.kwargs)))
    return replace(node, args=args, kwargs=kwargs)
