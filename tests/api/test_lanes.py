"""The lanes of the live view in a browser: how many are drawn, and what is told of a piece."""

from __future__ import annotations

import re
from collections.abc import Callable

from playwright.sync_api import expect

from browsing import chromium, opened
from server_process import ServerProcess

NUM_REQUESTS = 26
MAX_LANES = 24


def test_lanes_say_how_many_there_are_and_tell_their_pieces(
    server: ServerProcess, find_program: Callable[[str, str], str]
) -> None:
    with (
        chromium(find_program("chromium", "chromium")) as browser,
        opened(browser, f"{server.url}/#live") as (page, complaints),
    ):
        line = page.locator("#lanes .told")
        expect(line).to_contain_text(re.compile(r"No requests in this period|requests are drawn"))
        many = {"prompt": ["def f():"] * NUM_REQUESTS, "max_tokens": 2}
        assert server.post("/v1/completions", many).status_code == 200
        expect(line).to_contain_text(re.compile(rf"{MAX_LANES} of \d+ requests are drawn"))
        page.locator("#lanes canvas").focus()
        page.keyboard.press("ArrowDown")
        expect(line).to_have_text(re.compile(r".+: (queued|prefill|decode), [\d.]+ ms: .+\."))
        expect(page.get_by_role("slider", name="last seconds")).to_have_attribute(
            "aria-valuetext", re.compile(r".+: .+ms: ")
        )
        page.keyboard.press("Escape")
        expect(line).to_contain_text("requests are drawn")
        assert not complaints
