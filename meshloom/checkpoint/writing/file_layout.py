"""The files of a checkpoint into which all ranks of a host write, and which rank writes what.

    rank 0 holds rows 0-1 of w, m      model.safetensors   | header | w w w w w w | b |
    rank 1 holds rows 2-3 of w, m                                     0 0 0 1 1 1   0
    both hold b                        state-00000-...     | header | m m m m m m |

Every rank says what it holds; all of them then compute the same layout. What several ranks hold, each of them
writes a part of.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from meshloom.checkpoint.format import INDEX, Piece, model_name, piece_name, state_name
from meshloom.checkpoint.tensor_file import TensorEntry, header_of, widest_first
from meshloom.comm.pieces import Interval, Runs
from meshloom.core.errors import CheckpointError

Kind = Literal["weight", "state"]
FILE_BYTES = 5 * 10**9  # of a file, unless a tensor alone is larger
_SMALL_BYTES = 1 << 16  # of a piece that one rank writes although several hold it


@dataclass(frozen=True)
class HeldSpan:
    """What a rank holds, as `Piece` says, without its elements."""

    kind: Kind
    key: str
    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    held: tuple[Runs | None, ...] | None

    @staticmethod
    def of(kind: Kind, piece: Piece) -> HeldSpan:
        return HeldSpan(kind, piece.key, piece.start, piece.stop, piece.shape, piece.tensor.dtype, piece.held)

    @staticmethod
    def whole(kind: Kind, entry: TensorEntry) -> HeldSpan:
        """All of a tensor."""
        return HeldSpan(kind, entry.name, 0, math.prod(entry.shape), entry.shape, entry.dtype, None)

    def to_json(self) -> list[Any]:
        dtype = str(self.dtype).removeprefix("torch.")
        return [self.kind, self.key, self.start, self.stop, self.shape, dtype, self.held]

    @staticmethod
    def from_json(value: Sequence[Any]) -> HeldSpan:
        kind, key, start, stop, shape, dtype, held = value
        dims = None if held is None else tuple(None if runs is None else _runs(runs) for runs in held)
        return HeldSpan(kind, key, start, stop, tuple(shape), getattr(torch, dtype), dims)

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class FileLayout:
    """A file: its name, its entries in their order."""

    name: str
    entries: tuple[TensorEntry, ...]

    @property
    def header(self) -> bytes:
        return self._header_and_starts[0]

    @property
    def starts(self) -> Mapping[str, int]:
        """The byte at which each entry's tensor starts."""
        return self._header_and_starts[1]

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(each.num_bytes for each in self.entries)

    @cached_property
    def _header_and_starts(self) -> tuple[bytes, Mapping[str, int]]:
        return header_of(self.entries)


