"""A step's loss as sums over chunks, which add up over ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from meshloom.comm.group import Group, Work
from meshloom.core.device.readback import Readback, Readbacks
from meshloom.core.errors import JobError
from meshloom.core.exchanges import EXCHANGES
from meshloom.core.losses.loss_scale import Divisor, LossScale
from meshloom.core.losses.loss_sum import as_sum
from meshloom.core.plan import Plan
from meshloom.core.precisions import PRECISIONS
from meshloom.data.chunks import Chunk
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


class LossSums:
    """sums: float64 [5]: loss, weight, number of chunks, of chunks whose loss was a mean over samples, of
    ranks that ask for something between steps.

    asked: whether some rank asks, once the sums are global. keeps_own: whether `own_divisor`
        is needed. loss: the name of that whose turn it is, if there are several.
    scale: by which backward's roots and the divisor of gradients are multiplied; None: there is none. overflowed: whether some
        rank's gradients overflowed with it, once that is known.
    readbacks: by which they come to the host, while the device goes on with what it was given after `start`; of other
        numbers of the step too.
    """

    def __init__(
        self, device: torch.device, *, keeps_own: bool = False, scale: LossScale | None = None
    ) -> None:
        self.sums = torch.zeros(5, dtype=torch.float64, device=device)
        self._parts = self.sums[0], self.sums[1], self.sums[2:4]
        self.asked = self.overflowed = False
        self.scale = scale
        self.loss = ""
        self._own: Tensor | None = None
        self._keeps_own = keeps_own
        self.readbacks = Readbacks(device)
        self._ready = self.started = False
        self._global: Readback | None = None
        self._of_own: Readback | None = None
        self._asks: Callable[[], bool] | None = None
        self._work: Work | None = None
        self._one = {
            is_mean: torch.tensor([1.0, float(is_mean)], dtype=torch.float64, device=device)
            for is_mean in (False, True)
        }

    @staticmethod
    def of(plan: Plan, device: torch.device) -> LossSums:
        """Those that a plan needs."""
        scale = LossScale() if PRECISIONS[plan.precision].scaled else None
        return LossSums(device, keeps_own=EXCHANGES[plan.exchange].independent, scale=scale)

    @property
    def are_asked(self) -> bool:
        """Whether ranks agree on what they ask for."""
        return self._asks is not None

    def begin(self, asks: Callable[[], bool] | None = None) -> None:
        """Start a step. asks: whether this rank asks for something between steps; None: ranks do not agree on
        that."""
        self.sums = torch.zeros_like(self.sums)
        self._parts = self.sums[0], self.sums[1], self.sums[2:4]
        self._asks = asks
        self._ready = self.started = False
        self._global = self._of_own = None

    def add(self, returned: Any, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor | float]:
        """Add what the loss returned for a chunk; returns the root of its backward, the loss sum and its
        weight.

        For a mean over samples the global weight is known in advance, and dividing the loss is cheaper than
        dividing the gradients. A scale is that of the mean, as far as it is known: of a sum it would be too large.
        """
        loss, weight = as_sum(returned, chunk.samples, of=self.loss)
        is_mean = not isinstance(returned, tuple)
        total, of_weights, counts = self._parts  # `sums[0] += ...` would copy the sum to its place once more
        total.add_(loss.detach())
        of_weights.add_(weight)
        counts.add_(self._one[is_mean])
        if self.scale is not None:
            return loss / chunk.batch * self.scale.scale, loss, weight
        return (loss / chunk.batch if is_mean else loss), loss, weight

    def close(self) -> None:
        """End this rank's chunks. What it asks travels with the sums, so that all ranks know of it after the
        same step."""
        if self._asks is not None and self._asks():
            self.sums[4] = 1

    def start(self, group: Group) -> None:
        """Start the all-reduce of this replica's sums over `group`, the replicas."""
        self.started = True
        if self._keeps_own:
            self._own = self.sums.clone()
        self._work = group.all_reduce(self.sums) if group.size > 1 else None
        self._ready = group.size == 1 or group.has_streams
        if self._ready:
            self.readbacks.lane.after_computation()

    def wait(self) -> None:
        """Wait for that all-reduce, and send the global sums to the host, with a scale later (`send`); simulated ranks need their
        turn between `start` and this."""
        work, self._work = self._work, None
        if work is not None:
            with self.readbacks.lane.entered() if self._ready and self.scale is None else nullcontext():
                work.wait()
        if self.scale is not None:
            return
        if self._own is not None:
            self._of_own = self.readbacks.read(self._own, ready=self._ready)
        self._global = self.readbacks.read(self.sums, ready=self._ready)

    def end_update(self) -> None:
        """After a step's update, or where it would have been: the next one's scale."""
        if self.scale is not None:
            self.scale = self.scale.after(overflowed=self.overflowed)

    def expected_bytes(self) -> ExpectedBytes:
        """Bytes of a step of several replicas."""
        overflowed = self.sums.itemsize if self.scale is not None else 0
        return ExpectedBytes(per_step=Traffic.along("dp", all_reduce=self.sums.nbytes + overflowed))

    def divisor(self, batch: int) -> Divisor:
        """The number to divide gradients by, after `wait`; where `own` is kept, for the mean over this replica's own share, 1 if that has no weight.
        Waits for it to arrive; with a scale the device keeps it. batch: samples of the global batch."""
        if self.scale is not None:
            weight = self.sums[1] if self._own is None else self._own[1]
            return torch.where(weight == 0, 1.0, weight / batch * self.scale.scale)
        _, weight = self.result()
        are_means = bool(self._global and self._global.values()[3])
        if self._of_own is not None:
            weight = float(self._of_own.values()[1])
            return weight / batch if are_means else weight or 1.0
        return weight / batch if are_means else weight

    def send(self, overflowed: Tensor) -> None:
        """Send the global sums to the host, and with them how many ranks' gradients overflowed, float64 [1], so that it waits once."""
        self._global = self.readbacks.read(torch.cat([self.sums, overflowed]))

    def result(self) -> tuple[float, float]:
        """The global loss and weight, after `wait`. Waits for them to arrive."""
        assert self._global
        total, weight, num_chunks, num_means, num_asking, *overflowed = self._global.values().tolist()
        self.asked, self.overflowed = num_asking > 0, any(overflowed)
        if num_means not in (0, num_chunks):
            raise JobError(
                f"The loss function returned a mean for {num_means:g} of {num_chunks:g} chunks and (sum, weight) for the others. Return one kind always."
            )
        return total, weight
