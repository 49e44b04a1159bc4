"""A step's loss over the chunks that a rank has computed, as sums that add up over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshloom.core.errors import JobError
from meshloom.core.loss import as_sum
from meshloom.data.chunks import Chunk


class Tally:
    """sums: loss, weight, chunks, chunks whose loss was a mean over samples, ranks that were asked to stop; float64 [5].

    stopping: whether any was, once the sums are those of all ranks.
    """

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(5, dtype=torch.float64, device=device)
        self._own = self.sums
        self.stopping = False
        self._one = {is_mean: torch.tensor([1.0, float(is_mean)], dtype=torch.float64, device=device) for is_mean in (False, True)}

    def begin(self) -> None:
        """A new step."""
        self.sums = torch.zeros_like(self.sums)

    def add(self, returned: Any, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor | float]:
        """Of what the loss returned for a chunk: where backward starts, the sum and its weight.

        Of means over samples the whole batch's weight is known at once, and dividing a number is cheaper than a gradient.
        """
        loss, weight = as_sum(returned, chunk.samples)
        is_mean = not isinstance(returned, tuple)
        self.sums[0] += loss.detach()
        self.sums[1] += weight
        self.sums[2:4] += self._one[is_mean]
        return (loss / chunk.batch if is_mean else loss), loss, weight

    def ask_to_stop(self) -> None:
        """This rank was asked to."""
        self.sums[4] = 1

    def keep_own(self) -> None:
        """The sums are complete, and those of this replica alone."""
        self._own = self.sums.clone()

    def own_divisor(self, batch: int) -> Tensor:
        """What this replica's gradients are still to be divided by to be the mean over its own share; 1 where the share has no weight."""
        _, weight, _, num_means, _ = self._own.tolist()
        return torch.tensor(weight / batch if num_means else weight or 1.0, dtype=torch.float64)

    def result(self, batch: int) -> tuple[float, float, Tensor]:
        """When the sums are those of all ranks: loss, weight, and what gradients are still to be divided by. batch: samples of the global batch."""
        total, weight, num_chunks, num_means, num_stops = self.sums.tolist()
        self.stopping = num_stops > 0
        if num_means not in (0, num_chunks):
            raise JobError(
                f"The loss function returned a mean for {num_means:g} of {num_chunks:g} chunks and (sum, weight) for the others. Return one kind always."
            )
        return total, weight, self.sums[1] / batch if num_means else self.sums[1]
