"""Which parameter a tensor is a cast of, as autocast makes them and autograd saves them: known without a look at values.

trained     from the graph of the cast (`cast_of`)
frozen      there is no graph: from what the operator that saves it was given (`FrozenCasts`)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_torch: Any = torch  # for private names


def cast_of(tensor: Tensor) -> Any:
    """The leaf of autograd, such as a parameter, that it has the values of, in another dtype and any view; None: it is something else.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(2, 3))
    >>> cast_of(weight.bfloat16().T) is weight, cast_of(2 * weight.bfloat16())
    (True, None)
    """
    if _torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # it has no memory of its own
        return None
    node: Any = tensor.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    if node is None or node.name() != "ToCopyBackward0":
        return None
    leaf: Any = getattr(node.next_functions[0][0], "variable", None)
    return leaf if leaf is not None and _has_all_of(tensor, leaf) else None


class FrozenCasts:
    """Casts of frozen parameters, while operators run. Autocast makes them anew for each use, and keeps none.

    Only products (linear layers, matrices, convolutions) are looked at: besides results, which have a graph, they save casts of
    what they are given and nothing else. One that is given two such tensors of one size is passed over.

    >>> weight, casts = torch.nn.Parameter(torch.ones(2, 3), requires_grad=False), FrozenCasts()
    >>> with casts.running(F.linear, (torch.ones(1, 3, requires_grad=True), weight)):
    ...     print(casts.cast_of(weight.bfloat16().T) is weight, casts.cast_of(torch.ones(2, 2)))
    True None
    """

    def __init__(self) -> None:
        self._given: Sequence[Tensor] = ()

    @contextmanager
    def running(self, function: Any, arguments: Sequence[Any]) -> Iterator[None]:
        """While a function runs on these arguments."""
        before = self._given
        self._given = _without_graph(arguments) if function in _PRODUCTS else ()
        try:
            yield
        finally:
            self._given = before

    def watching(self) -> AbstractContextManager[Any]:
        """Context in which every function that is called is such a one."""
        return _Watching(self)

    def cast_of(self, tensor: Tensor) -> Tensor | None:
        """As the function of this name, of a tensor that the function which runs saves."""
        if not self._given or tensor.requires_grad or not tensor.is_floating_point():
            return None
        found = [each for each in self._given if _has_all_of(tensor, each)]
        if len(found) != 1 or found[0].dtype == tensor.dtype or tensor.numel() != found[0].numel():
            return None
        return found[0]


class _Watching(TorchFunctionMode):
    def __init__(self, casts: FrozenCasts) -> None:
        super().__init__()
        self._casts = casts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self._casts.running(func, (*args, *kwargs.values())):
            return func(*args, **kwargs)


def _without_graph(arguments: Sequence[Any]) -> list[Tensor]:
    return [each for each in arguments if isinstance(each, Tensor) and not each.requires_grad]


def _has_all_of(tensor: Tensor, leaf: Tensor) -> bool:
    """Whether a cast of the leaf, or a view of it, has memory for the leaf's elements and no more, in their order."""
    # in four and more dims a cast may also have changed the order of the elements
    if leaf.device != tensor.device or not (tensor.ndim < 4 or tensor.is_contiguous()):
        return False
    return tensor.untyped_storage().nbytes() == leaf.numel() * tensor.itemsize


def _products() -> Iterator[Any]:
    names = "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"
    yield from (getattr(F, name) for name in names.split())
    for name in ["matmul", "mm", "bmm", "addmm", "baddbmm"]:
        yield from (getattr(torch, name), getattr(Tensor, name))
    yield Tensor.__matmul__
    aten: Any = torch.ops.aten
    yield from (
        getattr(aten, name).default
        for name in ["linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "convolution"]
    )


# Functions that save nothing for backward but what they are given.
_PRODUCTS = frozenset(_products())


# By which an operator may use it.
_VIEWS = frozenset(
    f"{name}Backward{number}"
    for name in (
        "T",
        "Transpose",
        "Permute",
        "Unsqueeze",
        "Squeeze",
        "View",
        "UnsafeView",
        "Expand",
        "Slice",
        "Select",
    )
    for number in range(3)
)
