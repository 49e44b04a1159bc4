"""A step's loss, and what it logs, as sums over chunks, which add up over ranks."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from meshloom.comm.group import Group, Work
from meshloom.comm.objects import collect
from meshloom.core.device.readback import Readbacks
from meshloom.core.errors import JobError
from meshloom.core.exchanges import EXCHANGES
from meshloom.core.losses.logged import taken_apart
from meshloom.core.losses.loss_scale import LossScale
from meshloom.core.losses.loss_sum import Divisor, as_sum
from meshloom.core.plan import Plan
from meshloom.core.precisions import PRECISIONS
from meshloom.data.chunks import Chunk
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


class LossSums:
    """sums: float64 [6 + 2n]: loss, weight, number of chunks, of chunks whose loss was a mean over samples, what ranks tell each
    other (`Told`), number of ranks with names that others do not know; and of each of the n names that all know to be logged, the
    sum and the weight.

    asks: whether this rank asks for something between steps; None: ranks do not agree on that. rates: those of the optimizers, which ranks
        must have alike; None: they are not compared.
    total, weight: of the global batch, once they have been read. asked: whether some rank asks. are_unlike: whether ranks have other
        learning rates than this one. are_means: whether losses of chunks are means over samples.
    keeps_own: whether `own_divisor` is needed. num_ranks: that tell.
    scale: by which backward's roots and the divisor of gradients are multiplied; None: there is none. overflowed: whether some
        rank's gradients overflowed with it, once that is known.
    readbacks: by which they come to the host, while the device goes on with what it was given after `start`; of other
        numbers of the step too.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        keeps_own: bool = False,
        scale: LossScale | None = None,
        num_ranks: int = 1,
    ) -> None:
        self.names: tuple[str, ...] = ()  # logged, as all ranks know
        self.unknown = False  # whether some rank has others
        self._new: dict[str, list[Any]] = {}  # those of this rank: sum and weight
        self._named_bytes = 0  # of sums of names so far
        self.logged: Mapping[str, float] = {}  # the newest step's means
        self.total = self.weight = 0.0
        self.asked = self.overflowed = self.are_unlike = self.are_means = False
        self.asks: Callable[[], bool] | None = None
        self.rates: Callable[[], Sequence[float]] | None = None
        self.scale, self.num_ranks = scale, num_ranks
        self._own: Tensor | None = None
        self._keeps_own = keeps_own
        self.readbacks, self._on_host, self._ready = Readbacks(device), device.type == "cpu", False
        self._told = Told(num_ranks)  # by this rank
        self._work: Work | None = None
        # once they have been sent to the host; of all replicas, and of this one
        self._global: Callable[[], Tensor] | None = None
        self._of_own: Callable[[], Tensor] | None = None
        self.sums = torch.empty(0, dtype=torch.float64, device=device)
        self.begin()
        self._one = {
            is_mean: torch.tensor([1.0, float(is_mean)], dtype=torch.float64, device=device)
            for is_mean in (False, True)
        }

    @staticmethod
    def of(plan: Plan, device: torch.device) -> LossSums:
        """Those that a plan needs."""
        scale = LossScale() if PRECISIONS[plan.precision].scaled else None
        return LossSums(
            device, keeps_own=EXCHANGES[plan.exchange].independent, scale=scale, num_ranks=plan.mesh.size
        )

    @property
    def told(self) -> Tensor | None:
        """What ranks tell each other, a part of the sums; None: nothing."""
        return self.sums[4:5] if self.asks or self.rates else None

    def begin(self) -> None:
        """Start a step."""
        device, length = self.sums.device, _LOGGED_FROM + 2 * len(self.names)
        self.sums = torch.zeros(length, dtype=torch.float64, device=device)
        self._parts = self.sums[0], self.sums[1], self.sums[2:4]
        self._new, self.started, self._global = {}, False, None

    def add(self, returned: Any, chunk: Chunk) -> Tensor:
        """Add what the loss returned for a chunk; returns the root of its backward.

        For a mean over samples the global weight is known in advance, and dividing the loss is cheaper than
        dividing the gradients. A scale is that of the mean, as far as it is known: of a sum it would be too large.
        """
        logged: Mapping[str, Any] = {}
        if isinstance(returned, dict):
            returned, logged = taken_apart(returned)
        loss, weight = as_sum(returned, chunk.samples)
        for name, value in logged.items():
            self._add_logged(name, value, weight)
        is_mean = not isinstance(returned, tuple)
        total, of_weights, counts = self._parts  # `sums[0] += ...` would copy the sum to its place once more
        total.add_(loss.detach())
        of_weights.add_(weight)
        counts.add_(self._one[is_mean])
        if self.scale is not None:
            return loss / chunk.batch * self.scale.scale
        return loss / chunk.batch if is_mean else loss

    def close(self) -> None:
        """End this rank's chunks. What it asks, and its rates, travel with the sums, so that all ranks know of them after the
        same step."""
        if (told := self.told) is not None:
            said = bool(self.asks and self.asks()), self.rates() if self.rates else []
            if self._told.said != said:
                self._told = Told(self.num_ranks, asks=said[0], rates=said[1])
            told.fill_(self._told.value)
        if self._new:
            self.sums[5] = 1

    def start(self, group: Group) -> None:
        """Start the all-reduce of this replica's sums over `group`, the replicas."""
        self.started = True
        if self._keeps_own:
            self._own = self.sums.clone()
        self._work = group.all_reduce(self.sums) if group.size > 1 else None
        self._ready = not self._on_host and (group.size == 1 or group.has_streams)
        if self._ready:
            self.readbacks.lane.after_computation()

    def wait(self) -> None:
        """Wait for that all-reduce, and send the global sums to the host, with a scale later (`send`)."""
        if self._work is not None:
            with self.readbacks.lane.entered() if self._ready and self.scale is None else nullcontext():
                self._work.wait()
        if self.scale is None:
            self._of_own = self._sent(self._own) if self._own is not None else None
            self._global = self._sent(self.sums)

    def end_update(self) -> None:
        """After a step's update, or where it would have been: the next one's scale, if there is one."""
        assert self.scale is not None
        self.scale = self.scale.after(overflowed=self.overflowed)

    def expected_bytes(self) -> ExpectedBytes:
        """Bytes of a step of several replicas."""
        overflowed = self.sums.itemsize if self.scale is not None else 0
        always = _LOGGED_FROM * self.sums.itemsize + overflowed
        so_far = Traffic.along("dp", all_reduce=self._named_bytes)
        return ExpectedBytes(per_step=Traffic.along("dp", all_reduce=always), so_far=so_far)

    def agree_on_names(self, world: Group, *, speaks: bool) -> None:
        """Once they have been read, where some rank has logged names that others do not know: add these up, so that all know
        them. All ranks call it. speaks: whether this rank is the one of those with equal values that counts."""
        mine = {name: [float(each) for each in pair] for name, pair in self._new.items()} if speaks else {}
        everyone = collect(world, mine)
        totals: dict[str, list[float]] = {}
        for name, (total, weight) in (pair for each in everyone for pair in each.items()):
            known = totals.setdefault(name, [0.0, 0.0])
            known[0], known[1] = known[0] + total, known[1] + weight
        self.logged = {**self.logged, **{name: _mean(*pair) for name, pair in totals.items()}}
        self.names = (*self.names, *totals)

    def divisor(self, batch: int) -> Divisor:
        """The number to divide gradients by, after `wait`; where `own` is kept, for the mean over this replica's own share, 1 if that has no weight.
        Reads the sums, and waits for them to arrive; with a scale the device keeps it. batch: samples of the global batch."""
        if self.scale is not None:
            weight = self.sums[1] if self._own is None else self._own[1]
            return torch.where(weight == 0, 1.0, weight / batch * self.scale.scale)
        assert self._global, "before they are sent to the host"
        self._read(self._global())
        weight = self.weight
        if self._of_own is not None:
            weight = float(self._of_own()[1]) or (0.0 if self.are_means else 1.0)
        return weight / batch if self.are_means else weight

    def send(self, overflowed: Tensor) -> None:
        """Read the global sums, and with them how many ranks' gradients overflowed, float64 [1], so that the host waits once."""
        self._read(self.readbacks.read(torch.cat([self.sums, overflowed])).values())

    def _read(self, sums: Tensor) -> None:
        self.total, self.weight, num_chunks, num_means, told, num_unknown, *others = sums.tolist()
        self.asked, self.are_unlike = self._told.answered(told) if self.told is not None else (False, False)
        self.unknown, self.overflowed = num_unknown > 0, any(others[2 * len(self.names) :])
        self.are_means = num_means > 0
        self.logged = self._means(others) if self.names else {}
        if num_means not in (0, num_chunks):
            raise JobError(
                f"The loss function returned a mean for {num_means:g} of {num_chunks:g} chunks and (sum, weight) for the others. Return one kind always."
            )

    def _sent(self, sums: Tensor) -> Callable[[], Tensor]:
        """What returns them on the host. They may not change until then."""
        return sums.cpu if self._on_host else self.readbacks.read(sums, ready=self._ready).values

    def _means(self, named: Sequence[float]) -> dict[str, float]:
        """Of what was logged, as it is read. named: sum and weight of each of the names."""
        self._named_bytes += 2 * len(self.names) * self.sums.itemsize
        pairs = zip(self.names, named[::2], named[1::2], strict=False)
        return {name: _mean(total, weight) for name, total, weight in pairs if weight}

    def _add_logged(self, name: str, value: Tensor | float, weight: Tensor | float) -> None:
        if name in self.names:
            start = _LOGGED_FROM + 2 * self.names.index(name)
            pair: Any = self.sums[start : start + 2].unbind()
        else:
            pair = self._new.setdefault(
                name, [torch.zeros_like(self.sums[0]), torch.zeros_like(self.sums[0])]
            )
        # products of bfloat16 values would be rounded to it
        value, weight = (each.to(self.sums) if isinstance(each, Tensor) else each for each in (value, weight))
        pair[0].add_(value * weight)
        pair[1].add_(weight)


