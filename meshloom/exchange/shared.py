"""One copy of the parameters for all replicas of a host: each rank updates its own slices in place, and all
ranks read them.

                 gradients, each in its rank's window          parameters, in the window of rank 0
    rank 0       [ sum | ... | ... ]                           [ updated by 0 | updated by 1 | updated by 2 ]
    rank 1       [ ... | sum | ... ]   each rank sums its         ^ read by all ranks
    rank 2       [ ... | ... | sum ]   slice over all ranks

Nothing is sent. Two barriers a step keep readers and writers apart: no rank updates before all ranks have
computed their chunks (the end of `Exchange.finish`, where flags are all-reduced), and no rank reads before
all have updated (`publish`).

With separate copies, a training forward that writes a parameter does so once on every replica. With one copy
the write would happen once per replica to the same memory, so it is an error (`replica/step_checks.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from meshloom.comm.group import Group
from meshloom.comm.windows import Extent, Windows, in_window, window_bytes
from meshloom.exchange.buckets.buckets import BucketLayout
from meshloom.exchange.copies import ParameterCopies
from meshloom.parameters.unfilled_model import UnfilledModel


class OneForAll(ParameterCopies):
    """The parameters of all ranks, in the window of rank 0.

    group: the replicas, for barriers; `windows` is the same group. frozen: parameters that are not trained,
    by name; they are stored there too. All ranks construct it together, with equal values, and each writes
    its share of them; where they are without values so far, rank 0 gives them all. unfilled: the model.
    """

    memory = "shared"

    def __init__(
        self,
        buckets: Sequence[BucketLayout],
        group: Group,
        windows: Windows,
        frozen: Sequence[tuple[str, nn.Parameter]] = (),
        unfilled: UnfilledModel | None = None,
    ) -> None:
        self._group = group
        extents = [bucket.extent for bucket in buckets]
        extents += [
            Extent(num_elements=each.numel(), dtype=each.dtype, device=each.device) for _, each in frozen
        ]
        flats = in_window(windows.window(window_bytes(extents), owner=0), 0, extents)
        lacking = unfilled if unfilled and unfilled.lacks_parameters else None
        slices: list[tuple[str, int, int, Tensor]] = []
        for bucket, flat in zip(buckets, flats, strict=False):
            share = flat.numel() // group.size
            first, last = group.rank * share, (group.rank + 1) * share
            for entry in bucket.entries:
                start, stop = max(entry.start, first), min(entry.stop, last)
                if start < stop and not lacking:
                    values = entry.parameter.data.reshape(-1)
                    flat[start:stop] = values[start - entry.start : stop - entry.start]
                slices.append((entry.name, 0, entry.stop - entry.start, flat[entry.start : entry.stop]))
                entry.parameter.data = flat[entry.start : entry.stop].view(entry.parameter.shape)
        for number, ((name, parameter), flat) in enumerate(zip(frozen, flats[len(buckets) :], strict=True)):
            place = flat.view(parameter.shape)
            if number % group.size == group.rank and not lacking:
                place.copy_(parameter.data)
            slices.append((name, 0, flat.numel(), flat))
            parameter.data = place
        if lacking:
            lacking.fill_slices(slices if group.rank == 0 else [], {each[0] for each in slices})

    def publish(self) -> None:
        self._group.barrier().wait()
