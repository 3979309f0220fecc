"""A real browser for tests of the page, and what it has to complain about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PATIENCE_MS = 30_000


@contextmanager
def chromium(program: str) -> Iterator[Browser]:
    """Return the system's headless Chromium."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, headless=True, args=list(FLAGS))
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, url: str, **options: Any) -> Iterator[tuple[Page, list[str]]]:
    """Open a page in a fresh browser context; yield it, and the list that its console messages are added to."""
    complaints: list[str] = []
    context = browser.new_context(**options)
    page = context.new_page()

    def hear(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            complaints.append(message.text)

    page.on("console", hear)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.set_default_timeout(PATIENCE_MS)
    page.goto(url)
    yield page, complaints
    context.close()


def drawn(page: Page, selector: str) -> str:
    """Return the HTML of a part of the page, and the pixels of its canvases.

    Two screenshots of the same page may differ: Chromium may draw a text one pixel higher or lower.
    """
    return page.locator(selector).evaluate(
        "(part) => [part.outerHTML, ...[...part.querySelectorAll('canvas')].map((one) => one.toDataURL())].join('\\n')"
    )


def take_picture(page: Page, folder: Path | None, name: str) -> None:
    """Take a picture for the documentation, if pictures are to be taken."""
    if folder is not None:
        page.screenshot(path=folder / f"{name}.png", full_page=True, animations="disabled")
