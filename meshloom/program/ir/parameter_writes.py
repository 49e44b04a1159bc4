"""Sees which parameters are written: by torch's count, by where they lie, and by their values, as `weight.data *= mask` is
not counted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from posixpath import commonpath

import torch
from torch import Tensor, nn

from meshloom.core.errors import JobError

LOOK_EVERY = 100  # steps between looks at values
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ParameterWrites:
    """Of these parameters, from now on. by_values: also what is written around torch's count.

    >>> layer = nn.Linear(2, 3)
    >>> counted, seen = (ParameterWrites(layer.named_parameters(), by_values=each) for each in (False, True))
    >>> _ = layer.weight.data.mul_(2)
    >>> counted.names(), seen.names()
    ([], ['weight'])
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], *, by_values: bool) -> None:
        self._named = [(name, each) for name, each in named if not each.is_meta]
        self._places = [_place(each) for _, each in self._named]
        self._sums = [_sum_of_bits(each) for _, each in self._named] if by_values else []

    def names(self) -> list[str]:
        """Those that have been written. The host waits once for a device, if values are looked at."""
        places = [_place(each) for _, each in self._named]
        if places == self._places and not self._sums:
            return []
        differ = [_sum_of_bits(each) != was for (_, each), was in zip(self._named, self._sums, strict=False)]
        written = torch.stack(differ).tolist() if differ else [False] * len(places)
        return [
            name
            for (name, _), was, now, differs in zip(self._named, self._places, places, written, strict=True)
            if was != now or differs
        ]


def untrained_write(names: Sequence[str]) -> JobError:
    """The error for parameters of these names, which are not trained, which a step writes, and for which the job has no rule."""
    within = commonpath([name.rpartition(".")[0].replace(".", "/") for name in names]).replace("/", ".")
    pattern = f"{within}.*" if within else names[0]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return JobError(
        f"{names[0]}{more} is not trained, and a step writes it. Say by which rule the chunks of a step write it: "
        f'Job(buffers={{"{pattern}": ml.ema(0.99)}}) with the decay that the loss has, "last" or "sum" (docs/contract.md).'
    )


def _place(parameter: Tensor) -> tuple[int, int]:
    return parameter._version, parameter.data_ptr()


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """int64 [], on its device."""
    flat = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return flat.reshape(-1).view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64)
