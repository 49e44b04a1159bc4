"""How far gradients move when each operator of backward is rounded otherwise.

Perturbed parameters or outputs do not show all that rounding may do: where p = 1 is rounded, d - (d p + e q) has the same last places whatever
d is, and sums of parts of d, which ranks have, have others. So one device runs once more, and what each operator of backward
returns is moved within rounding. Operators that torch can take apart are taken apart, as they sum and subtract within (Vignes, "A
stochastic arithmetic for reliable scientific computation", 1993).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from meshloom.verify.reference.reference import Reference
from meshloom.verify.reference.reruns import ROUNDING_UNITS, moved_from, noise


def backward_effect(reference: Reference) -> dict[str, float]:
    """By name, how far the averaged gradients move. To be called between `Reference.run` and `Reference.update`."""
    with reference.rerun() as gradients, _OtherRounding():
        reference.evaluate(watched=False)
        return moved_from(reference, gradients)


class _OtherRounding(TorchDispatchMode):
    """Multiplies each element of what an operator of backward computes by 1 + u, |u| at most a few units in the last place."""

    def __init__(self) -> None:
        super().__init__()
        self._apart, self._number = dict(core_aten_decompositions().items()), 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        in_backward = torch._C._current_autograd_node() is not None  # pyright: ignore[reportPrivateUsage]
        if not in_backward or not _computes(func):
            return func(*args, **kwargs)
        if (apart := self._apart.get(func)) is not None:
            with (
                suppress(RuntimeError, TypeError, ValueError, LookupError),
                self,
            ):  # what is not for every layout or dtype
                if (found := apart(*args, **kwargs)) is not NotImplemented:
                    return found
        self._number += 1
        return tree_map(partial(_moved, number=self._number), func(*args, **kwargs))


def _computes(func: Any) -> bool:
    """Whether it returns tensors of its own, and draws nothing."""
    aliases = any(each.alias_info is not None for each in func._schema.returns)
    return not (aliases or func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags)


def _moved(value: Any, number: int) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.layout != torch.strided:
        return value
    dtype = value.dtype
    return value * noise(value, ROUNDING_UNITS.get(dtype, 1) * torch.finfo(dtype).eps, number).to(dtype)
