"""The context of a node: whether gradients are recorded, and the autocast regions around it."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

import torch


@dataclass(frozen=True, kw_only=True)
class Autocast:
    """An autocast region, numbered by entry. Casts of parameters are cached until the outermost one ends."""

    number: int
    device: str
    dtype: torch.dtype
    enabled: bool
    cache: bool

    def __str__(self) -> str:
        return f"autocast {self.number} {str(self.dtype).removeprefix('torch.') if self.enabled else 'off'}"


@dataclass(frozen=True, kw_only=True)
class Context:
    """What surrounds a node: autocast regions, outermost first, and the grad mode."""

    autocast: tuple[Autocast, ...] = ()
    grad: bool = True

    def __str__(self) -> str:
        return ", ".join([*map(str, self.autocast), *([] if self.grad else ["no_grad"])])


class Entered:
    """Switches between contexts while a program runs; restores the state on exit.

    contexts: those that `move_to` names by number. lifted: run in full precision, without autocast.
    device: type for the autocast regions, instead of the recorded one.

    >>> with Entered((Context(), Context(grad=False))) as entered:
    ...     entered.move_to(1)
    ...     print(torch.is_grad_enabled())
    False
    >>> torch.is_grad_enabled()
    True
    """

    def __init__(
        self, contexts: tuple[Context, ...], *, device: str | None = None, lifted: bool = False
    ) -> None:
        self._contexts = contexts
        self._device = device
        self._lifted = lifted
        self._open: list[tuple[Autocast, torch.autocast]] = []
        self._grad = torch.is_grad_enabled()

    def __enter__(self) -> Entered:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.set_grad_enabled(self._grad)
        self._leave_until(0)

    def move_to(self, number: int) -> None:
        """Enter the regions and grad mode of context `number`, and leave the regions that are not around it.

        Gradients are recorded only if they also are around the whole program.
        """
        wanted = self._contexts[number]
        regions = () if self._lifted else wanted.autocast
        common = 0
        while common < min(len(self._open), len(regions)) and self._open[common][0] == regions[common]:
            common += 1
        self._leave_until(common)
        for region in regions[common:]:
            entering = torch.autocast(
                self._device or region.device, region.dtype, region.enabled, region.cache
            )
            entering.__enter__()
            self._open.append((region, entering))
        torch.set_grad_enabled(wanted.grad and self._grad)

    def _leave_until(self, count: int) -> None:
        while len(self._open) > count:
            self._open.pop()[1].__exit__(None, None, None)
