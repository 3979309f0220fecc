"""The live view of two pools in a real browser: who is in them, what goes between them, and a death."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import expect

from browsing import PATIENCE_MS, chromium, opened, take_picture
from server_process import ServerProcess, viewing

PROMPT = "def area(width, height):\n    return width * height\n" * 12


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[ServerProcess]:
    log = str(tmp_path / "run.jsonl")
    server = ServerProcess("--prefill", "1", "--decode", "1", "--event-log", log, num_kv_blocks=400)
    yield server
    server.stop()


def test_both_pools_and_their_link_are_shown_and_a_death_is(
    pools: ServerProcess, find_program: Callable[[str, str], str], pictures: Path | None, tmp_path: Path
) -> None:
    with (
        chromium(find_program("chromium", "chromium")) as browser,
        opened(browser, f"{pools.url}/#live", color_scheme="dark") as (page, complaints),
    ):
        with ThreadPoolExecutor(8) as clients:  # who decodes is busy, so that prompts are computed elsewhere
            bodies = [{"prompt": f"# {seed}\n{PROMPT}", "max_tokens": 100, "seed": seed} for seed in range(24)]
            list(clients.map(lambda body: pools.post("/v1/completions", body), bodies))
        workers = page.locator("#processes table").first.locator("tbody tr")
        expect(workers).to_have_count(2)
        expect(workers.filter(has_text="prefill-0")).to_have_count(1)
        decodes = workers.filter(has_text="decode-0")
        expect(decodes).to_contain_text("running")
        link = page.locator("#processes table").nth(1).locator("tbody tr")
        expect(link).to_have_count(1)
        expect(link.locator("td").nth(1)).not_to_have_text("0")
        page.get_by_label("decode-0").check()
        expect(page.locator("#step-told")).to_contain_text("decode")
        page.get_by_label("prefill-0").check()
        expect(page.locator("#step-told")).to_contain_text("prefill chunk")
        take_picture(page, pictures, "page-pools")
        expect(decodes.locator("td").nth(4)).to_have_text("0")
        os.kill(pid_of(pools, "decode"), signal.SIGKILL)
        expect(decodes.locator("td").nth(4)).to_have_text("1", timeout=PATIENCE_MS)
        expect(decodes).to_contain_text("running", timeout=PATIENCE_MS)
        assert pools.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 5}).status_code == 200
        assert not complaints
        pools.stop()
        with viewing(*tmp_path.glob("*.jsonl")) as url, opened(browser, f"{url}/#live") as (recorded, more_complaints):
            workers = recorded.locator("#processes table").first.locator("tbody tr")
            expect(workers).to_have_count(2)
            expect(workers.filter(has_text="decode-0.2").locator("td").nth(4)).to_have_text("1")
            expect(recorded.locator("#processes table").nth(1).locator("tbody tr")).to_have_count(1)
            assert not more_complaints


def pid_of(server: ServerProcess, role: str) -> int:
    (worker,) = [one for one in httpx.get(f"{server.url}/pools").json()["workers"] if one["role"] == role]
    return worker["pid"]
