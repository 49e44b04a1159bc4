"""The operands of an operation: tensors as contiguous memory whose addresses the engine can use, checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from meshloom.comm.shm.engine_calls import describe
from meshloom.core.errors import CollectiveError


class Operand(NamedTuple):
    """The contiguous memory of one tensor, or of one tensor for each rank.

    tensors: the memory; it must live until the operation has finished.
    addresses: of one tensor, or of each.
    copy_back: copies what was written to the caller's tensors; None if it was written there already.
    """

    tensors: tuple[Tensor, ...]
    addresses: int | tuple[int, ...]
    copy_back: Callable[[], None] | None = None


NONE = Operand((), 0)  # of a rank that hands in nothing


def readable(tensor: Tensor) -> Operand:
    """The elements of `tensor`: itself, or a contiguous copy."""
    flat = _contiguous(tensor)
    return Operand((flat,), flat.data_ptr())


def readable_each(tensors: Sequence[Tensor]) -> Operand:
    """`readable` for one tensor of each rank."""
    flat = tuple(_contiguous(tensor) for tensor in tensors)
    return Operand(flat, tuple(each.data_ptr() for each in flat))


def writable(tensor: Tensor) -> Operand:
    """Memory to write to in place of `tensor`: itself, or a contiguous copy of it that is copied back."""
    flat = _contiguous(tensor)
    if flat is tensor:
        return Operand((flat,), flat.data_ptr())
    target = tensor.detach()
    return Operand((flat,), flat.data_ptr(), lambda: _copy([target], [flat]))


def writable_each(tensors: Sequence[Tensor]) -> Operand:
    """`writable` for one tensor of each rank."""
    flat = tuple(_contiguous(tensor) for tensor in tensors)
    addresses = tuple(each.data_ptr() for each in flat)
    copied = [
        (tensor.detach(), each) for tensor, each in zip(tensors, flat, strict=True) if each is not tensor
    ]
    if not copied:
        return Operand(flat, addresses)
    return Operand(flat, addresses, lambda: _copy(*zip(*copied, strict=True)))


def check_cpu(*tensors: Tensor) -> None:
    """Raise `CollectiveError` for a tensor that is not in host memory."""
    for tensor in tensors:
        if not tensor.is_cpu:
            raise CollectiveError(
                f"Ranks that share memory exchange CPU tensors, and this one is on {tensor.device}."
            )


def check_slices(operation: str, member: str, full: Tensor, part: Tensor, size: int) -> None:
    """Raise `CollectiveError` unless `full` has the elements of `size` tensors like `part`."""
    if full.numel() != size * part.numel() or full.dtype != part.dtype:
        raise CollectiveError(
            f"{operation} on {member}: {describe(full)} is not {size} times {describe(part)}, for {size} ranks."
        )


def check_each(
    operation: str, member: str, tensors: Sequence[Tensor] | None, like: Tensor, size: int
) -> Sequence[Tensor]:
    """`tensors`, one for each rank. Raises `CollectiveError` unless all of them are as large as `like`."""
    if (
        tensors is None
        or len(tensors) != size
        or any(each.numel() != like.numel() or each.dtype != like.dtype for each in tensors)
    ):
        found = "none" if tensors is None else ", ".join(describe(each) for each in tensors)
        raise CollectiveError(
            f"{operation} on {member} needs {size} tensors of {describe(like)}, and was given {found}."
        )
    return tensors


def check_sizes(
    operation: str,
    member: str,
    output: Tensor,
    tensor: Tensor,
    output_sizes: Sequence[int],
    sizes: Sequence[int],
    size: int,
) -> None:
    """Raise `CollectiveError` unless both lists have one size for each rank and add up to their tensors."""
    if (
        sum(sizes) != tensor.numel()
        or sum(output_sizes) != output.numel()
        or len(sizes) != size
        or len(output_sizes) != size
    ):
        raise CollectiveError(
            f"{operation} on {member} sends {list(sizes)} of {tensor.numel()} elements and receives {list(output_sizes)} into "
            f"{output.numel()}: give one size for each of the {size} ranks, adding up to each."
        )


def _contiguous(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
