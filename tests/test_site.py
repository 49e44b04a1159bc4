"""The site of the documentation, as `make docs` has built it: everything is in it, and no page needs a network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

import meshloom
from meshloom.cli.arguments import parser
from tests.browsers import chromium, opened

ROOT = Path(__file__).parents[1]
SITE = ROOT / "build/site"
pytestmark = pytest.mark.slow
built = pytest.mark.site

# what a browser fetches by itself
FETCHED = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src")}


class References(HTMLParser):
    """What a page fetches, where its links lead, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name == "id":
                self.anchors.add(value)
            elif value and (tag, name) in FETCHED:
                self.fetched.append(value)
            elif value and (tag, name) == ("a", "href"):
                self.links.append(value)


@cache
def references(page: Path) -> References:
    return References(page.read_text(encoding="utf-8"))


def pages() -> list[Path]:
    found = sorted(SITE.rglob("*.html"))
    assert found, "make docs builds the site"
    return found


@built
def test_no_page_needs_a_network() -> None:
    wrong = [f"{page.relative_to(SITE)}: {each}" for page in pages() for each in references(page).fetched if re.match(r"(https?:)?//", each)]  # fmt: skip
    assert not wrong, "\n".join(wrong)
    styles = [path for path in SITE.rglob("*.css") if re.search(r"(@import|url\()\s*['\"]?(https?:)?//", path.read_text())]  # fmt: skip
    assert not styles


@built
def test_every_link_leads_somewhere() -> None:
    """To a file of the site, and to what it names there."""
    wrong: list[str] = []
    for page in pages():
        for link in {*references(page).links, *references(page).fetched}:
            file, _, anchor = unquote(link).partition("#")
            if re.match(r"[a-z]+:", link):
                continue
            there = (page.parent / file.partition("?")[0]).resolve() if file else page
            if not there.exists():
                wrong.append(f"{page.relative_to(SITE)} links to {link}, which is not there")
            elif anchor and there.suffix == ".html" and anchor not in references(there).anchors:
                wrong.append(f"{page.relative_to(SITE)} links to {link}, and there is no such place")
    assert not wrong, "\n".join(wrong[:40])


@built
def test_every_document_is_in_it() -> None:
    sources = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*/README.md")]
    missing = [path for path in sources if not (SITE / path.relative_to(ROOT)).with_suffix(".html").exists()]
    assert not missing


@built
def test_public_names_and_verbs_are_in_the_reference() -> None:
    names = references(SITE / "docs/site/api.html").anchors
    assert {f"meshloom.{name}" for name in meshloom.__all__} <= names
    text = (SITE / "docs/site/command_line.html").read_text(encoding="utf-8")
    verbs = parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    for verb, chosen in verbs.items():  # type: ignore[union-attr]
        assert f"meshloom {verb}" in text
        shown = [each for each in chosen._actions if each.help != "==SUPPRESS==" and each.dest != "help"]
        assert all(option in text for each in shown for option in each.option_strings), verb


@built
def test_the_notebook_has_run_and_drawn() -> None:
    page = SITE / "docs/notebooks/first_steps.html"
    assert len([each for each in references(page).fetched if each.endswith(".png")]) == 3
    text = page.read_text(encoding="utf-8")
    assert "EQUAL to one device that runs the same chunks" in text and "Traceback" not in text


@pytest.fixture
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


SHOWN = ["index", "docs/site/index", "docs/first_steps", "docs/guide.zh-CN", "docs/site/api", "docs/notebooks/first_steps"]  # fmt: skip


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (380, "dark")])
@pytest.mark.parametrize("name", SHOWN)
def test_a_page_opens_without_a_network_and_an_error(
    browser: Any, name: str, width: int, scheme: str, tmp_path: Path
) -> None:
    page, against = opened(browser, SITE / f"{name}.html", width=width, scheme=scheme)
    page.wait_for_selector("h1")
    assert against == []
    across = page.evaluate("document.documentElement.scrollWidth")
    assert across <= width, f"it is {across} pixels wide in a window of {width}"
    broken = page.evaluate("[...document.images].filter(each => each.complete && !each.naturalWidth).map(each => each.src)")  # fmt: skip
    assert broken == []
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(float, re.findall(r"[\d.]+", ground)[:3])) < 3 * 128) == (scheme == "dark")
    page.screenshot(path=str(tmp_path / "page.png"))


@pytest.mark.browser
def test_search_finds_without_a_server(browser: Any) -> None:
    page, against = opened(browser, SITE / "docs/site/index.html", width=1200, scheme="light")
    page.fill("input[name=q]", "microbatches")
    page.keyboard.press("Enter")
    page.wait_for_selector("ul.search li a")
    assert page.locator("ul.search li").count() > 3
    assert against == []
