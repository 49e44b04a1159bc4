"""The differences between a model's tensors and those of its files, as one error with all of them."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from meshloom.checkpoint.tensor_file import TensorEntry
from meshloom.core.errors import WeightsError

SHOWN = 10  # of each kind


class WeightDifferences:
    """path: of the files. stored: their tensors by name. used: those that the model takes."""

    def __init__(self, path: Path, stored: Mapping[str, TensorEntry]) -> None:
        self._path, self._stored = path, stored
        self.used: set[str] = set()
        self._missing: dict[str, tuple[str, tuple[int, ...]]] = {}  # name in the model -> in the files, shape
        self._superfluous: list[str] = []
        self._shapes: list[str] = []
        self._dtypes: list[str] = []
        self._unknown: list[str] = []

    def missing(self, mapped: Mapping[str, str | None], tensor: Tensor) -> None:
        """A tensor of the model that the files lack. mapped: its names -> their names in the files."""
        name, there = next((name, there) for name, there in mapped.items() if there is not None)
        self._missing[name] = there, tuple(tensor.shape)

    def fits(self, name: str, tensor: Tensor, there: str, stored: TensorEntry) -> bool:
        """Whether a tensor of the files has the shape of the model's, and a dtype that can be converted."""
        called = name if name == there else f"{name} (in the files {there})"
        if tuple(tensor.shape) != stored.shape:
            self._shapes.append(
                f"{called}: {list(stored.shape)} in the files, {list(tensor.shape)} in the model"
            )
        elif not converts(stored.dtype, tensor.dtype):
            self._dtypes.append(
                f"{called}: {short(stored.dtype)} in the files, {short(tensor.dtype)} in the model"
            )
        else:
            return True
        return False

    def superfluous(self, unused: Collection[str]) -> None:
        """All tensors of the files that are not used, except `unused`."""
        self._superfluous = [name for name in self._stored if name not in self.used and name not in unused]

    def unknown(self, names: Sequence[str]) -> None:
        """Keys of a mapping that are nobody's names."""
        self._unknown = list(names)

    def check(self) -> None:
        """Raise `WeightsError` if there is a difference."""
        missing = [
            f"{name if name == there else f'{name} (in the files {there})'} {list(shape)}{self._nearest(there, shape) if number < SHOWN else ''}"
            for number, (name, (there, shape)) in enumerate(self._missing.items())
        ]
        superfluous = [f"{name} {list(self._stored[name].shape)}" for name in self._superfluous]
        kinds = {
            "missing from the files": missing,
            "in the files and not in the model": superfluous,
            "of another shape": self._shapes,
            "of a dtype that cannot be converted": self._dtypes,
            "in weight_names and neither in the model nor in the files": self._unknown,
        }
        found = {kind: lines for kind, lines in kinds.items() if lines}
        if not found:
            return
        counts = ", ".join(f"{len(lines)} {kind}" for kind, lines in found.items())
        parts = [f"The weights in {self._path} are not those of the model: {counts}."]
        for kind, lines in found.items():
            parts += [f"{kind}:", *(f"  {line}" for line in lines[:SHOWN])]
            parts += [f"  and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
        parts.append(self._way_out())
        raise WeightsError("\n".join(parts))

    def _way_out(self) -> str:
        if prefix := self._prefix():
            function, count = prefix
            return (
                f"Job(weight_names={function}) would find {count} of the {len(self._missing)} missing ones."
            )
        if not self._missing and not self._superfluous:
            return "Give the files of this model, or change the model."
        return (
            "Where only names differ give Job(weight_names={name in the model: name in the files}), or a function; None stands for no counterpart: "
            "a tensor of the model then keeps the value that the model function gave it, and one of the files is not used."
        )

    def _prefix(self) -> tuple[str, int] | None:
        """The function of names that adds or removes the one prefix by which most of the missing names
        differ, and how many it finds."""
        added: Counter[str] = Counter()
        removed: Counter[str] = Counter()
        superfluous = set(self._superfluous)
        longer: dict[str, list[str]] = {}  # what follows a prefix -> the prefixes
        for there in superfluous:
            for prefix, rest in _prefixes(there):
                longer.setdefault(rest, []).append(prefix)
        for name in self._missing:
            added.update(longer.get(name, ()))
            removed.update(prefix for prefix, rest in _prefixes(name) if rest in superfluous)
        best = [(count, prefix, "+") for prefix, count in added.items()]
        best += [(count, prefix, "-") for prefix, count in removed.items()]
        if not best:
            return None
        count, prefix, way = max(best)
        function = (
            f'lambda name: "{prefix}" + name' if way == "+" else f'lambda name: name.removeprefix("{prefix}")'
        )
        return function, count

    def _nearest(self, name: str, shape: tuple[int, ...]) -> str:
        """A hint: the tensor of the files that is most probably meant."""
        same = [each for each in self._superfluous if self._stored[each].shape == shape]
        inside = [each for each in same if each.endswith(f".{name}") or name.endswith(f".{each}")]
        close = inside or difflib.get_close_matches(name, same[:1000], n=1, cutoff=0.5)
        if close:
            return f"; nearest: {close[0]}"
        tied = [each for each in self.used if self._stored[each].shape == shape and len(shape) > 1]
        return (
            f'; of this shape the files have {tied[0]} alone: if it is tied there, {{"{name}": "{tied[0]}"}}'
            if len(tied) == 1
            else ""
        )


def short(dtype: torch.dtype) -> str:
    """A dtype as errors have it.

    >>> short(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")


def _prefixes(name: str) -> Iterator[tuple[str, str]]:
    """What comes before and after each dot of a name.

    >>> list(_prefixes("model.norm.bias"))
    [('model.', 'norm.bias'), ('model.norm.', 'bias')]
    """
    at = -1
    while (at := name.find(".", at + 1)) >= 0:
        yield name[: at + 1], name[at + 1 :]


def converts(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether values of one dtype can be taken for another: floating-point to floating-point, complex to
    complex, integers to integers that hold them all.

    >>> converts(torch.float16, torch.float32), converts(torch.float64, torch.bfloat16), converts(torch.int64, torch.int32)
    (True, True, False)
    """
    if stored == wanted:
        return True
    if stored.is_floating_point or wanted.is_floating_point:
        return stored.is_floating_point and wanted.is_floating_point
    if stored.is_complex or wanted.is_complex:
        return stored.is_complex and wanted.is_complex
    if torch.bool in (stored, wanted):
        return False
    there, here = torch.iinfo(stored), torch.iinfo(wanted)
    return here.min <= there.min and there.max <= here.max
