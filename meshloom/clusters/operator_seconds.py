"""Seconds of an operator on a device: its FLOPs at the efficiency of its size, or its bytes, and not less than a launch takes."""

from __future__ import annotations

import math

from meshloom.clusters.cluster import Device
from meshloom.clusters.work import OperatorWork
from meshloom.core.errors import MachineError

# Tiles of the result that a multiprocessor computes at a time, and the parts of the depth that run side by side where the result
# has few tiles (NVIDIA, Matrix Multiplication Background User's Guide).
TILES = ((256, 128), (128, 256), (128, 128), (64, 128), (128, 64), (64, 64))
SPLITS = (1, 2, 4, 8)
PARTIAL_BYTES = 4  # of a number of a part, which is written and read
QUERIES = 128  # of attention that a multiprocessor computes at a time (Dao, FlashAttention-2, 2023)


def operator_seconds(device: Device, work: OperatorWork, compiled: bool = False) -> float:
    """Return the seconds of all calls of `work` on an otherwise idle device. Raises `MachineError` for a dtype without a peak.

    compiled: whether launches are those of compiled code.
    """
    launch = device.compiled_launch_seconds if compiled else device.eager_launch_seconds
    moving = work.num_bytes / (device.memory_bytes_per_second * device.memory_efficiency)
    return work.times * max(launch, moving, _computing(device, work) if work.flops else 0.0)


def _computing(device: Device, work: OperatorWork) -> float:
    if work.kind == "product":
        return _product(device, work.sizes, _peak(device, work.dtype) * device.product_efficiency)
    if work.kind == "convolution":
        # torch lets convolutions of float32 round to tfloat32, and products not
        dtype = "tfloat32" if work.dtype == "float32" and "tfloat32" in device.peak_flops else work.dtype
        return _product(device, (1, *work.sizes), _peak(device, dtype) * device.convolution_efficiency)
    if work.kind == "attention":
        return work.flops / (_peak(device, work.dtype) * _attention_share(device, work.sizes))
    return work.flops / (_peak(device, work.dtype) * device.product_efficiency)


def _peak(device: Device, dtype: str) -> float:
    if dtype not in device.peak_flops:
        raise MachineError(
            f"The device has no peak for {dtype}. It has one for {', '.join(device.peak_flops)}; add device.peak_flops.{dtype} to its file."
        )
    return device.peak_flops[dtype]


def _product(device: Device, sizes: tuple[int, ...], flops_per_second: float) -> float:
    """The fastest of tiles and splits."""
    return min(
        _tiled(device, sizes, flops_per_second / device.multiprocessors, rows, columns, split)
        for rows, columns in TILES
        for split in SPLITS
    )


def _tiled(
    device: Device, sizes: tuple[int, ...], flops_per_second: float, rows: int, columns: int, split: int
) -> float:
    """Waves of tiles, each of its depth and of what begins and ends it, or of its operands; and the sum of what was split."""
    batch, m, n, k = sizes
    waves = math.ceil(batch * math.ceil(m / rows) * math.ceil(n / columns) * split / device.multiprocessors)
    reading = max(1.0, device.product_least_side * (rows + columns) / (2 * rows * columns))
    tile = 2 * rows * columns * (k / split + device.product_half_depth) / flops_per_second * reading
    summed = 2 * PARTIAL_BYTES * batch * m * n * split if split > 1 else 0
    return waves * tile + summed / (device.memory_bytes_per_second * device.memory_efficiency)


def _attention_share(device: Device, sizes: tuple[int, ...]) -> float:
    heads, queries, keys, head = sizes
    blocks = heads * math.ceil(queries / QUERIES)
    waves = blocks / device.multiprocessors
    return (
        device.attention_efficiency
        * keys / (keys + device.attention_half_keys)
        * head / (head + device.attention_half_head)
        * waves / math.ceil(waves)
    )  # fmt: skip
