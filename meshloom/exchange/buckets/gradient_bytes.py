"""Bytes of gradients that a rank holds for the exchange between replicas, from the sizes of its parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from meshloom.core.plan import Plan
from meshloom.exchange.buckets.buckets import bucket_lengths
from meshloom.exchange.buckets.rounds import pool_bytes


def gradient_bytes(
    sizes: Sequence[int], *, dp: int, zero: int, bucket_bytes: int, one_copy: bool = False
) -> int:
    """Bytes of buckets, and of a rank's slices of their sums. Padding is not counted.

    sizes: bytes of the parameters that the rank updates or shares in updating, in the model's order.
    one_copy: whether replicas share one copy of the parameters.

    >>> [gradient_bytes([400] * 10, dp=2, zero=zero, bucket_bytes=400) for zero in (0, 1, 2)]
    [4000, 6000, 3600]
    """
    if dp == 1:
        return 0
    total = sum(sizes)
    slices = -(-total // dp)
    # where parameters are one copy, a rank's sums lie in its bucket, and nothing is left for zero=3 to divide
    if zero < 2 or (zero == 3 and one_copy):
        return total + (slices if zero and not one_copy else 0)
    buckets: list[int] = []
    rest = list(reversed(sizes))
    for length in bucket_lengths(rest, bucket_bytes):
        buckets.append(sum(rest[:length]))
        rest = rest[length:]
    return slices + pool_bytes(buckets, bucket_bytes)


def held_gradients(
    plan: Plan,
    trained: Mapping[str, int],
    owned: Collection[str],
    late: Collection[str],
    *,
    one_copy: bool = False,
) -> tuple[int, int]:
    """Bytes of gradients on a rank of a replica: those of what it updates, and buckets beside them. trained: of
    its trainable parameters. owned: names of those that it updates. late: of those whose gradients are complete
    at the end of a step only."""
    if plan.dp == 1:
        return sum(trained.values()), 0
    sizes = [size for name, size in trained.items() if name in owned]
    apart = sum(
        size for name, size in trained.items() if name not in owned or (plan.zero == 2 and name in late)
    )
    exchanged = gradient_bytes(
        sizes, dp=plan.dp, zero=plan.zero, bucket_bytes=plan.bucket_bytes, one_copy=one_copy
    )
    own = -(-sum(sizes) // plan.dp) if plan.zero or one_copy else exchanged
    return own + apart, exchanged - own
