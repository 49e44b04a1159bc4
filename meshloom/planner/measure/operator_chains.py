"""The operators that are measured: chains of equal ones, of every kind at several sizes.

A chain is recorded for backward, as in training, so autograd's cost is included, and outputs are allocated as
in training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from meshloom.machine.machine import COUNTED_IN_FLOPS, Kind


@dataclass(frozen=True)
class Chain:
    """`length` equal operators, each on the result of the one before (or independent). work, backward_work:
    of one of them. inputs: they require gradients."""

    work: float
    backward_work: float
    length: int
    inputs: tuple[Tensor, ...]
    run: Callable[[], tuple[Tensor, ...]]


def chains_of(device: torch.device) -> Iterator[tuple[Kind, torch.dtype, Chain]]:
    """Every kind, in float32 and, where it is counted in FLOPs, in bfloat16; each from small to large."""
    generator = torch.Generator(device=device).manual_seed(0)
    for kind, sizes in (_LARGE if device.type == "cuda" else _SMALL).items():
        for dtype in (torch.float32, torch.bfloat16) if kind in COUNTED_IN_FLOPS else (torch.float32,):
            for size in sizes:
                yield (
                    kind,
                    dtype,
                    _CHAINS[kind](size, lambda *shape, dtype=dtype: _normal(shape, dtype, device, generator)),
                )


def views(device: torch.device) -> Chain:
    """Operators that move no data."""
    x = torch.zeros(8, 8, device=device, requires_grad=True)
    return _chain(1, 1, 64, x, [], lambda each, _: each.transpose(0, 1))


Make = Callable[..., Tensor]  # a tensor of that shape that wants a gradient
Step = Callable[[Tensor, int], Tensor]  # one operator of a chain: on what, and its number


def _matmul(size: tuple[int, ...], make: Make) -> Chain:
    rows, width, length = size
    x, weights = make(rows, width), [_weight(make, width, width) for _ in range(length)]
    flops = 2 * rows * width * width
    return _chain(
        flops, 2 * flops, length, x, weights, lambda value, number: F.linear(value, weights[number])
    )


def _attention(size: tuple[int, ...], make: Make) -> Chain:
    batch, heads, tokens, width, length = size
    query, key, value = (make(batch, heads, tokens, width) for _ in range(3))
    flops = 4 * batch * heads * tokens * tokens * width  # two products; backward has five
    return _chain(
        flops,
        2.5 * flops,
        length,
        query,
        [key, value],
        lambda each, _: F.scaled_dot_product_attention(each, key, value, is_causal=True),
    )


def _convolution(size: tuple[int, ...], make: Make) -> Chain:
    batch, channels, side, length = size
    x = make(batch, channels, side, side)
    weights = [_weight(make, channels, channels, 3, 3) for _ in range(length)]
    flops = 2 * batch * channels * channels * 9 * side * side
    return _chain(
        flops, 2 * flops, length, x, weights, lambda each, number: F.conv2d(each, weights[number], padding=1)
    )


def _elementwise(size: tuple[int, ...], make: Make) -> Chain:
    count, length = size
    other = make(count).detach()
    x = make(count)
    return _chain(3 * x.nbytes, 3 * x.nbytes, length, x, [], lambda each, _: each * other)


def _activation(size: tuple[int, ...], make: Make) -> Chain:
    count, length = size
    x = make(count)
    return _chain(2 * x.nbytes, 3 * x.nbytes, length, x, [], lambda each, _: F.gelu(each))


def _normalization(size: tuple[int, ...], make: Make) -> Chain:
    rows, width, length = size
    x, weights = make(rows, width), [make(width) for _ in range(length)]
    return _chain(
        2 * x.nbytes,
        3 * x.nbytes,
        length,
        x,
        weights,
        lambda each, number: F.layer_norm(each, (width,), weights[number]),
    )


def _softmax(size: tuple[int, ...], make: Make) -> Chain:
    rows, width, length = size
    x = make(rows, width)
    return _chain(2 * x.nbytes, 3 * x.nbytes, length, x, [], lambda each, _: torch.log_softmax(each, -1))


def _reduction(size: tuple[int, ...], make: Make) -> Chain:
    rows, width, length = size
    inputs = tuple(make(rows, width) for _ in range(length))
    return Chain(
        inputs[0].nbytes, inputs[0].nbytes, length, inputs, lambda: tuple(each.mean(-1) for each in inputs)
    )


def _gather(size: tuple[int, ...], make: Make) -> Chain:
    tokens, width, length = size
    tables = tuple(make(4 * tokens, width) for _ in range(length))
    rows = torch.arange(tokens, device=tables[0].device) * 7 % (4 * tokens)
    picked = tokens * width * tables[0].element_size()
    # Forward reads and writes the rows; backward reads theirs, clears the table's gradient, and writes into
    # it.
    return Chain(
        2 * picked,
        picked + tables[0].nbytes,
        length,
        tables,
        lambda: tuple(F.embedding(rows, each) for each in tables),
    )


def _draw(size: tuple[int, ...], make: Make) -> Chain:
    count, length = size
    x = make(count)
    # On the CPU: draw a mask, divide it in place, multiply. Elsewhere it is one kernel with a mask of bytes.
    passes = (6, 3) if x.device.type == "cpu" else (2.25, 2.25)
    return _chain(
        passes[0] * x.nbytes, passes[1] * x.nbytes, length, x, [], lambda each, _: F.dropout(each, 0.1)
    )


def _weight(make: Make, *shape: int) -> Tensor:
    """A weight that preserves the magnitude of what it is applied to."""
    return (make(*shape) / math.prod(shape[1:]) ** 0.5).detach().requires_grad_()


def _chain(
    work: float, backward: float, length: int, start: Tensor, weights: list[Tensor], step: Step
) -> Chain:
    def run() -> tuple[Tensor]:
        value = start
        for number in range(length):
            value = step(value, number)
        return (value,)

    return Chain(work, backward, length, (start, *weights), run)


_CHAINS: dict[Kind, Callable[[tuple[int, ...], Make], Chain]] = {
    "matmul": _matmul,
    "attention": _attention,
    "convolution": _convolution,
    "elementwise": _elementwise,
    "activation": _activation,
    "normalization": _normalization,
    "softmax": _softmax,
    "reduction": _reduction,
    "gather": _gather,
    "draw": _draw,
}

# Sizes of each kind, small to large; the last number is the length of the chain.
_Sizes = dict[Kind, tuple[tuple[int, ...], ...]]
_SMALL: _Sizes = {  # a core: from what costs a call to some ten milliseconds
    "matmul": ((8, 16, 8), (64, 64, 8), (128, 256, 4), (512, 384, 2), (512, 768, 1)),
    "attention": ((1, 1, 16, 32, 4), (2, 4, 64, 64, 2), (2, 6, 256, 64, 1)),
    "convolution": ((1, 8, 8, 4), (2, 32, 16, 2), (4, 64, 32, 1)),
    "elementwise": ((256, 16), (1 << 14, 8), (1 << 18, 4), (1 << 21, 2)),
    "activation": ((256, 16), (1 << 14, 8), (1 << 17, 4), (1 << 20, 1)),
    "normalization": ((4, 64, 8), (64, 256, 8), (512, 512, 2), (1024, 1024, 1)),
    "softmax": ((4, 64, 8), (64, 256, 8), (512, 512, 2), (512, 2048, 1)),
    "reduction": ((4, 64, 8), (64, 256, 8), (512, 512, 2), (1024, 1024, 1)),
    "gather": ((16, 64, 4), (256, 256, 2), (1024, 512, 1)),
    "draw": ((256, 8), (1 << 14, 4), (1 << 18, 1)),
}
_LARGE: _Sizes = {  # a GPU: up to some milliseconds
    "matmul": ((64, 64, 16), (512, 512, 16), (2048, 2048, 8), (8192, 4096, 2), (8192, 8192, 1)),
    "attention": ((1, 4, 64, 64, 16), (4, 16, 512, 64, 8), (4, 16, 2048, 64, 2)),
    "convolution": ((1, 16, 16, 16), (16, 64, 56, 8), (32, 256, 56, 2)),
    "elementwise": ((256, 32), (1 << 20, 16), (1 << 24, 8), (1 << 27, 2)),
    "activation": ((256, 32), (1 << 20, 16), (1 << 24, 8), (1 << 27, 2)),
    "normalization": ((4, 64, 16), (1024, 1024, 16), (8192, 2048, 8), (16384, 4096, 2)),
    "softmax": ((4, 64, 16), (1024, 1024, 16), (8192, 2048, 8), (4096, 32768, 1)),
    "reduction": ((4, 64, 16), (1024, 1024, 16), (8192, 2048, 8), (16384, 4096, 2)),
    "gather": ((16, 64, 8), (2048, 1024, 4), (16384, 2048, 1)),
    "draw": ((256, 16), (1 << 20, 8), (1 << 26, 2)),
}


def _normal(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Tensor:
    return torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_()