class Told:
    """What a rank tells the `num_ranks` of a run, as a whole number whose sum over them is exact in a float64: whether it `asks`
    for something, above a digest of its learning rates.

        two ranks with digest d, the first of which asks:    1|d + 0|d = 1|2d

    A rank takes unlike digests of 32 bits for equal ones in one case of 4 billion.
    """

    def __init__(self, num_ranks: int, *, asks: bool = False, rates: Sequence[float] = ()) -> None:
        of_ranks = (num_ranks - 1).bit_length()
        bits = min(32, 52 - 2 * of_ranks)
        digest = hashlib.blake2b(array("d", rates).tobytes(), digest_size=8).digest()
        self.said = asks, list(rates)
        self._digest, self._num_ranks = int.from_bytes(digest, "little") % 2**bits, num_ranks
        self._asking = 2 ** (bits + of_ranks)
        self.value = asks * self._asking + self._digest

    def answered(self, total: float) -> tuple[bool, bool]:
        """Whether some rank asks, and whether some have other rates than this one. total: of all ranks' values."""
        num_asking, digests = divmod(int(total), self._asking)
        return num_asking > 0, digests != self._num_ranks * self._digest


_LOGGED_FROM = 6  # place of the first logged name's sum


def _mean(total: float, weight: float) -> float:
    return total / weight if weight else math.nan
