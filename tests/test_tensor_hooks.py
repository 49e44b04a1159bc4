"""Hooks on the gradients of tensors in a forward are operators of the program if they are linear, and refused with
their line otherwise.

They were lost by `torch.export`, and the comparison with eager refused the whole loss without saying why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshloom.core.errors import CaptureError
from tests.division import at_random, compare, subject_of
from tests.loss_jobs import job_of

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("silent_export")]

Hook = Callable[[Tensor], Tensor | None]


def hooked(hook: Hook) -> Any:
    """A loss with a hook on the gradient of the hidden layer, which is used before it, too."""

    def loss(model: nn.Sequential, batch: dict[str, Tensor]) -> Tensor:
        hidden = model[1](model[0](batch["x"]))
        size = hidden.detach().square().mean()
        hidden.register_hook(hook)
        return F.cross_entropy(model[2](hidden), batch["y"]) + 0.1 * size * hidden.sum()

    return loss


def turned(gradient: Tensor) -> Tensor:
    return -0.3 * gradient


def masked(gradient: Tensor) -> Tensor:
    return gradient * (torch.arange(gradient.shape[1]) % 2)


def summed(gradient: Tensor) -> Tensor:
    return gradient - gradient.mean(0, keepdim=True)


def looked_at(gradient: Tensor) -> None:
    assert gradient.shape[1] == 12


@pytest.mark.parametrize("hook", [turned, masked, summed, looked_at])
@pytest.mark.long
def test_a_linear_hook_is_what_it_is_on_one_device(hook: Hook):
    subject = subject_of(job_of(hooked(hook)))
    for decide in (None, at_random(0), at_random(1)):
        compared = compare(subject, 2, *([decide] if decide else []))
        assert compared.error <= 1e-10, compared.what  # float64; sums over ranks in other orders


def clipped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-1, 1)  # not reached by these gradients: only the trace shows it


def normalised(gradient: Tensor) -> Tensor:
    return gradient / (1 + gradient.norm())


@pytest.mark.parametrize("hook", [clipped, normalised])
@pytest.mark.long
def test_another_hook_is_refused_with_its_line(hook: Hook):
    with pytest.raises(
        CaptureError, match=r"test_tensor_hooks.py:\d+ \(hidden.register_hook\(hook\)\) is not linear"
    ):
        subject_of(job_of(hooked(hook)))
