"""What a loss function returned, as a sum and its weight."""

from __future__ import annotations

import torch
from torch import Tensor

from meshloom.core.errors import JobError
from meshloom.core.job_functions import Loss

Divisor = (
    float | Tensor
)  # of gradients; a tensor [] is known to the device alone, so the host need not wait for it


def divides(divisor: Divisor) -> bool:
    """Whether dividing by it may change anything, as far as the host knows."""
    return isinstance(divisor, Tensor) or divisor != 1.0


def as_sum(
    loss: Loss, samples: int, *, needs_gradient: bool = True, who: str = "The loss function"
) -> tuple[Tensor, Tensor | float]:
    """The sum and the weight of what a loss function returned: a mean is multiplied by `samples`.

    needs_gradient: whether the sum must require a gradient. who: the function's name in errors. Raises `JobError`.

    >>> import torch
    >>> as_sum(torch.tensor(2.0), 3, needs_gradient=False)
    (tensor(6.), 3)
    """
    value, weight = loss if isinstance(loss, tuple) and len(loss) == 2 else (loss, None)
    if not isinstance(value, Tensor) or value.numel() != 1 or (needs_gradient and not value.requires_grad):
        raise _refused(loss, value, who, needs_gradient=needs_gradient)
    if isinstance(weight, Tensor):
        if weight.requires_grad or weight.numel() != 1:
            raise _refused(loss, value, who, needs_gradient=needs_gradient)
        weight = weight.reshape(())
    if value.dtype == torch.float16:  # whose largest number is 65504
        value = value.float()
    return (value.reshape(()) * samples, samples) if weight is None else (value.reshape(()), weight)


def _refused(loss: object, value: object, who: str, *, needs_gradient: bool) -> JobError:
    """The error for a loss that is not one. value: what it returned, or the first of two. Else as `as_sum`."""
    several = _SEVERAL if needs_gradient else ""
    if not isinstance(value, Tensor):
        return JobError(
            f"{who} returned {_kind(loss)}. Return one scalar tensor (the mean over the samples), or (sum, weight).{several}"
        )
    if value.numel() != 1:
        return JobError(
            f"{who} returned a tensor of shape {list(value.shape)}, not a scalar. Return its mean over the samples, or (sum, weight)."
        )
    if needs_gradient and not value.requires_grad:
        return JobError(
            "The loss does not depend on any trainable parameter (requires_grad is False), so there is nothing to train."
        )
    return JobError(
        f"{who} returned (sum, weight), where the weight must be a number without gradient: the number of items in the sum.{several}"
    )


_SEVERAL = " Several losses (a GAN) are a loop of one's own (docs/loops.md)."


def _kind(loss: object) -> str:
    return (
        f"a {type(loss).__name__} of {len(loss)}"
        if isinstance(loss, tuple | list | dict)
        else f"a {type(loss).__name__}"
    )
