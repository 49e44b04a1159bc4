"""What a loss function returned, as a sum and the weight that makes it a mean."""

from __future__ import annotations

from torch import Tensor

from meshloom.core.errors import JobError
from meshloom.core.job import Loss


def as_sum(
    loss: Loss, samples: int, *, needs_gradient: bool = True, who: str = "The loss function"
) -> tuple[Tensor, Tensor | float]:
    """The sum and the weight behind what a loss function returned: (sum, weight) as it is, or the mean over
    `samples`. who: what errors call it.

    >>> import torch
    >>> as_sum(torch.tensor(2.0), 3, needs_gradient=False)
    (tensor(6.), 3)
    """
    mean_or_sum, weight = loss if isinstance(loss, tuple) and len(loss) == 2 else (loss, None)
    alternating = _ALTERNATING if needs_gradient else ""
    if not isinstance(mean_or_sum, Tensor):
        raise JobError(
            f"{who} returned {_kind(loss)}. Return one scalar tensor (the mean over the samples), or (sum, weight).{alternating}"
        )
    if mean_or_sum.numel() != 1:
        raise JobError(
            f"{who} returned a tensor of shape {list(mean_or_sum.shape)}, not a scalar. Return its mean over the samples, or (sum, weight)."
        )
    if needs_gradient and not mean_or_sum.requires_grad:
        raise JobError(
            "The loss does not depend on any trainable parameter (requires_grad is False), so there is nothing to train."
        )
    if isinstance(weight, Tensor) and (weight.requires_grad or weight.numel() != 1):
        raise JobError(
            f"{who} returned (sum, weight), where the weight must be a number without gradient: how many things the sum is over.{alternating}"
        )
    if weight is None:
        return mean_or_sum.reshape(()) * samples, samples
    return mean_or_sum.reshape(()), weight.reshape(()) if isinstance(weight, Tensor) else weight


_ALTERNATING = " A job that alternates between several losses (a GAN) is not supported."


def _kind(loss: object) -> str:
    return (
        f"a {type(loss).__name__} of {len(loss)}"
        if isinstance(loss, tuple | list | dict)
        else f"a {type(loss).__name__}"
    )
