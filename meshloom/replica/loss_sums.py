"""A step's loss over the chunks that a rank has computed, as sums that add up over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshloom.comm.group import Group, Work
from meshloom.core.errors import JobError
from meshloom.core.job import as_sum
from meshloom.data.chunks import Chunk
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


class LossSums:
    """sums: loss, weight, chunks, chunks whose loss was a mean over samples, ranks that were asked to stop;
    float64 [5].

    stopping: whether any was, once the sums are those of all ranks. keeps_own: whether `own_divisor` will be
        asked for.
    """

    def __init__(self, device: torch.device, *, keeps_own: bool = False) -> None:
        self.sums = torch.zeros(5, dtype=torch.float64, device=device)
        self.stopping = False
        self._own = self.sums
        self._keeps_own = keeps_own
        self._stop_requests: Sequence[int] | None = None
        self._work: Work | None = None
        self._one = {
            is_mean: torch.tensor([1.0, float(is_mean)], dtype=torch.float64, device=device)
            for is_mean in (False, True)
        }

    def begin(self, stop_requests: Sequence[int] | None = None) -> None:
        """A new step. stop_requests: the signals that have asked this rank to stop, if ranks agree on that;
        more may come."""
        self.sums = torch.zeros_like(self.sums)
        self._stop_requests = stop_requests

    def add(self, returned: Any, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor | float]:
        """Of what the loss returned for a chunk: where backward starts, the sum and its weight.

        Of means over samples the whole batch's weight is known at once, and dividing a number is cheaper than
        a gradient.
        """
        loss, weight = as_sum(returned, chunk.samples)
        is_mean = not isinstance(returned, tuple)
        self.sums[0] += loss.detach()
        self.sums[1] += weight
        self.sums[2:4] += self._one[is_mean]
        return (loss / chunk.batch if is_mean else loss), loss, weight

    def close(self) -> None:
        """This rank adds no further chunk. Once a step, with what is added up anyway, it says that it was
        asked to stop: so all ranks know after the same step."""
        if self._stop_requests:
            self.sums[4] = 1

    def start(self, group: Group) -> None:
        """The sums are those of this replica; start to make them those of all replicas, the ranks of
        `group`."""
        if self._keeps_own:
            self._own = self.sums.clone()
        self._work = group.all_reduce(self.sums) if group.size > 1 else None

    def wait(self) -> None:
        """Until they are. Between `start` and this other ranks have their turn."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def expected_bytes(self) -> ExpectedBytes:
        """Of steps of several replicas."""
        return ExpectedBytes(per_step=Traffic.along("dp", all_reduce=self.sums.nbytes))

    def own_divisor(self, batch: int) -> Tensor:
        """What this replica's gradients are still to be divided by to be the mean over its own share; 1 where
        the share has no weight."""
        _, weight, _, num_means, _ = self._own.tolist()
        return torch.tensor(weight / batch if num_means else weight or 1.0, dtype=torch.float64)

    def result(self, batch: int) -> tuple[float, float, Tensor]:
        """When the sums are those of all ranks: loss, weight, and what gradients are still to be divided by.
        batch: samples of the global batch."""
        total, weight, num_chunks, num_means, num_stops = self.sums.tolist()
        self.stopping = num_stops > 0
        if num_means not in (0, num_chunks):
            raise JobError(
                f"The loss function returned a mean for {num_means:g} of {num_chunks:g} chunks and (sum, weight) for the others. Return one kind always."
            )
        return total, weight, self.sums[1] / batch if num_means else self.sums[1]
