"""Loops into which no batch was seen coming: all rows of the data in every step, or why there is no job."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from meshloom.adopt.watching.draws import tensors_of
from meshloom.adopt.watching.route import Line, UntranslatedError
from meshloom.adopt.watching.script import Script, one_refusal
from meshloom.adopt.watching.source import bound, calls, method, used


def whole_batch(script: Script, wanted: set[str]) -> list[str]:
    """Names of the set-up's tensors, of as many rows each, that the loss is of; none if it is of others too."""
    tensors = {
        name: value
        for name in wanted
        if isinstance(value := script.setup_values.get(name), Tensor) and not isinstance(value, nn.Parameter)
    }
    data = {name: value for name, value in tensors.items() if value.dim()}
    same = len({len(each) for each in data.values()}) == 1 and not any(each.requires_grad for each in data.values())  # fmt: skip
    if script.first.source or _left_for_next(script) or not same or len(next(iter(data.values()))) < 2:
        return []
    order = [name for line in script.route.setup for name in sorted(bound(line.node)) if name in data]
    return list(dict.fromkeys(order))


def no_batch(script: Script) -> UntranslatedError:
    """Why a script has no batches, with what to do."""
    if (left := _left_for_next(script)) is not None:
        line, name = left
        return line.refuse(
            f"{name!r} goes from one batch to the next. Keep it, without gradients, in a buffer of the model (docs/contract.md), train with one chunk a step, "
            "and let batches have one row a sample."
        )
    loops = [
        (loop.node, script.evaluate(script.iterated.unwrapped(loop.node.iter)))
        for loop in script.route.loops
        if isinstance(loop.node, ast.For)
    ]
    for node, data in loops:
        if isinstance(data, list | tuple) and data and not isinstance(data[0], str):
            return one_refusal(
                script, node.lineno,
                "the loop takes one sample a step, and a plan divides batches. Make them: a DataLoader of this list with batch_size=..., and a "
                "collate_fn that pads what differs in length.",
            )  # fmt: skip
    for node, data in loops:
        if any(method(each) == "zip" for each in calls(node.iter)):
            return one_refusal(
                script, node.lineno,
                "the loop takes a batch of each of several DataLoaders (zip), which become one if each has a batch_size, reads in order or shuffled, and gives full "
                "batches in the first steps. Else make one Dataset whose sample is one of each (index % len), and loop over its DataLoader.",
            )  # fmt: skip
        own = type(data).__module__ == "__main__" and isinstance(data, Iterable)
        if script.watched.loader is not None and own:
            kind = type(data).__name__
            return one_refusal(
                script, node.lineno,
                f"the loop is over a {kind}, and not over the DataLoader that it reads. Loop over that, and do what {kind} does in the loop or in a collate_fn.",
            )  # fmt: skip
    return one_refusal(
        script, script.first.line[1],
        "no batch was seen coming into the loop, from a DataLoader or from a function that returns "
        "tensors of as many rows. Put the data into a DataLoader, or into a function like get_batch().",
    )  # fmt: skip


def _left_for_next(script: Script) -> tuple[Line, str] | None:
    """A statement of the innermost loop, and a tensor that it uses as the round before has left it."""
    depth = len(script.route.loops)
    lines = [each for each in [*script.route.body, *script.route.beside] if each.depth == depth]
    rebound, made = set[str]().union(*(bound(each.node) for each in lines)), set[str]()
    for line in sorted(lines, key=lambda each: each.at):
        left = used(line.node) & rebound - made - script.model_names
        found = [name for name in sorted(left) if _is_state(script.values.get(name))]
        if found:
            return line, found[0]
        made |= bound(line.node)
    return None


def _is_state(value: Any) -> bool:
    """Whether it is a tensor that is no single number, or several."""
    found = tensors_of(value)
    return bool(found) and all(each.dim() for each in found) and not isinstance(value, nn.Parameter)
