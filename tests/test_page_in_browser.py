"""The page of a run in a real browser: drawn without an error, dark and narrow, by keyboard alone, without a network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import make_job

from meshloom.cli.main import main
from meshloom.telemetry.progress import QUIET
from tests import browsers
from tests.browsers import chromium
from tests.fitted import fitted

pytestmark = [pytest.mark.slow, pytest.mark.browser]

WIDE, NARROW = 1200, 380  # pixels of a window
BLACK_AND_WHITE = 4.5  # the least contrast of text


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run with a pipeline, beside one without."""
    directory = tmp_path_factory.mktemp("runs")
    for name, plan in (("pipeline", "pp=2,microbatches=2"), ("replicas", "dp=2")):
        fitted(make_job("mlp", "sgd"), plan, steps=4, out=directory / name, listener=QUIET)
    file = directory / "page.html"
    assert main(["report", str(directory / "pipeline"), "--html", str(file), "--beside", str(directory / "replicas")]) == 0  # fmt: skip
    return file


@pytest.fixture
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


def opened(browser: Any, file: Path, *, width: int, scheme: str) -> tuple[Any, list[str]]:
    """The drawn page, and what its console and its network say against it."""
    page, against = browsers.opened(browser, file, width=width, scheme=scheme)
    page.wait_for_selector("body[data-drawn]", timeout=60_000)
    return page, against


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_it_is_drawn_without_an_error(browser: Any, page: Path, width: int, scheme: str) -> None:
    there, against = opened(browser, page, width=width, scheme=scheme)
    assert against == []
    charts = there.locator(".chart")
    assert charts.count() == int(there.locator("body").get_attribute("data-drawn")) > 6
    assert there.locator(".chart svg.main-svg").count() >= charts.count()
    across = there.evaluate("document.documentElement.scrollWidth")
    assert across <= width, f"it is {across} pixels wide in a window of {width}"
    there.screenshot(path=str(page.with_name(f"{scheme}-{width}.png")), full_page=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(browser: Any, page: Path, scheme: str) -> None:
    there, _ = opened(browser, page, width=WIDE, scheme=scheme)
    ground = colour(there.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert (sum(ground) < 3 * 128) == (scheme == "dark")
    for what in ("body", "nav a", ".faint", "figcaption", ".chart .xtick text"):
        prop = "fill" if what.startswith(".chart") else "color"
        text = there.locator(what).first.evaluate(f"each => getComputedStyle(each).{prop}")
        found = contrast(colour(text), ground)
        assert found >= BLACK_AND_WHITE, f"{what}: {found:.1f}"


def test_it_follows_the_system_from_light_to_dark(browser: Any, page: Path) -> None:
    there, _ = opened(browser, page, width=WIDE, scheme="light")
    tick = there.locator(".chart .xtick text").first
    before = tick.evaluate("each => getComputedStyle(each).fill")
    there.emulate_media(color_scheme="dark")
    there.wait_for_function(
        "before => getComputedStyle(document.querySelector('.chart .xtick text')).fill !== before", arg=before
    )


def test_the_tree_and_the_numbers_open_by_keyboard(browser: Any, page: Path) -> None:
    there, _ = opened(browser, page, width=WIDE, scheme="light")
    reached = list[str]()
    for _ in range(200):
        there.keyboard.press("Tab")
        reached.append(there.evaluate("document.activeElement.textContent.trim().slice(0, 20)"))
        if reached[-1].startswith("Numbers"):
            break
    assert reached[0] == "Runs"  # the sections' links come first
    details = "document.activeElement.closest('details').open"
    assert not there.evaluate(details)
    there.keyboard.press("Enter")
    assert there.evaluate(details)
    assert there.locator("figure details[open] table").first.is_visible()


def test_a_step_of_the_timeline_tells_of_itself(browser: Any, page: Path) -> None:
    there, _ = opened(browser, page, width=WIDE, scheme="light")
    timeline = there.locator("figure", has_text="from the first forward").first
    timeline.scroll_into_view_if_needed()
    box = timeline.locator(".chart .bars .point").first.bounding_box()
    there.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    there.wait_for_selector(".hoverlayer .hovertext", state="attached")
    assert "rank 0" in there.locator(".hoverlayer .hovertext").first.text_content()


def colour(text: str) -> tuple[float, float, float]:
    """
    >>> colour("rgb(1, 2, 3)")
    (1.0, 2.0, 3.0)
    """
    red, green, blue = (float(each) for each in text[text.index("(") + 1 : text.index(")")].split(",")[:3])
    return red, green, blue


def contrast(one: tuple[float, float, float], other: tuple[float, float, float]) -> float:
    """As the Web Content Accessibility Guidelines define it.

    >>> contrast((0, 0, 0), (255, 255, 255))
    21.0
    """

    def light(each: tuple[float, float, float]) -> float:
        shares = [part / 255 for part in each]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(one), light(other)))
    return round((high + 0.05) / (low + 0.05), 2)
