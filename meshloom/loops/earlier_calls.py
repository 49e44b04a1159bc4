"""A forward whose results go by what an earlier call has left on its modules, such as a scale that the first batch decides: no program does."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from meshloom.core.errors import CODE_ERRORS, CaptureError
from meshloom.core.random import preserved_draws, seed_everything
from meshloom.loops.captured_forward import CapturedForward
from meshloom.loops.copied_module import copied
from meshloom.loops.places import Place, get_at, set_at, where
from meshloom.program.capture.restored import cloned
from meshloom.program.ir.leaves import copy_of, leaves_of


def check_earlier_calls(
    model: nn.Module,
    forward: CapturedForward,
    batch: Any,
    places: Collection[Place],
    earlier: dict[Place, Any],
) -> None:
    """Compares, on other inputs and parameters, a call after this one with a first call. model: stays as it is. places: that a call sets. earlier: what calls
    of other shapes have left there; has what this one leaves afterwards.

    Raises `CaptureError` where they differ.
    """
    with preserved_draws():
        first = copied(model, {})
        seed_everything(0)
        forward(first, cloned(batch))
        left = {place: tree_map_only(Tensor, torch.detach, get_at(first, place)) for place in places}
        expected = _later(model, forward, batch, {})
        for found in (left, {place: earlier[place] for place in places if place in earlier}):
            try:
                same = _alike(_later(model, forward, batch, found), expected)
            except CODE_ERRORS:
                same = False
            if not same:
                raise CaptureError(
                    f"The forward goes by {' and '.join(where(model, each) for each in found)} of an earlier call: later ones compute something else than the first, "
                    "and a program computes what the first does. Compute it when the module is made, or keep it in a buffer; or use a plan with dp and zero alone."
                )
    earlier.update(left)


def _later(model: nn.Module, forward: CapturedForward, batch: Any, found: dict[Place, Any]) -> list[Tensor]:
    """Results of a call with other inputs and parameters that finds this on its modules."""
    later = copied(model, {})
    for place, each in found.items():
        set_at(later, place, each)
    with torch.no_grad():
        for parameter in later.parameters():
            parameter.mul_(0.5)
    seed_everything(1)
    leaves = leaves_of(batch)
    returned = forward(later, leaves.rebuild([_other(each) for each in leaves.tensors.values()]))
    return [each.detach() for each in tree_leaves(returned) if isinstance(each, Tensor)]


def _other(tensor: Tensor) -> Tensor:
    """Other values that a model takes where it takes these."""
    found = copy_of(tensor)
    with torch.no_grad():
        found.copy_(
            tensor * 0.5 if tensor.is_floating_point() else tensor.flatten().roll(1).reshape(tensor.shape)
        )
    return found


def _alike(found: list[Tensor], expected: list[Tensor]) -> bool:
    try:
        torch.testing.assert_close(found, expected, equal_nan=True)
    except AssertionError:
        return False
    return True