@dataclass(frozen=True, kw_only=True)
class CheckpointLayout:
    """All files; weights: those of weights, the others are of state. runs: which elements of the flattened
    tensor of a state's key are in the files, in order."""

    weights: tuple[FileLayout, ...]
    state: tuple[FileLayout, ...]
    shapes: Mapping[str, tuple[int, ...]]
    runs: Mapping[str, Runs]

    @property
    def files(self) -> tuple[FileLayout, ...]:
        return self.weights + self.state

    @property
    def tensor_bytes(self) -> int:
        """Of all tensors, without headers."""
        return sum(each.num_bytes for file in self.files for each in file.entries)

    def place(self, span: HeldSpan) -> tuple[FileLayout, int]:
        """The file of the tensor that holds a span, and the byte where element 0 of the full tensor is or
        would be."""
        if span.kind == "weight":
            file = self._of_entry["weight", span.key]
            return file, file.starts[span.key]
        first, last = next(
            run for run in self.runs[span.key] if span.held is not None or run[0] <= span.start < run[1]
        )
        name = piece_name(span.key, first, last)
        file = self._of_entry["state", name]
        return file, file.starts[name] - first * span.dtype.itemsize

    def pieces(self) -> dict[str, Any]:
        """As meta.json has them: by key, the full shape and the places of its pieces."""
        return {
            key: {
                "shape": list(self.shapes[key]),
                "parts": [
                    [self._of_entry["state", piece_name(key, start, stop)].name, start, stop]
                    for start, stop in runs
                ],
            }
            for key, runs in sorted(self.runs.items())
        }

    def index(self) -> dict[str, bytes]:
        """The index of the weights' files, as transformers writes it; empty for one file."""
        if len(self.weights) == 1:
            return {}
        content = {
            "metadata": {"total_size": sum(each.num_bytes for file in self.weights for each in file.entries)},
            "weight_map": {each.name: file.name for file in self.weights for each in file.entries},
        }
        return {INDEX: (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()}

    @cached_property
    def _of_entry(self) -> dict[tuple[Kind, str], FileLayout]:
        return {
            **{("weight", each.name): file for file in self.weights for each in file.entries},
            **{("state", each.name): file for file in self.state for each in file.entries},
        }


def layout_of(spans: Iterable[HeldSpan], file_bytes: int = FILE_BYTES) -> CheckpointLayout:
    """The files of what all ranks hold. Raises `CheckpointError` if no rank holds some elements of a tensor
    that is held in blocks, or of a weight."""
    by_key: dict[tuple[Kind, str], dict[HeldSpan, None]] = {}
    for span in spans:
        by_key.setdefault((span.kind, span.key), {})[span] = None
    weights: list[TensorEntry] = []
    state: list[TensorEntry] = []
    shapes: dict[str, tuple[int, ...]] = {}
    runs: dict[str, Runs] = {}
    for (kind, key), found in by_key.items():
        shape, dtype = next((each.shape, each.dtype) for each in found)
        assert all((each.shape, each.dtype) == (shape, dtype) for each in found), f"{key} differs: {found}"
        there = _runs_of(key, shape, list(found))
        if kind == "weight":
            if there != ((0, math.prod(shape)),):
                raise CheckpointError(f"no rank holds all elements of {key}: there are only {there}")
            weights.append(TensorEntry(key, shape, dtype))
            continue
        shapes[key], runs[key] = shape, there
        state += [TensorEntry(piece_name(key, start, stop), (stop - start,), dtype) for start, stop in there]
    of_weights, of_state = _files(weights, file_bytes), _files(state, file_bytes)
    return CheckpointLayout(
        weights=tuple(
            FileLayout(name=model_name(number, len(of_weights)), entries=entries)
            for number, entries in enumerate(of_weights)
        ),
        state=tuple(
            FileLayout(name=state_name(number, len(of_state)), entries=entries)
            for number, entries in enumerate(of_state)
        ),
        shapes=shapes,
        runs=runs,
    )


def division_of(everyone: Sequence[Sequence[HeldSpan]], rank: int) -> list[Interval]:
    """What `rank` writes of each span that it holds, as elements from start to stop, so that all ranks write
    about equally much."""
    holders: dict[HeldSpan, list[int]] = {}
    for holder, spans in enumerate(everyone):
        for span in spans:
            holders.setdefault(span, []).append(holder)
    load = [0] * len(everyone)
    mine: dict[HeldSpan, Interval] = {}
    for span, ranks in holders.items():
        if len(ranks) > 1 and span.num_bytes > _SMALL_BYTES:
            count = span.stop - span.start
            for number, each in enumerate(ranks):
                part = (
                    span.start + count * number // len(ranks),
                    span.start + count * (number + 1) // len(ranks),
                )
                load[each] += (part[1] - part[0]) * span.dtype.itemsize
                if each == rank:
                    mine[span] = part
        else:
            writer = min(ranks, key=load.__getitem__)
            load[writer] += span.num_bytes
            mine[span] = (span.start, span.stop) if writer == rank else (span.start, span.start)
    return [mine.get(span, (span.start, span.start)) for span in everyone[rank]]


def _files(entries: Sequence[TensorEntry], file_bytes: int) -> list[tuple[TensorEntry, ...]]:
    """At most `file_bytes` in each, in the order given; within a file wider elements first."""
    files: list[list[TensorEntry]] = [[]]
    size = 0
    for each in entries:
        if files[-1] and size + each.num_bytes > file_bytes:
            files.append([])
            size = 0
        files[-1].append(each)
        size += each.num_bytes
    return [tuple(widest_first(each)) for each in files]


def _runs_of(key: str, shape: tuple[int, ...], spans: Sequence[HeldSpan]) -> Runs:
    """The elements of the flattened tensor that are in these spans, in order."""
    total = math.prod(shape)
    if any(span.held is not None for span in spans):
        if sum(span.stop - span.start for span in spans) < total:
            raise CheckpointError(f"no rank holds all elements of {key} that is {shape}")
        return ((0, total),)
    runs: list[Interval] = []
    for start, stop in sorted((span.start, span.stop) for span in spans):
        if runs and start <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(stop, runs[-1][1])
        else:
            runs.append((start, stop))
    return tuple(runs)


def _runs(value: Sequence[Sequence[int]]) -> Runs:
    return tuple((start, stop) for start, stop in value)
