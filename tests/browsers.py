"""A real browser for tests: Debian's chromium, and pages that are opened without a network."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def chromium() -> Iterator[Any]:
    """Playwright's handle of a headless one."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    assert program, "make browser installs Debian's chromium"
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


def opened(browser: Any, file: Path, *, width: int, scheme: str) -> tuple[Any, list[str]]:
    """The page of a file, and a list that grows by what its console and its network say against it."""
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, offline=True)
    page, against = context.new_page(), list[str]()
    page.on("console", lambda message: against.append(message.text) if message.type in ("error", "warning") else None)  # fmt: skip
    page.on("pageerror", lambda error: against.append(str(error)))
    page.on("request", lambda request: against.append(request.url) if not request.url.startswith(("file:", "data:", "blob:")) else None)  # fmt: skip
    page.goto(file.as_uri())
    return page, against
