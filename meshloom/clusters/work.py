"""What a rank does in a chunk: calls of operators, and collectives, as numbers that a device or a fabric can price."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["product", "attention", "convolution", "other"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]


@dataclass(frozen=True, kw_only=True)
class OperatorWork:
    """One call of an operator on a rank.

    flops: two per multiply-add; 0 for elementwise operators.
    num_bytes: read and written by the call.
    dtype: of the result, as torch writes it: "bfloat16", "float32", ...
    sizes: of a product (batch, m, n, k), [batch, m, k] x [batch, k, n]; of attention (batch * heads, queries, keys, head size);
        of a convolution (m, n, k) of the product that it is: output positions, output channels, input channels x kernel; of others ().
    times: how many such calls there are.
    """

    kind: Kind
    flops: int
    num_bytes: int
    dtype: str
    sizes: tuple[int, ...] = ()
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class Sent:
    """One collective of a rank.

    num_bytes: of the whole tensor, which nccl-tests calls the size: the full result of an all-gather, the full input of a
        reduce-scatter; of `send` the message.
    axis: of the plan whose ranks take part; of `send` the one along which it goes.
    times: how many such collectives there are.
    """

    collective: Collective
    num_bytes: int
    axis: Literal["dp", "pp", "tp"]
    times: int = 1
