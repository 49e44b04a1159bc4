"""Cluster files: TOML whose every constant says where it is from.

    inherit = "a100-80gb-sxm"            # the constants of that file, of which this one changes some

    [sources]
    datasheet = "NVIDIA A100 Tensor Core GPU datasheet, June 2021"

    [device]
    memory_bytes = { value = 42_949_672_960, source = "datasheet" }
    product_efficiency = { value = 0.86, fitted = "korthikanti_table4_layer_time.csv: all rows" }

`source` names a line of [sources] of the same file; `fitted` names a table of measured runs and the rows of it.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from meshloom.core.errors import MachineError

MOST_FITTED = 20


@dataclass(frozen=True, kw_only=True)
class Constant:
    """One number of a cluster, or the links of a host. source: the publication. fitted: the table and its rows; one of both is there."""

    value: Any
    source: str = ""
    fitted: str = ""


def shipped_names() -> list[str]:
    """Names of the clusters whose files come with the package."""
    return sorted(
        each.name.removesuffix(".toml") for each in _shipped().iterdir() if each.name.endswith(".toml")
    )


def shipped_text(name: str) -> str:
    """Text of the file of a shipped cluster. Raises `MachineError` for a name that there is not."""
    names = shipped_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise MachineError(f"There is no cluster {name!r}. {hint}Known: {', '.join(names)}.")
    return _shipped().joinpath(f"{name}.toml").read_text(encoding="utf-8")


def constants_of(text: str, name: str, beside: Path | None = None) -> dict[str, Constant]:
    """Constants of a file by path, like `device.memory_bytes`, inherited ones included. Raises `MachineError`.

    name: of the file, for errors. beside: the folder in which an inherited file is looked for before the shipped ones.
    """
    constants = _read(text, name, beside, ())
    fitted = [path for path, each in constants.items() if each.fitted]
    if len(fitted) > MOST_FITTED:
        raise MachineError(
            f"{name} has {len(fitted)} fitted constants, more than {MOST_FITTED}. Take published values for some of {', '.join(fitted)}."
        )
    return constants


def _shipped() -> Any:
    return files("meshloom.clusters").joinpath("files")


def _read(text: str, name: str, beside: Path | None, heirs: tuple[str, ...]) -> dict[str, Constant]:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise MachineError(f"{name} is no TOML: {error}.") from error
    if name in heirs:
        raise MachineError(f"{' inherits '.join([*heirs, name])}: that never ends.")
    parent, sources = tables.pop("inherit", None), tables.pop("sources", {})
    own = {path: _constant(path, entry, sources, name) for path, entry in _entries(tables, "")}
    if parent is None:
        return own
    at = beside / f"{parent}.toml" if beside else None
    inherited = at.read_text(encoding="utf-8") if at and at.is_file() else shipped_text(parent)
    return {**_read(inherited, parent, beside, (*heirs, name)), **own}


def _entries(table: Mapping[str, Any], path: str) -> Iterator[tuple[str, object]]:
    for key, entry in table.items():
        here = f"{path}.{key}" if path else key
        if isinstance(entry, dict) and "value" not in entry:
            yield from _entries(entry, here)
        else:
            yield here, entry


def _constant(path: str, entry: object, sources: Mapping[str, str], name: str) -> Constant:
    if not isinstance(entry, dict) or not entry.keys() <= {"value", "source", "fitted"} or len(entry) != 2:
        raise MachineError(
            f"{path} of {name} has no source. Write {path} = {{ value = ..., source = ... }}, or fitted = ... with the table and its rows."
        )
    source, fitted = entry.get("source", ""), entry.get("fitted", "")
    if source and source not in sources:
        raise MachineError(
            f"{path} of {name} has the source {source!r}, which [sources] does not explain. It explains {', '.join(sources) or 'none'}."
        )
    if not source and not re.fullmatch(r"[^:]+: \S.*", fitted):
        raise MachineError(
            f"{path} of {name} was fitted on {fitted!r}, which names no rows. Write fitted = TABLE: ROWS."
        )
    return Constant(value=entry["value"], source=sources.get(source, ""), fitted=fitted)
