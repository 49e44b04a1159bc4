"""Tensors as contiguous memory: themselves where they are, a copy otherwise, which is copied back where it
was written."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor


def to_read(tensor: Tensor) -> Tensor:
    """The same elements, contiguous and as they stand in memory."""
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def to_write(tensor: Tensor) -> tuple[Tensor, Callable[[], None] | None]:
    """A contiguous tensor to write to, and what brings it to `tensor` afterwards, if that is needed."""
    flat = to_read(tensor)
    if flat is tensor:
        return flat, None
    target = tensor.detach()

    def finish() -> None:
        target.copy_(flat)

    return flat, finish


def one_after_another(
    written: Sequence[tuple[Tensor, Callable[[], None] | None]],
) -> Callable[[], None] | None:
    """What brings all that `to_write` gave to their tensors, if one needs it."""
    finishes = [finish for _, finish in written if finish]
    if not finishes:
        return None

    def finish_all() -> None:
        for finish in finishes:
            finish()

    return finish_all
