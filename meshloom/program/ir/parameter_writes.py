"""Sees which parameters are written: by torch's count, by where they lie, and by their values, as `weight.data *= mask` is
not counted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from posixpath import commonpath

import torch
from torch import Tensor, nn

from meshloom.core.errors import JobError

LOOK_EVERY = 100  # steps between looks at values, as torch counts most writes
# steps with one, where some are untrained: a teacher that begins as a copy of its student is another one from the second on
FIRST_LOOKS = 4
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ParameterWrites:
    """Of these parameters, from now on.

    >>> layer = nn.Linear(2, 3)
    >>> writes = ParameterWrites(layer.named_parameters())
    >>> _ = layer.weight.data.mul_(2)
    >>> writes.names()
    ['weight']
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._named = [(name, each) for name, each in named if not each.is_meta]
        self._before = [(_place(each), _sum_of_bits(each)) for _, each in self._named]

    def names(self) -> list[str]:
        """Those that have been written. The host waits once for a device."""
        if not self._named:
            return []
        pairs = list(zip(self._named, self._before, strict=True))
        differ = torch.stack([_sum_of_bits(each) != bits for (_, each), (_, bits) in pairs]).tolist()
        return [
            name
            for ((name, each), (place, _)), differs in zip(pairs, differ, strict=True)
            if differs or _place(each) != place
        ]


def untrained_write(names: Sequence[str]) -> JobError:
    """The error for parameters of these names, which are not trained, which a step writes, and for which the job has no rule."""
    within = commonpath([name.rpartition(".")[0].replace(".", "/") for name in names]).replace("/", ".")
    roots = [f"{root}.*" if rest else root for root, _, rest in (name.partition(".") for name in names)]
    patterns = [f"{within}.*"] if within else list(dict.fromkeys(roots))
    more, are, them = (f" and {len(names) - 1} more", "are", "them") if len(names) > 1 else ("", "is", "it")
    rules = ", ".join(f'"{each}": ml.ema(0.99)' for each in patterns)
    return JobError(
        f"{names[0]}{more} {are} not trained, and a step writes {them}. Say by which rule the chunks of a step write {them}: "
        f'Job(buffers={{{rules}}}) with the decay that the loss has, "last" or "sum" (docs/contract.md).'
    )


def _place(parameter: Tensor) -> tuple[int, int]:
    return parameter._version, parameter.data_ptr()


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """int64 [], on its device."""
    flat = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return flat.reshape(-1).view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64)
