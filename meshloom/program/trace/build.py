"""Builds a program from an exported graph: no in-place operators, numbered draws, tied parameters merged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from meshloom.program.ir.early_updates import with_early_updates
from meshloom.program.ir.leaves import copy_of
from meshloom.program.ir.nodes import Input, Meta, Node, Ref, Variable
from meshloom.program.ir.program import Program
from meshloom.program.ir.step_input import STEP, step_beside
from meshloom.program.ir.written_parameters import mark_written, named_buffers
from meshloom.program.trace.export import Exported, context_of, line_of, path_of
from meshloom.program.trace.export_patches import ALIAS
from meshloom.program.trace.infer import Inferred, Shape, infer, shape_of
from meshloom.program.trace.mutation import without_mutation
from meshloom.program.trace.unfold import unfolded


def build(
    exported: Exported,
    model: nn.Module,
    leaves: Mapping[str, Tensor],
    device: torch.device,
    precision: torch.dtype | None,
    opaque: Mapping[str, str] | None = None,
) -> Program:
    """The program of an exported loss. leaves: the batch's tensors, as exported. opaque: its leaves."""
    leaves = {**leaves, STEP: step_beside(list(leaves.values()))}
    given = {
        **_variables(model.named_parameters(remove_duplicate=False)),
        **_variables(model.named_buffers(remove_duplicate=False)),
    }
    tensors: dict[str, Tensor] = dict(exported.constants)
    first: dict[str, str] = {}  # placeholder -> first name of its tensor, also if tied
    for value, name in {**exported.parameters, **exported.buffers}.items():
        first[value], tensors[value] = given[name]
    likes = {name: shape_of(tensor) for name, tensor in tensors.items()}
    likes |= {
        value: shape_of(copy_of(leaf)) for value, leaf in zip(exported.inputs, leaves.values(), strict=True)
    }
    pure = without_mutation(exported, likes)
    mark_written(
        model, [first[value] for value in (*pure.updates, *pure.in_place) if value in exported.parameters]
    )
    buffers = _variables(named_buffers(model, remove_duplicate=False))
    parameters = {name: each for name, each in given.items() if name not in buffers}
    values = {
        value: f"{'b' if name in buffers else 'p'}_{_identifier(name)}" for value, name in first.items()
    }  # placeholder -> name of its value
    inferred = pure.inferred or infer(pure.graph, likes)
    nodes: list[Any] = list(pure.graph.nodes)
    names_of: dict[fx.Node, str] = {}
    for node in nodes:
        is_alias = node.op == "call_function" and node.target is ALIAS
        names_of[node] = names_of[node.args[0]] if is_alias else str(values.get(node.name, node.name))
    output = next(node for node in nodes if node.op == "output")
    used = {node.name for node in nodes if node.op == "placeholder" and node.users}
    program = Program(
        parameters=_with_aliases(parameters, "p"),
        buffers=_with_aliases(buffers, "b"),
        constants={name: constant for name, constant in exported.constants.items() if name in used},
        inputs=tuple(
            Input(value=value, name=name, meta=_meta(likes[value]))
            for value, name in zip(exported.inputs, leaves, strict=True)
            if name != STEP or value in used
        ),
        nodes=tuple(_nodes(pure.graph, inferred, names_of)),
        outputs=tuple(_value(each, names_of) for each in output.args[0]),
        out_spec=exported.out_spec,
        updates={first[value]: Ref(names_of[node]) for value, node in pure.updates.items()},
        in_place=frozenset(first[value] for value in pure.in_place),
        device=device,
        training=model.training,
        precision=precision,
        opaque=dict(opaque or {}),
    )
    made = unfolded(program)
    return with_early_updates(made) if made.updates else made


def _variables(names_of: Any) -> dict[str, tuple[str, Tensor]]:
    """Name -> the first name of the same tensor, and the tensor."""
    first: dict[int, str] = {}
    return {name: (first.setdefault(id(tensor), name), tensor) for name, tensor in names_of}


def _with_aliases(variables: Mapping[str, tuple[str, Tensor]], prefix: str) -> dict[str, Variable]:
    aliases: dict[str, list[str]] = {}
    for name, (first, _) in variables.items():
        aliases.setdefault(first, []).extend([name] if name != first else [])
    return {
        name: Variable(
            value=f"{prefix}_{_identifier(name)}",
            name=name,
            meta=_meta(shape_of(variables[name][1])),
            aliases=tuple(others),
        )
        for name, others in aliases.items()
    }


def _identifier(name: str) -> str:
    """A module's name as a Python identifier, different for different names.

    >>> _identifier("blocks.0.w_1")
    'blocks_0_w__1'
    """
    return "".join(
        {".": "_", "_": "__"}.get(letter, letter if letter.isalnum() else f"_{ord(letter)}_")
        for letter in name
    )


def _nodes(graph: fx.Graph, inferred: Inferred, names_of: Mapping[fx.Node, str]) -> list[Node]:
    nodes: list[Node] = []
    draw = 0
    for node in graph.nodes:
        if node.op != "call_function" or node.target is ALIAS:
            continue
        num_draws = inferred.draws.get(node, 0)
        kwargs = _explicit(node, inferred.shapes[node])
        nodes.append(
            Node(
                name=names_of[node],
                target=node.target,
                args=tuple(_value(each, names_of) for each in node.args),
                kwargs={key: _value(each, names_of) for key, each in kwargs.items()},
                context=context_of(node),
                path=path_of(node),
                line=line_of(node),
                draw=draw if num_draws else None,
                num_draws=num_draws,
                outputs=tuple(_meta(shape) for shape in inferred.shapes[node]),
            )
        )
        draw += num_draws
    return nodes


def _explicit(node: fx.Node, shapes: tuple[Shape, ...]) -> dict[str, Any]:
    """Keyword arguments, with the dtype where a constructor would take torch's default."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema else []
    given = dict(node.kwargs)
    if "dtype" not in names or node.all_input_nodes or len(shapes) != 1:
        return given
    if given.get("dtype") is None and len(node.args) <= names.index("dtype"):
        given["dtype"] = shapes[0].dtype
    return given


def _value(value: Any, names_of: Mapping[fx.Node, str]) -> Any:
    if isinstance(value, fx.Node):
        return Ref(names_of[value])
    if isinstance(value, list | tuple):
        return tuple(_value(each, names_of) for each in value)
    return value


def _meta(shape: Shape) -> Meta:
    return Meta(shape=shape.shape, dtype=shape.dtype, stride=shape.stride, requires_grad=shape.requires_grad)
