"""Gradients of matrices are sent as two thin factors, from one step of power iteration, with error feedback.

Source: Vogels, Karimireddy & Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization" (2019), algorithms 1 and 2.

    M  [n, m]   this rank's gradient plus its error                      (algorithm 2, line 6)
    P = M Q     [n, r], all-reduced, columns orthonormalised             (algorithm 1, lines 2-4); Q is that of the last step, at first random
    Q = M' P    [m, r], all-reduced                                      (lines 5-6)
    P Q'        the mean of all ranks' M, projected on the columns of P  (line 8)

The error is M minus its own projection. Tensors whose factors would not be smaller (vectors, small matrices)
are sent uncompressed, beside P.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from meshloom.comm.group import Group
from meshloom.core.losses.loss_sum import Divisor
from meshloom.exchange.buckets.buckets import Bucket, BucketEntry
from meshloom.exchange.buckets.error_feedback import ErrorFeedback
from meshloom.exchange.buckets.reduction import Reduction
from meshloom.telemetry.traffic import ExpectedBytes, Traffic


class PowerSGD(Reduction):
    """rank: columns of the factors, r. A tensor [n, ...] is a matrix with n rows. Messages are sent after
    backward, in two rounds."""

    def __init__(self, group: Group, rank: int) -> None:
        self._group = group
        self._rank = rank
        self._errors = ErrorFeedback()
        self._factors: dict[str, Tensor] = {}  # Q [m, r] of every matrix, by name: the same bits on all ranks

    def start(self, bucket: Bucket) -> None:
        pass

    def finish(self, buckets: Sequence[Bucket], divisor: Divisor) -> None:
        self._errors.begin(buckets, divisor, self._group)
        matrices = [[_Matrix.of(bucket, entry) for entry in self._compressed(bucket)] for bucket in buckets]
        first = [
            _joined([*(each.value @ self._factor(each) for each in of), *self._others(bucket)], bucket)
            for bucket, of in zip(buckets, matrices, strict=True)
        ]
        self._add_up(first)
        second: list[Tensor] = []
        for index, (bucket, of, message) in enumerate(zip(buckets, matrices, first, strict=True)):
            others = self._others(bucket)
            received = message.split(
                [*(each.num_rows * self._rank for each in of), *(len(each) for each in others)]
            )
            left = torch.zeros_like(bucket.flat[: bucket.length])
            own: list[Tensor] = []
            for each, product in zip(of, received, strict=False):
                each.columns = torch.linalg.qr(product.view(each.num_rows, self._rank)).Q
                own.append(each.value.mH @ each.columns)
                left[each.start : each.stop] = (each.value - each.columns @ own[-1].mH).reshape(-1)
            for other, total in zip(others, received[len(of) :], strict=True):
                other.copy_(total)
            self._errors.keep(index, bucket, left)
            second.append(_joined(own, bucket))
        self._add_up(second)
        for bucket, of, message in zip(buckets, matrices, second, strict=True):
            for each, flat in zip(
                of, message.split([each.num_columns * self._rank for each in of]), strict=True
            ):
                factor = flat.view(each.num_columns, self._rank)
                bucket.flat[each.start : each.stop] = (each.columns @ factor.mH).reshape(-1)
                # of nothing but zeros: the previous one is a better start
                self._factors[each.name] = torch.where(factor.any(), factor, self._factor(each))

    def expected_bytes(self, buckets: Sequence[Bucket]) -> ExpectedBytes:
        total = 0
        for bucket in buckets:
            shapes = [_matrix_shape(entry) for entry in self._compressed(bucket)]
            num_elements = self._rank * sum(n + m for n, m in shapes) + sum(
                len(each) for each in self._others(bucket)
            )
            total += num_elements * _precision(bucket.flat.dtype).itemsize
        factors = ExpectedBytes(per_step=Traffic.along("dp", all_reduce=total))
        return self._errors.expected_bytes(buckets) + factors

    def _compressed(self, bucket: Bucket) -> list[BucketEntry]:
        shapes = [(entry, *_matrix_shape(entry)) for entry in bucket.entries]
        return [entry for entry, n, m in shapes if self._rank * (n + m) < n * m]

    def _others(self, bucket: Bucket) -> list[Tensor]:
        compressed = {entry.name for entry in self._compressed(bucket)}
        return [
            bucket.flat[entry.start : entry.stop] for entry in bucket.entries if entry.name not in compressed
        ]

    def _factor(self, of: _Matrix) -> Tensor:
        # seeded by name, because ranks along tp hold different parameters
        if of.name not in self._factors:
            generator = torch.Generator().manual_seed(zlib.crc32(of.name.encode()))
            self._factors[of.name] = torch.randn(
                of.num_columns, self._rank, generator=generator, dtype=torch.float64
            ).to(of.value)
        return self._factors[of.name]

    def _add_up(self, messages: Sequence[Tensor]) -> None:
        works = [self._group.all_reduce(message) for message in messages if len(message)]
        for work in works:
            work.wait()


class _Matrix:
    """A parameter's gradient in a bucket, elements `start` to `stop`, as `value` [num_rows, num_columns];
    `columns` [num_rows, r] once known."""

    columns: Tensor

    def __init__(self, entry: BucketEntry, value: Tensor) -> None:
        self.name, self.start, self.stop = entry.name, entry.start, entry.stop
        self.value = value
        self.num_rows, self.num_columns = value.shape

    @staticmethod
    def of(bucket: Bucket, entry: BucketEntry) -> _Matrix:
        value = bucket.flat[entry.start : entry.stop].view(_matrix_shape(entry))
        return _Matrix(entry, value.to(_precision(value.dtype), copy=True))


def _matrix_shape(entry: BucketEntry) -> tuple[int, int]:
    size = entry.stop - entry.start
    rows = entry.parameter.shape[0] if entry.parameter.ndim > 1 and size else 1
    return rows, size // rows


def _joined(parts: Sequence[Tensor], bucket: Bucket) -> Tensor:
    """The parts of a bucket's message, flat."""
    precision = _precision(bucket.flat.dtype)
    return (
        torch.cat([part.reshape(-1).to(precision) for part in parts])
        if parts
        else bucket.flat.new_empty(0, dtype=precision)
    )


def _precision(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
