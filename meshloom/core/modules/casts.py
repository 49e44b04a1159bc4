"""Which parameter a tensor is a cast of, as autocast makes them and autograd saves them: known from its graph, without a look at values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
    # in four and more dims a cast may also have changed the order of the elements
    if leaf is None or leaf.device != tensor.device or not (tensor.ndim < 4 or tensor.is_contiguous()):
        return None
    return leaf if tensor.untyped_storage().nbytes() == leaf.numel() * tensor.itemsize else None


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
