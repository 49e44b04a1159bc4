"""Documents hold together: links lead somewhere, plans that they name exist, and the README says the same in
both languages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshloom.core.plan import Plan
from tests.documents import Block, anchors_of, blocks_of

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*/*.md")])
ELSEWHERE = ("https://", "http://")
IN_BOTH_LANGUAGES = (
    *("README", "docs/first_steps", "docs/guide", "docs/plan_settings"),
    *(
        f"docs/guides/{path.stem}"
        for path in sorted(ROOT.glob("docs/guides/*.md"))
        if ".zh-CN" not in path.name
    ),
)
GUIDES = [
    ROOT / name
    for name in (
        "README.md",
        "docs/guide.md",
        "docs/plan_settings.md",
        "docs/which_plan.md",
        "docs/how_it_works.md",
        "docs/clusters/README.md",
        "docs/first_steps.md",
    )
] + sorted(ROOT.glob("docs/guides/*.md"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
@pytest.mark.every
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
    named = [
        *re.findall(r"--plan +(\w+=[^\s`]+)", text),
        *(word for word in words if re.match(r"(dp|pp|tp)=\d", word)),
    ]
    assert named
    for plan in named:
        Plan.parse(plan)


@pytest.mark.parametrize("name", IN_BOTH_LANGUAGES)
def test_a_document_is_the_same_in_both_languages(name: str):
    english, chinese = (
        blocks_of((ROOT / f"{name}{suffix}.md").read_text(encoding="utf-8")) for suffix in ("", ".zh-CN")
    )
    different = differences(english, chinese)
    assert not different, f"{name}.zh-CN.md does not say what {name}.md says:\n" + "\n".join(different)


def test_the_readme_is_read_in_a_few_minutes():
    assert (ROOT / "README.md").read_text(encoding="utf-8").count("\n") <= 90


def test_the_contract_is_one_page_which_the_readme_links_second():
    text = (ROOT / "docs/contract.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 900
    assert re.findall(r"\n\*\*(\d)\. ", text) == list("1234567")
    assert [int(each) for each in re.findall(r"\n\| (\d+) \|", text)] == list(range(1, 13))
    readme = blocks_of((ROOT / "README.md").read_text(encoding="utf-8"))
    links = [link for block in readme for link in block.links if ".zh-CN" not in link]
    assert links[1] == "docs/contract.md"


def test_what_drifts_is_named():
    """Each kind of change to one language alone is found, in the section where it is."""
    text = "# Title\n\nSee `a` and [b](c.md).\n\n    run this\n\n## Second\n\n| x | y |\n|---|---|\n| `1` | z |\n"
    changes = {
        "run this": ("run that", "line 5 and 5 (Title | Title): the code differs"),
        "`a`": ("`e`", "line 3 and 3 (Title | Title): code words only in English: a; only in Chinese: e"),
        "c.md": ("d.md", "line 3 and 3 (Title | Title): links only in English: c.md; only in Chinese: d.md"),
        "| `1` | z |\n": (
            "| `1` | z |\n| v | w |\n",
            "line 9 and 9 (Second | Second): 3 rows in English, 4 in Chinese",
        ),
        "## Second": (
            "### Second",
            "line 7 and 7 (Second | Second): a heading of level 2 in English, of level 3 in Chinese",
        ),
        "    run this\n\n": (
            "",
            "line 5 (Title): code in English, in Chinese at line 5 (Second) a heading: nothing after it was compared",
        ),
    }
    assert differences(blocks_of(text), blocks_of(text)) == []
    for before, (after, message) in changes.items():
        assert differences(blocks_of(text), blocks_of(text.replace(before, after))) == [message]


def plainly(target: str) -> str:
    """Where a link leads, whatever the language; nothing for a document that is in both, where the link to
    the other one is.

    >>> plainly("docs/guide.zh-CN.md#x"), plainly("docs/verify.md"), plainly("../README.md")
    ('', 'docs/verify.md', '')
    """
    file = re.sub(r"^(\.\./)+", "", target.partition("#")[0].replace(".zh-CN.md", ".md"))
    return "" if any(each.endswith(file.removesuffix(".md")) for each in IN_BOTH_LANGUAGES) else target


def differences(english: list[Block], chinese: list[Block]) -> list[str]:
    """What differs between two languages, a line for each; blocks are taken in order."""
    found: list[str] = []
    for one, other in zip(english, chinese, strict=False):
        where = f"line {one.line} and {other.line} ({one.section} | {other.section})"
        if one.kind != other.kind:
            here, there = (
                f"a {each.kind}" if each.kind in ("heading", "table") else each.kind for each in (one, other)
            )
            at = f"line {one.line} ({one.section}): {here} in English, in Chinese at line {other.line} ({other.section}) {there}"
            return [*found, f"{at}: nothing after it was compared"]
        levels = [len(each.text) - len(each.text.lstrip("#")) for each in (one, other)]
        if one.kind == "heading" and levels[0] != levels[1]:
            found.append(
                f"{where}: a heading of level {levels[0]} in English, of level {levels[1]} in Chinese"
            )
        if one.kind == "code" and one.text != other.text:
            found.append(f"{where}: the code differs")
        if (
            one.kind == "table"
            and (rows := [each.text.count("\n") + 1 for each in (one, other)])[0] != rows[1]
        ):
            found.append(f"{where}: {rows[0]} rows in English, {rows[1]} in Chinese")
        links = [[target for each in block.links if (target := plainly(each))] for block in (one, other)]
        for what, mine, others in (("code words", one.code_words, other.code_words), ("links", *links)):
            only, missing = (
                sorted(set(first) - set(second)) for first, second in ((mine, others), (others, mine))
            )
            if only or missing:
                sides = [
                    f"only in {name}: {', '.join(each)}"
                    for name, each in (("English", only), ("Chinese", missing))
                    if each
                ]
                found.append(f"{where}: {what} {'; '.join(sides)}")
    if len(english) != len(chinese):
        found.append(f"{len(english)} blocks in English, {len(chinese)} in Chinese")
    return found


# What a user's own files may be called.
USERS = {"job.py", "pkg/jobs/train.py", "train.py"}


def test_every_file_that_is_named_is_there():
    """In documents, and in the comments and docstrings of the package: `program/run/execute.py`, or
    `execute.py` alone."""
    there = {
        path.relative_to(ROOT).as_posix()
        for folder in ("meshloom", "tests", "benchmarks", "examples", "docs")
        for path in (ROOT / folder).rglob("*.py")
    }
    there |= {name.removeprefix("meshloom/") for name in there}
    names = {name.rpartition("/")[2] for name in there} | {"setup.py"}
    # these say what was then
    now = [path for path in DOCUMENTS if "decisions" not in path.parts and path.name != "LOG.md"]
    missing = [
        f"{name_of(path)} names {file}"
        for path in [*now, *sorted((ROOT / "meshloom").rglob("*.py"))]
        for file in re.findall(r"`([a-z_0-9/]+\.py)`", path.read_text(encoding="utf-8"))
        if file not in USERS and file not in (there if "/" in file else names)
    ]
    assert not missing, "\n".join(missing)
