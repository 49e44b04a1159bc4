"""What leaf functions reach besides their arguments, and what of theirs is reached besides their results: gradients of neither would arrive."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshloom.core.errors import CaptureError
from meshloom.program.ir.sparse_constants import memory_of
from meshloom.program.opaque.call import OpaqueError


def check_arguments(
    model: nn.Module, returned: Any, given: Sequence[Tensor], used: Collection[int], since: int
) -> None:
    """Raise `CaptureError` for a tensor of the model, or one with a gradient, that a call used and that is not among those it was given.

    used: the memory of what its operators were given. since: `order_now` at its beginning.
    """
    mine = {memory_of(each) for each in given}
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if memory_of(tensor) in used and memory_of(tensor) not in mine:
                raise CaptureError(
                    f"it uses the {kind} {name}, which is not among its arguments; give it the tensor or its module"
                )
    ends = dict.fromkeys(_nodes(given), ())
    known = {id(each) for each in given}
    for node in _graph(_nodes(returned), ends):
        is_leaf = hasattr(node, "variable")
        if (is_leaf and id(node.variable) not in known) or (not is_leaf and order(node) < since):
            raise CaptureError(
                "it uses a tensor with a gradient that is not among its arguments; give it as one"
            )


class KeptTensors:
    """The graphs of leaf functions' calls in one loss."""

    def __init__(self) -> None:
        self._behind: dict[Any, Sequence[Any]] = {}
        self._calls: list[tuple[str, int, int]] = []
        self._given: Sequence[Any] = ()
        self._since = 0

    def call(self, arguments: Any) -> None:
        """A call begins."""
        self._given, self._since = _nodes(arguments), order_now()

    def returned(self, path: str, value: Any) -> None:
        """It has returned this."""
        self._behind |= dict.fromkeys(_nodes(value), self._given)
        self._calls.append((path, self._since, order_now()))

    def check(self, loss: Any) -> None:
        """Raise `OpaqueError` if what the loss returned is made of a call's tensors besides its results."""
        for node in _graph(_nodes(loss), self._behind) if self._calls else ():
            for path, since, until in self._calls:
                if not hasattr(node, "variable") and since <= order(node) < until:
                    raise OpaqueError(
                        path, "it keeps a tensor with a gradient that is used outside of it; return it"
                    )


def order(node: Any) -> int:
    """The later an operator ran, the larger."""
    return node._sequence_nr()


def order_now() -> int:
    """What the next operator has at least."""
    with torch.enable_grad():
        return order(torch.ones((), requires_grad=True).clone().grad_fn)


def _nodes(value: Any) -> list[Any]:
    tensors = (each for each in tree_leaves(value) if isinstance(each, Tensor))
    return [each.grad_fn for each in tensors if each.grad_fn is not None]


def _graph(roots: Sequence[Any], behind: Mapping[Any, Sequence[Any]]) -> Iterator[Any]:
    """The nodes of autograd's graph below `roots`, except those of `behind`, which go on with others."""
    waiting, seen = list(roots), set[Any]()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in behind:
            waiting += behind[node]
            continue
        yield node
        waiting += [each for each, _ in node.next_functions if each is not None]
