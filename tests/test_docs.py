"""Documents hold together: links lead somewhere, plans that they name exist, and the README says the same in both languages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshloom.core.plan import Plan
from tests.documents import Block, anchors_of, blocks_of

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*/*.md")])
ELSEWHERE = ("https://", "http://")
SAME_IN_BOTH = {"README.md", "README.zh-CN.md"}  # each links to the other
GUIDES = [ROOT / name for name in ("README.md", "docs/which_plan.md", "docs/how_it_works.md", "docs/clusters/README.md")]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_every_link_leads_to_a_file_and_to_a_heading_of_it(path: Path):
    text = path.read_text(encoding="utf-8")
    broken: list[str] = []
    for block in blocks_of(text):
        for target in [*block.links, *block.images]:
            file, _, anchor = target.partition("#")
            there = (path.parent / file).resolve() if file else path
            if target.startswith(ELSEWHERE):
                continue
            if not there.exists():
                broken.append(f"{name_of(path)}:{block.line} links to {target}, which does not exist")
            elif anchor and anchor not in anchors_of(there.read_text(encoding="utf-8")):
                broken.append(f"{name_of(path)}:{block.line} links to {target}, and there is no such heading")
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("path", GUIDES, ids=name_of)
def test_every_plan_that_a_guide_names_is_one(path: Path):
    text = path.read_text(encoding="utf-8")
    words = [word for block in blocks_of(text) for word in block.code_words]
    named = [*re.findall(r"--plan +(\w+=[^\s`]+)", text), *(word for word in words if re.match(r"(dp|pp|tp)=\d", word))]
    assert named
    for plan in named:
        Plan.parse(plan)


def test_the_readme_is_the_same_in_both_languages():
    english, chinese = (blocks_of((ROOT / name).read_text(encoding="utf-8")) for name in ("README.md", "README.zh-CN.md"))
    different = differences(english, chinese)
    assert not different, "README.zh-CN.md does not say what README.md says:\n" + "\n".join(different)


def test_what_drifts_is_named():
    """Each kind of change to one language alone is found, in the section where it is."""
    text = "# Title\n\nSee `a` and [b](c.md).\n\n    run this\n\n## Second\n\n| x | y |\n|---|---|\n| `1` | z |\n"
    changes = {
        "run this": ("run that", "line 5 and 5 (Title | Title): the code differs"),
        "`a`": ("`e`", "line 3 and 3 (Title | Title): code words only in README.md: a; only in README.zh-CN.md: e"),
        "c.md": ("d.md", "line 3 and 3 (Title | Title): links only in README.md: c.md; only in README.zh-CN.md: d.md"),
        "| `1` | z |\n": ("| `1` | z |\n| v | w |\n", "line 9 and 9 (Second | Second): 3 rows in README.md, 4 in README.zh-CN.md"),
        "## Second": ("### Second", "line 7 and 7 (Second | Second): a heading of level 2 in README.md, of level 3 in README.zh-CN.md"),
        "    run this\n\n": (
            "",
            "line 5 (Title): README.md has code here, README.zh-CN.md at line 5 (Second) a heading: nothing after it was compared",
        ),
    }
    assert differences(blocks_of(text), blocks_of(text)) == []
    for before, (after, message) in changes.items():
        assert differences(blocks_of(text), blocks_of(text.replace(before, after))) == [message]


def differences(english: list[Block], chinese: list[Block]) -> list[str]:
    """What differs between two languages, a line for each; blocks are taken in order."""
    found: list[str] = []
    for one, other in zip(english, chinese, strict=False):
        where = f"line {one.line} and {other.line} ({one.section} | {other.section})"
        if one.kind != other.kind:
            here, there = (f"a {each.kind}" if each.kind in ("heading", "table") else each.kind for each in (one, other))
            at = f"line {one.line} ({one.section}): README.md has {here} here, README.zh-CN.md at line {other.line} ({other.section}) {there}"
            return [*found, f"{at}: nothing after it was compared"]
        levels = [len(each.text) - len(each.text.lstrip("#")) for each in (one, other)]
        if one.kind == "heading" and levels[0] != levels[1]:
            found.append(f"{where}: a heading of level {levels[0]} in README.md, of level {levels[1]} in README.zh-CN.md")
        if one.kind == "code" and one.text != other.text:
            found.append(f"{where}: the code differs")
        if one.kind == "table" and (rows := [each.text.count("\n") + 1 for each in (one, other)])[0] != rows[1]:
            found.append(f"{where}: {rows[0]} rows in README.md, {rows[1]} in README.zh-CN.md")
        for what, mine, others in (("code words", one.code_words, other.code_words), ("links", one.links, other.links)):
            only, missing = (sorted(set(first) - set(second) - SAME_IN_BOTH) for first, second in ((mine, others), (others, mine)))
            if only or missing:
                sides = [f"only in {name}: {', '.join(each)}" for name, each in (("README.md", only), ("README.zh-CN.md", missing)) if each]
                found.append(f"{where}: {what} {'; '.join(sides)}")
    if len(english) != len(chinese):
        found.append(f"README.md has {len(english)} blocks, README.zh-CN.md {len(chinese)}")
    return found
