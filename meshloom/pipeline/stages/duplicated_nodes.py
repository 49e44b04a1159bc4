"""Nodes of a sharded program that are duplicated, so that each stage has its own.

    reshards of parameters            the parameter is held by every stage that uses it, and its value is never sent
    fused layers of one input         split by stage, each with its own parameters
    rows that data routes to a rank   computed in every stage that uses them

Otherwise parameters would be in the first of these stages, whatever the cuts, and messages would have sizes
that only their senders know.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import replace

from meshloom.pipeline.stages.stages import computed_from_batch
from meshloom.program.ir.nodes import Node, Ref, contiguous_strides, refs_in
from meshloom.program.ir.program import Program
from meshloom.program.operators.collectives import Transition
from meshloom.program.operators.experts import place_rows, rows_here, take_rows
from meshloom.program.operators.gathered import GatheredLayers
from meshloom.tensor_parallel.partition import RoutedRows


def split_fused_layers(part: Program, stage_of: Mapping[str, int]) -> Program:
    """The program with layers fused only within a stage. stage_of: of the layers."""
    layers: dict[str, list[Node]] = {}  # of the fused layers, in order
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
            target, outputs = node.target.only(numbers), tuple(node.outputs[number] for number in numbers)
            nodes.append(replace(node, name=name, target=target, args=(given, *used), outputs=outputs))
            picked |= {each.name: replace(each, args=(Ref(name), at)) for at, each in enumerate(own)}
    return replace(part, nodes=tuple(nodes))


def restore_routed_rows(
    part: Program, stage_of: Mapping[str, int], routed: Mapping[str, RoutedRows], pinned: Collection[str] = ()
) -> tuple[Program, dict[str, int]]:
    """The program with routed rows in their places while they are sent: other stages do not know their
    number.

    stage_of: of all nodes. routed: values with such rows. pinned: as for `computed_from_batch`.
    """
    row_indices = {node.name: node for node in part.nodes if node.target is rows_here}
    free = computed_from_batch(part, pinned)  # is never sent
    routed = {name: each for name, each in routed.items() if name not in free}
    found = dict(stage_of)
    later: dict[str, set[int]] = {}
    for node in part.nodes:
        for ref in node.operands():
            if ref.name in routed and stage_of[node.name] != stage_of.get(ref.name, stage_of[node.name]):
                later.setdefault(ref.name, set()).add(stage_of[node.name])
    nodes: list[Node] = []
    for node in part.nodes:
        here = stage_of[node.name]
        received = [ref.name for ref in node.operands() if here in later.get(ref.name, ())]
        nodes.append(node.with_operands({name: f"{name}__in_{here}" for name in received}))
        if node.name not in later:
            continue
        where, rows, (meta,) = routed[node.name], row_indices[routed[node.name].rows], node.outputs
        shape = (*meta.shape[: where.dim], where.size, *meta.shape[where.dim + 1 :])
        whole = replace(meta, shape=shape, stride=contiguous_strides(shape))
        plain = replace(node, kwargs={}, draw=None, num_draws=0)
        name, args = f"{node.name}__placed", (Ref(node.name), Ref(rows.name), where.dim, where.size)
        nodes.append(replace(plain, name=name, target=place_rows, args=args, outputs=(whole,)))
        found[name] = here
        args = (Ref(name), Ref(rows.name), where.dim)
        for stage in sorted(later[node.name]):
            name = f"{node.name}__in_{stage}"
            nodes.append(replace(plain, name=name, target=take_rows, args=args, outputs=(meta,)))
            found[name] = stage
    return replace(part, nodes=tuple(nodes)), found


def duplicate_reshards(part: Program, stage_of: Mapping[str, int]) -> tuple[Program, dict[str, int]]:
    """The program with a reshard of a parameter, and the routing of rows, duplicated in every stage that uses
    it, and the stage of every node.

    stage_of: of all nodes.
    """
    variables = {each.value for each in (*part.parameters.values(), *part.buffers.values())}
    several: dict[str, list[int]] = {}
    stages: dict[str, set[int]] = {}
    for node in reversed(part.nodes):
        used = stages.get(node.name) or {stage_of[node.name]}
        reshards = isinstance(node.target, Transition) and next(node.operands()).name in variables
        if node.target is rows_here or (reshards and len(used) > 1):
            several[node.name] = sorted(used)
        for ref in node.operands():
            stages.setdefault(ref.name, set()).update(used if node.name in several else {stage_of[node.name]})
    found = dict(stage_of)
    nodes: list[Node] = []
    for node in part.nodes:
        for stage in several.get(node.name, (stage_of[node.name],)):
            copied = [ref.name for ref in node.operands() if ref.name in several]
            own = node.with_operands({name: f"{name}_{stage}" for name in copied})
            if node.name in several:
                own = replace(own, name=f"{node.name}_{stage}")
                found[own.name] = stage
            nodes.append(own)
    return replace(part, nodes=tuple(nodes)), found
