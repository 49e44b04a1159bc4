"""Who holds what of a model, as a tree of modules that opens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from meshloom.core.units import format_number


@dataclass
class _Module:
    """parameters: elements of all parameters in it. divided: those that no rank along tp has whole. stages: ranks along pp
    that hold some of it."""

    parameters: int = 0
    divided: int = 0
    stages: set[int] = field(default_factory=set[int])
    modules: dict[str, _Module] = field(default_factory=dict[str, "_Module"])
    own: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list[tuple[str, Mapping[str, Any]]])


def division_tree(division: Mapping[str, Any]) -> str:
    """HTML. division: as `train/log/run_start.py` writes it."""
    root = _Module()
    rows: Sequence[Mapping[str, Any]] = division["rows"]
    for row in rows:
        *path, last = str(row["name"]).split(".")
        size = math.prod(row["shape"])
        module = root
        for name in [None, *path]:
            module = module if name is None else module.modules.setdefault(name, _Module())
            module.parameters += size
            module.divided += size if "parts" in row else 0
            module.stages.update(row.get("stages", ()))
        module.own.append((last, row))
    return _shown(str(division["model"]), root, root.parameters, is_open=True)


def _shown(name: str, module: _Module, whole: int, *, is_open: bool = False) -> str:
    share = f"{module.parameters / whole:.1%}" if whole else ""
    facts = [f"{format_number(module.parameters)} parameters", share]
    if module.divided:
        facts.append(f"{module.divided / module.parameters:.0%} divided along tp")
    if module.stages:
        facts.append(f"rank {_ranks(module.stages)} along pp")
    inside = "".join(_shown(each, found, whole) for each, found in module.modules.items())
    own = "".join(f"<li>{_parameter(each, row)}</li>" for each, row in module.own)
    words = f"<code>{escape(name)}</code> <span class='faint'>{escape(', '.join(filter(None, facts)))}</span>"
    opened = " open" if is_open else ""
    return f"<details{opened}><summary>{words}</summary><div class='inside'>{inside}{f'<ul>{own}</ul>' if own else ''}</div></details>"


def _parameter(name: str, row: Mapping[str, Any]) -> str:
    words = f"<code>{escape(name)}</code> {_shape(row['shape'])}"
    if "parts" in row:
        parts = [_shape(each) for each in row["parts"]]
        words += f", divided along tp: {parts[0] + ' each' if len(set(parts)) == 1 else ', '.join(parts)}"
    stages: Sequence[int] = row.get("stages", ())
    if stages:
        lent = f", lent to rank {_ranks(stages[1:])}" if len(stages) > 1 else ""
        words += f"; rank {stages[0]} along pp{lent}"
    return words


def _shape(shape: Sequence[int]) -> str:
    """
    >>> _shape([256, 128]), _shape([])
    ('256 x 128', 'one number')
    """
    return " x ".join(map(str, shape)) or "one number"


def _ranks(numbers: Sequence[int] | set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
