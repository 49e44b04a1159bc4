"""Pins: placements of parameters that the plan fixes (`tp_placements`)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

from meshloom.core.errors import PlanError
from meshloom.program.ir.lines import describe_line
from meshloom.tensor_parallel.layout.cuts import StripNumbers
from meshloom.tensor_parallel.layout.layout import Layout
from meshloom.tensor_parallel.layout.placement import Cut, Part, Placement
from meshloom.tensor_parallel.search.uses import Uses

_DIM_NAMES = {
    "column": "out features",
    "channels": "out channels",
    "row": "in features",
    "vocabulary": "vocabulary",
    "heads": "heads",
    "experts": "experts",
}


class Pins:
    """The placements that pins leave to each parameter. pins: pattern of modules -> pin.

    A pattern matches the modules of that name and everything in them. Raises `PlanError` for one that matches
    nothing or cannot be satisfied.
    """

    def __init__(
        self,
        layout: Layout,
        numbers: StripNumbers,
        cuts: Mapping[int, list[Cut]],
        num_ranks: int,
        pins: Mapping[str, str],
    ) -> None:
        self._layout = layout
        self._numbers = numbers
        self._uses = Uses(layout, numbers, cuts)
        self._num_ranks = num_ranks
        self._pins = dict(pins)
        # value of a parameter -> pattern, pin, name of the parameter that matched
        self.of_value: dict[str, tuple[str, str, str]] = {}
        for pattern, pin in pins.items():
            self._match(pattern, pin)

    def allowed(self, value: str, options: list[Placement]) -> list[Placement]:
        """The placements of a parameter that satisfy its pin."""
        if value not in self.of_value:
            return options
        pattern, pin, _ = self.of_value[value]
        if pin == "replicated":
            return [each for each in options if not isinstance(each, Part) or each.cut is None]
        wanted, others = self._axes(value, pin)
        if not wanted and self._divides_another(pattern, pin):
            # such as the bias of a layer split by rows
            return [each for each in options if not isinstance(each, Part) or each.cut is None]
        found: list[Placement] = [
            each
            for each in options
            if isinstance(each, Part)
            and each.cut
            and wanted & each.cut.parts.keys()
            and not others & each.cut.parts.keys()
        ]
        usable = [each for each in found if self._uses.blocking(value, each) is None]
        if not usable:
            raise PlanError(
                f"tp_placements={pattern}:{pin} is impossible: {self._reason(value, pin, wanted, found)}. Leave that pin out, or use replicated."
            )
        return usable

    @property
    def marks(self) -> dict[str, object]:
        """The pin of every pinned parameter."""
        return {value: pin for value, (_, pin, _) in self.of_value.items()}

    def way_out(self) -> str:
        """What the user can do if there is no division."""
        return f"The pins contradict each other: leave out one of {', '.join(f'{pattern}:{pin}' for pattern, pin in self._pins.items())}."

    def _match(self, pattern: str, pin: str) -> None:
        parameters = self._layout.program.parameters.values()
        found = [
            (each, name)
            for each in parameters
            for name in (each.name, *each.aliases)
            if is_meant(name, pattern)
        ]
        if not found:
            modules = list(
                dict.fromkeys(
                    name.rpartition(".")[0] for each in parameters for name in (each.name, *each.aliases)
                )
            )
            near = difflib.get_close_matches(pattern, modules, n=1, cutoff=0.4)
            raise PlanError(
                f"tp_placements={pattern}:{pin} matches no module with parameters. {f'Did you mean {near[0]}?' if near else 'Names are those of named_modules().'}"
            )
        for each, name in found:
            known = self.of_value.get(each.value)
            if known is not None and known[1] != pin:
                raise PlanError(
                    f"tp_placements={known[0]}:{known[1]} and {pattern}:{pin} both match {each.name}. Leave one of them out."
                )
            self.of_value.setdefault(each.value, (pattern, pin, name))
        if pin != "replicated" and not self._divides_another(pattern, pin):
            value = max((each for each, _ in found), key=lambda each: len(each.meta.shape)).value
            raise PlanError(
                f"tp_placements={pattern}:{pin} is impossible: {self._reason(value, pin, set(), [])}. Leave that pin out, or use replicated."
            )

    def _divides_another(self, pattern: str, pin: str) -> bool:
        """Whether a pin shards at least one of the parameters that it matches."""
        return any(
            self._axes(value, pin)[0] for value, (known, _, _) in self.of_value.items() if known == pattern
        )

    def _axes(self, value: str, pin: str) -> tuple[frozenset[int], frozenset[int]]:
        """The numbers of a parameter's axes that a pin shards, and of its other axes."""
        axes = self._layout.values[value][0]
        every = frozenset(number for axis in axes for number in self._numbers.leaves(axis))
        if pin.startswith("dim"):
            place = int(pin.removeprefix("dim"))
            wanted = self._numbers.leaves(axes[place]) if place < len(axes) else frozenset[int]()
        elif pin == "heads":
            wanted = every & self._uses.heads
        elif pin == "experts":
            wanted = every & self._uses.experts
        else:
            inner, outer, looked_up = self._uses.sides(value, self._module(value))
            wanted = (looked_up or outer) if pin == "vocabulary" else inner if pin == "row" else outer
        return wanted, every - wanted

    def _module(self, value: str) -> str:
        """The module whose parameter is pinned; a tied parameter is used in others, too."""
        return self.of_value[value][2].rpartition(".")[0] if value in self.of_value else ""

    def _reason(self, value: str, pin: str, wanted: Iterable[int], found: Iterable[Placement]) -> str:
        name = next(each.name for each in self._layout.program.parameters.values() if each.value == value)
        what = _DIM_NAMES.get(pin, f"dimension {pin.removeprefix('dim')}")
        sizes = [self._numbers.axes[number].size for number in wanted]
        stuck = next((node for each in found if (node := self._uses.blocking(value, each)) is not None), None)
        if stuck is None and sizes and max(sizes) < self._num_ranks:
            return f"{name} has {max(sizes)} {what}, fewer than tp={self._num_ranks}"
        users = self._uses.users.get(value, [])
        if not users:
            return f"the loss does not use {name}"
        node = stuck or users[0]
        if not sizes:
            return f"{name} has no {what} where {node.operator} uses it at {describe_line(node.line)}"
        return f"{node.operator} at {describe_line(node.line)} needs all {what} of {name}"


def is_meant(name: str, pattern: str) -> bool:
    """Whether a pattern matches a parameter, or a module that contains it.

    >>> is_meant("blocks.0.up.weight", "blocks.*.up"), is_meant("blocks.0.up.weight", "up")
    (True, False)
    """
    return any(fnmatchcase(prefix, pattern) for prefix in _prefixes(name))


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))
