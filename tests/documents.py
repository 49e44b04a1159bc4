"""Markdown as a list of blocks: headings, code, tables, prose; links and code words in it; the anchors of
headings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["heading", "code", "table", "prose"]
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
CODE_WORDS = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True, kw_only=True)
class Block:
    """Lines that belong together. section: the heading above. line: of its first line, counted from 1."""

    kind: Kind
    text: str
    section: str
    line: int

    @property
    def links(self) -> list[str]:
        """Where its links lead, in order; none in code."""
        return [] if self.kind == "code" else [target for _, target in LINK.findall(self.text)]

    @property
    def images(self) -> list[str]:
        """The files of its pictures."""
        return [] if self.kind == "code" else [target for _, target in IMAGE.findall(self.text)]

    @property
    def code_words(self) -> list[str]:
        """What is set as code within its sentences."""
        return [] if self.kind == "code" else CODE_WORDS.findall(self.text)


def blocks_of(text: str) -> list[Block]:
    """All blocks in order. An indented line behind an empty one is code; so is what stands between fences."""
    found: list[Block] = []
    section, first, lines, fenced = "", 0, list[str](), False

    def end() -> None:
        if any(map(str.strip, lines)):
            body = "\n".join(lines).strip("\n")
            begins: dict[str, Kind] = {"    ": "code", "```": "code", "|": "table", "#": "heading"}
            kinds: list[Kind] = [kind for start, kind in begins.items() if body.startswith(start)] or [
                "prose"
            ]
            found.append(Block(kind=kinds[0], text=body, section=section, line=first))
        lines.clear()

    for number, line in enumerate(text.splitlines(), 1):
        fence, indented = line.startswith("```"), line.startswith("    ")
        in_code = bool(lines) and lines[0].startswith("    ")
        if not fenced and (
            fence
            or line.startswith("#")
            or (not line.strip() and not in_code)
            or (in_code and line.strip() and not indented)
        ):
            end()
        if not lines:
            first = number
        if line.strip() or lines:
            lines.append(line)
        fenced ^= fence
        if not fenced and line.startswith("#"):
            section = line.lstrip("# ")
            end()
        elif fence and not fenced:
            end()
    end()
    return found


def anchors_of(text: str) -> set[str]:
    """By which its headings can be linked to.

    >>> sorted(anchors_of("# What it comes to, on the digits\\n\\n## The `plan`"))
    ['the-plan', 'what-it-comes-to-on-the-digits']
    """
    headings = [block.text.lstrip("# ") for block in blocks_of(text) if block.kind == "heading"]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
