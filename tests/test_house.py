"""The house stays one that a newcomer finds his way in: files that say what they are, one meaning for a name. How much a step passes is measured
in `test_traced.py`."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from tests.test_imports import OPTIONAL, ROOT, SOURCES, imports_of, is_for, name_of, parsed, room_at, room_of


def files() -> list[Path]:
    return [path for path in SOURCES if path.name not in ("__init__.py", "__main__.py")]


def test_a_public_class_has_a_name_of_its_own():
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in files():
        if any(is_for(package, path) for package in OPTIONAL):  # it has that library's names
            continue
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(name_of(path))
    twice = [f"{name}: {', '.join(places)}" for name, places in found.items() if len(places) > 1]
    assert not twice, "\n".join(twice)


def test_files_of_one_name_are_strangers():
    uses: defaultdict[str, set[str]] = defaultdict(set)
    names: defaultdict[str, list[Path]] = defaultdict(list)
    for path in files():
        names[path.name].append(path)
        uses[room_at(path)] |= {
            room_of(each.module) for each in imports_of(path) if each.module.split(".")[0] == "meshloom"
        }
    wrong = [
        f"meshloom/{name_of(one)} and meshloom/{name_of(other)}"
        for paths in names.values()
        for one in paths
        for other in paths
        if one != other and room_at(other) in uses[room_at(one)]
    ]
    assert not wrong, "\n".join(wrong)


def test_a_file_begins_with_what_it_is():
    mute = [
        f"meshloom/{name_of(path)}"
        for path in SOURCES
        if not (ast.get_docstring(parsed(path)) or path.stat().st_size == 0)
    ]
    assert not mute, "\n".join(mute)
    assert ROOT.is_dir()
