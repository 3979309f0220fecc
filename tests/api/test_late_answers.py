"""Answers that come late, in a real browser: what is on the page is about what was asked last."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import APIResponse, Browser, Page, Route, expect

from browsing import PATIENCE_MS, chromium, opened
from server_process import ServerProcess

TYPE = "field => { field.value = '%s'; field.dispatchEvent(new Event('change')) }"


@pytest.fixture(scope="module")
def browser(find_program: Callable[[str, str], str]) -> Iterator[Browser]:
    with chromium(find_program("chromium", "chromium")) as browser:
        yield browser


class HeldAnswer:
    """The first answer of a path, which reaches the page when it is told to; later ones pass.

    Args:
        page: that asks.
        pattern: of the URL.
    """

    def __init__(self, page: Page, pattern: str) -> None:
        self._page = page
        self._held: tuple[Route, APIResponse] | None = None
        page.route(pattern, self._take)

    def wait(self) -> None:
        """Return when it is there."""
        for _ in range(PATIENCE_MS // 10):
            if self._held is not None:
                return
            self._page.wait_for_timeout(10)
        raise AssertionError("the page did not ask")

    def release(self) -> None:
        """Give it to the page, and return when the page has had time to read it."""
        self.wait()
        assert self._held is not None
        route, answer = self._held
        with self._page.expect_response(lambda response: response.request == route.request):
            route.fulfill(response=answer)
        self._page.evaluate("() => fetch('/ping')")  # another answer has been read by then, after this one

    def _take(self, route: Route) -> None:
        if self._held is None:
            self._held = route, route.fetch()
        else:
            route.continue_()


def test_the_name_of_the_model_is_what_the_last_key_sees(browser: Browser) -> None:
    server = ServerProcess("--api-key", "a", "--admin-api-key", "root")
    login = {"username": "any", "password": "a"}
    try:
        with opened(browser, f"{server.url}/", http_credentials=login) as (page, _):
            expect(page.locator("#model")).to_contain_text("tokens")
            late = HeldAnswer(page, "**/v1/models")
            page.locator("#key").evaluate(TYPE % "wrong")
            late.wait()
            page.locator("#key").evaluate(TYPE % "root")
            expect(page.locator("#model")).to_contain_text("tokens")
            late.release()
            expect(page.locator("#model")).to_contain_text("tokens")
            expect(page.locator("#model")).not_to_contain_text("key")
    finally:
        server.stop()


def test_the_next_message_is_not_lost_when_the_answer_ends(browser: Browser, server: ServerProcess) -> None:
    with opened(browser, f"{server.url}/") as (page, complaints):
        page.get_by_label("Chat").check()
        page.locator("[name=max_tokens]").fill("8")
        late = HeldAnswer(page, "**/v1/chat/completions")
        page.get_by_label("Message").fill("reads a file")
        page.get_by_role("button", name="Send").click()
        late.wait()
        page.get_by_label("Message").fill("and the next")
        late.release()
        expect(page.locator("#status")).to_contain_text("Ended")
        expect(page.get_by_label("Message")).to_have_value("and the next")
        assert not complaints


def test_a_timeline_is_of_the_answer_that_is_shown(browser: Browser, server: ServerProcess) -> None:
    with opened(browser, f"{server.url}/") as (page, complaints):
        page.locator("[name=max_tokens]").fill("4")
        page.get_by_role("textbox", name="Prompt").fill("def area(")
        page.get_by_role("button", name="Generate").click()
        expect(page.locator("#status")).to_contain_text("Ended")
        late = HeldAnswer(page, "**/timeline?format=text")
        page.locator("#timeline summary").click()
        late.wait()
        first = (page.locator("#timeline-link").get_attribute("href") or "").split("/")[3]
        page.get_by_role("button", name="Generate").click()
        expect(page.locator("#timeline-link")).not_to_have_attribute(
            "href", f"/v1/requests/{first}/timeline?format=text"
        )
        expect(page.locator("#status")).to_contain_text("Ended")
        page.locator("#timeline summary").click()
        second = (page.locator("#timeline-link").get_attribute("href") or "").split("/")[3]
        expect(page.locator("#timeline-text")).to_contain_text(second)
        late.release()
        expect(page.locator("#timeline-text")).to_contain_text(second)
        expect(page.locator("#timeline-text")).not_to_contain_text(first)
        assert not complaints
