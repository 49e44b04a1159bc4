"""Golden files: what is exact, as text that is read in a diff. A line names what it is; below it, indented, stands the value.

What is rounded is never in one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

FOLDER = Path(__file__).parent
_INDENT = "    "


def text_of(values: Mapping[str, str]) -> str:
    r"""
    >>> text_of({"dp=2, 5 samples": "3 2", "two lines": "a\nb"})
    'dp=2, 5 samples\n    3 2\ntwo lines\n    a\n    b\n'
    """
    return "".join(
        f"{name}\n" + "".join(f"{_INDENT}{line}\n" for line in value.splitlines() or [""])
        for name, value in values.items()
    )


def values_of(text: str) -> dict[str, str]:
    """
    >>> given = {"dp=2, 5 samples": "3 2", "two lines": "a\\nb", "nothing": ""}
    >>> values_of(text_of(given)) == given
    True
    """
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith(_INDENT):
            found[list(found)[-1]].append(line.removeprefix(_INDENT))
        else:
            found[line] = []
    return {name: "\n".join(lines) for name, lines in found.items()}


def file_of(name: str) -> Path:
    return FOLDER / f"{name}.txt"


def read(name: str) -> dict[str, str]:
    return values_of(file_of(name).read_text(encoding="utf-8"))


def write(name: str, values: Mapping[str, str]) -> None:
    file_of(name).write_text(text_of(values), encoding="utf-8")


def differences(known: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """
    >>> differences({"a": "1", "b": "2"}, {"b": "3", "c": "4"})
    ['a: 1 is written, and there is none now', 'b: 2 is written, and 3 is found', 'c: 4 is found, and nothing is written']
    """
    return [*_differences(known, found)]


def _differences(known: Mapping[str, str], found: Mapping[str, str]) -> Iterable[str]:
    for name in dict.fromkeys((*known, *found)):
        if name not in found:
            yield f"{name}: {known[name]} is written, and there is none now"
        elif name not in known:
            yield f"{name}: {found[name]} is found, and nothing is written"
        elif known[name] != found[name]:
            yield f"{name}: {known[name]} is written, and {found[name]} is found"
