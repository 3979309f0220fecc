"""The live view in a real browser, on a real server under load: what it shows is what the server says elsewhere."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from browsing import PATIENCE_MS, chromium, drawn, opened, take_picture
from server_process import ServerProcess, viewing

PROMPT = "def area(width, height):\n    return width * height\n"
TYPE = "(field, text) => { field.value = text; field.dispatchEvent(new Event('change')); }"
SAID = """() => new Promise((resolve) => {
  const said = [];
  const hear = new MutationObserver((records) => said.push(...records.map(({ target }) => target.outerHTML)));
  for (const region of document.querySelectorAll("#live :is([role=status], [role=alert], [aria-live])"))
    hear.observe(region, { childList: true, characterData: true, subtree: true });
  const heard = { attributeFilter: ["aria-label", "aria-valuenow", "aria-valuetext"] };
  for (const slider of document.querySelectorAll("#live [role=slider]")) hear.observe(slider, heard);
  setTimeout(() => resolve(said), 1000);
})"""
IS_IN_SIGHT = """() => {
  const [button, table] = ["tbody tr button", ".scrolled"].map((selector) =>
    document.querySelector(`#requests ${selector}`).getBoundingClientRect());
  return button.width > 0 && button.left >= table.left && button.right <= table.right;
}"""
HAS_MODEL = "() => document.querySelector('#live-model').textContent !== ''"


@pytest.fixture(scope="module")
def browser(find_program: Callable[[str, str], str]) -> Iterator[Browser]:
    with chromium(find_program("chromium", "chromium")) as browser:
        yield browser


@pytest.fixture(scope="module")
def small() -> Iterator[ServerProcess]:
    """Two slots, so that requests wait."""
    server = ServerProcess("--max-num-seqs", "2", "--ttft-slo", "200ms", num_kv_blocks=300)
    yield server
    server.stop()


@contextmanager
def load(server: ServerProcess, num_clients: int, max_tokens: int = 60) -> Iterator[None]:
    """Run clients that send requests again and again."""
    over = threading.Event()

    def ask(number: int) -> None:
        body = {"prompt": PROMPT * (1 + number % 4), "max_tokens": max_tokens, "seed": number}
        with httpx.Client(timeout=60) as client:  # with a new client for each request, none would have to wait
            while not over.is_set():
                client.post(f"{server.url}/v1/completions", json=body)

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(num_clients)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        over.set()
        for client in clients:
            client.join()
    server.wait_until_idle()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds no event"),
        ('{"v":3,"event":"StepScheduled"}\n', "log.jsonl, line 1: event log version 3"),
        ("not JSON\n", "log.jsonl, line 1: no event"),
        ('{"a":1}\n', "no 'v' in it"),
    ],
)
def test_a_file_that_is_no_log_is_refused_in_a_sentence(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    command = [sys.executable, "-m", "twostroke", "view", str(path), "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode != 0
    assert told in ended.stderr
    assert "Traceback" not in ended.stderr


def figures_of(answer: httpx.Response) -> dict[str, float]:
    return answer.json()["engines"]["engine"]["figures"]


def number_of(page: Page, selector: str) -> float:
    found = re.search(r"[\d.,]+", page.locator(selector).inner_text())
    assert found, page.locator(selector).inner_text()
    return float(found[0].replace(",", ""))


def test_every_view_shows_a_server_under_load(browser: Browser, small: ServerProcess, pictures: Path | None) -> None:
    with opened(browser, f"{small.url}/#live") as (page, complaints), load(small, 5):
        page.wait_for_function("() => document.querySelector('#tile-waiting').textContent > '0'")
        expect(page.locator("#tile-running")).to_have_text("2")
        expect(page.locator("#requests tbody tr.waiting").first).to_contain_text("2 of 2 running")
        expect(page.locator("#requests tbody tr.waiting").last).to_contain_text("behind the head of the queue")
        assert number_of(page, "#tile-decode") > 0
        # a page that announces every step is never quiet; on a busy machine it may announce a silent server
        quiet = any(page.evaluate(SAID) == [] for _ in range(5))
        assert quiet, "a screen reader announces what the user did not choose"
        page.locator("#requests tbody tr.running button.link").first.click()
        expect(page.locator("#followed table")).to_contain_text("prefill")
        page.locator("#blocks canvas").focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator("#block-told")).to_contain_text("Block 0:")
        expect(page.get_by_role("slider", name="KV blocks")).to_have_attribute("aria-valuetext", re.compile("Block 0:"))
        page.locator("#steps canvas").focus()
        page.keyboard.press("ArrowLeft")
        expect(page.locator("#step-told")).to_contain_text("Step ")
        expect(page.get_by_role("slider", name="Steps")).to_have_attribute("aria-valuetext", re.compile(r"Step \d+:"))
        expect(page.locator("#told-ttft")).to_contain_text("within 200 ms")
        page.locator("#limit-itl").fill("1000")
        expect(page.locator("#told-itl")).to_contain_text("100 % within")
        page.locator("#request-filter").fill("no such request")
        expect(page.locator("#requests tbody tr")).to_have_count(0)
        page.locator("#request-filter").fill("")
        take_picture(page, pictures, "page-live")
        page.emulate_media(color_scheme="dark")
        page.set_viewport_size({"width": 390, "height": 844})
        page.wait_for_timeout(300)
        page.locator("#requests .scrolled").evaluate("table => table.scrollLeft = table.scrollWidth")
        assert page.evaluate(IS_IN_SIGHT), "a phone would have to scroll sideways for the button that shows a request"
        page.locator("#requests .scrolled").evaluate("table => table.scrollLeft = 0")
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= 390, "a phone would have to scroll sideways"
        take_picture(page, pictures, "page-live-phone")
        assert not complaints


def test_the_focus_stays_in_its_row_while_the_table_changes(browser: Browser, small: ServerProcess) -> None:
    with opened(browser, f"{small.url}/#live") as (page, complaints), load(small, 5):
        row = page.locator("#requests tr.waiting button").first
        name = row.evaluate("button => (button.focus(), button.title)")
        # it went up when it ran and down when it ended
        expect(page.locator(f'#requests tr:has([title="{name}"])')).to_have_class("ended")
        assert page.evaluate("document.activeElement.title") == name
        page.wait_for_function("() => document.activeElement.closest('tr').matches('.ended + .ended')")
        assert page.evaluate("document.activeElement.title") == name
        assert not complaints


def test_a_frozen_picture_stands_still_and_goes_on(browser: Browser, small: ServerProcess) -> None:
    with opened(browser, f"{small.url}/#live") as (page, complaints), load(small, 3):
        page.wait_for_function("() => document.querySelector('#tile-decode').textContent > '0'")
        page.get_by_role("button", name="Freeze").click()
        page.wait_for_timeout(300)
        frozen = page.locator("#step-told").inner_text()
        page.wait_for_timeout(600)
        assert page.locator("#step-told").inner_text() == frozen
        page.get_by_role("link", name="Playground").click()
        page.get_by_role("link", name="Live").click()
        page.wait_for_timeout(600)
        assert page.locator("#step-told").inner_text() == frozen
        page.get_by_role("button", name="Resume").click()
        expect(page.locator("#step-told")).not_to_have_text(frozen)
        assert not complaints


def test_a_request_that_the_table_has_forgotten_is_told_of_and_its_timeline_shown(
    browser: Browser, small: ServerProcess
) -> None:
    with opened(browser, small.url) as (page, complaints):
        page.locator("[name=max_tokens]").fill("3")
        page.get_by_role("button", name="Generate").click()
        expect(page.locator("#status")).to_contain_text("Ended")
        for _ in range(70):
            small.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
        page.get_by_role("button", name="Show in the live view").click()
        expect(page.locator("#live [role=status]").first).to_contain_text("is not in the table")
        expect(page.locator("#followed table")).to_contain_text("prefill")
        expect(page.locator("#lanes .told")).to_contain_text(re.compile(r"24 of \d+ requests are drawn"))
        assert not complaints


def test_what_it_shows_is_what_metrics_and_timelines_say(browser: Browser, small: ServerProcess) -> None:
    with opened(browser, f"{small.url}/#live") as (page, complaints):
        with load(small, 3):
            page.wait_for_function("() => document.querySelector('#tile-decode').textContent > '0'")
        expect(page.locator("#tile-running")).to_have_text("0")
        metrics = small.http.get("/metrics").text
        for kind, family in (
            ("ttft", "time_to_first_token_seconds"),
            ("itl", "inter_token_latency_seconds"),
            ("tpot", "request_time_per_output_token_seconds"),
        ):
            count = re.search(rf"^twostroke:{family}_count{{.*}} (\S+)$", metrics, re.M)
            assert count
            expect(page.locator(f"#told-{kind}")).to_contain_text(f"{int(float(count[1])):,} values")
        figures = figures_of(small.http.get("/live/state"))
        for name, family in (("generation_tokens", "generation_tokens_total"), ("num_steps", "engine_steps_total")):
            value = re.search(rf"^twostroke:{family}{{.*}} (\S+)$", metrics, re.M)
            assert value
            assert figures[name] == float(value[1])
        row = page.locator("#requests tbody tr").first
        sequence = row.locator("button").first.get_attribute("title")
        assert sequence is not None
        timeline = small.http.get(f"/v1/requests/{sequence.partition('#')[0]}/timeline").json()["lanes"][0]
        cells = row.locator("td").all_inner_texts()
        assert float(cells[7].split()[0]) == pytest.approx(timeline["ttft_ms"], rel=0.01)
        assert cells[6].startswith(f"{timeline['num_output_tokens']} of")
        assert not complaints


@contextmanager
def long_request(server: ServerProcess) -> Iterator[list[httpx.Response]]:
    """Send a request that runs until it is aborted; its answer is then in the list."""
    answers: list[httpx.Response] = []

    def ask() -> None:
        body = {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True}
        answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60))

    client = threading.Thread(target=ask)
    client.start()
    yield answers
    client.join()


def test_a_request_is_ended_from_its_detail_when_that_is_confirmed(browser: Browser, small: ServerProcess) -> None:
    with opened(browser, f"{small.url}/#live") as (page, complaints), long_request(small) as answers:
        detail = page.locator("#followed")
        abort = detail.get_by_role("button", name="Abort", exact=True)
        expect(abort).to_be_hidden()
        page.locator("#requests tbody tr:not(.ended) button").first.click()
        abort.click()
        expect(detail).to_contain_text("Its client gets an error.")
        detail.get_by_role("button", name="No, continue").click()
        expect(abort).to_be_focused()
        abort.click()
        page.keyboard.press("Escape")
        expect(abort).to_be_visible()
        assert not answers, "the abort was not confirmed"
        abort.click()
        detail.get_by_role("button", name="Yes, abort it").dblclick()  # aborts once
        expect(detail).to_contain_text("was aborted.")
        expect(abort).to_be_hidden()
        small.wait_until_idle()
        assert not complaints
    assert answers[0].status_code >= 500
    assert "aborted" in answers[0].json()["error"]["message"]
    assert small.post("/v1/requests/nobody/abort", {}).status_code == 404


def test_a_tap_anywhere_on_a_row_shows_the_request_and_ends_nothing(browser: Browser, small: ServerProcess) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
    with opened(browser, f"{small.url}/#live", **phone) as (page, complaints), long_request(small) as answers:
        row = page.locator("#requests tbody tr:not(.ended)").first
        expect(row).to_be_visible()
        assert row.get_by_role("button").count() == 1, "the one that shows it"
        box = row.bounding_box()
        assert box is not None
        for share in (0.02, 0.1, 0.2, 0.3):  # what of the row is on the screen of a phone
            row.tap(position={"x": share * box["width"], "y": box["height"] / 2}, force=True)
        expect(page.locator("#requests tr.followed")).to_have_count(1)
        assert not answers
        page.locator("#followed").get_by_role("button", name="Abort", exact=True).tap()
        page.locator("#followed").get_by_role("button", name="Yes, abort it").tap()
        expect(page.locator("#followed")).to_contain_text("was aborted.")
        small.wait_until_idle()
        assert not complaints
    assert answers[0].status_code >= 500


def test_a_server_that_stops_is_told_in_words_and_one_that_is_back_is_seen(browser: Browser) -> None:
    first = ServerProcess()
    port = int(first.url.rpartition(":")[2])
    with opened(browser, f"{first.url}/#live") as (page, complaints):
        page.wait_for_function(HAS_MODEL)
        first.stop()
        expect(page.locator("#live .trouble")).to_contain_text("cannot be reached")
        complaints.clear()  # a browser notes each address that does not answer
        again = ServerProcess("--served-model-name", "another", port=port)
        expect(page.locator("#live .trouble")).to_be_hidden(timeout=PATIENCE_MS)
        complaints.clear()
        again.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 5})
        expect(page.locator("#requests tbody tr")).to_have_count(1)
        expect(page.locator("#model")).to_contain_text("another,")
        page.get_by_role("link", name="Playground").click()
        page.get_by_role("button", name="Copy as curl").click()
        expect(page.locator("#code")).to_contain_text('"model":"another"')
        assert not complaints
        again.stop()


def test_a_server_that_is_silent_is_told_apart_from_one_that_has_nothing_to_say(browser: Browser) -> None:
    server = ServerProcess()
    with opened(browser, f"{server.url}/#live") as (page, complaints):
        page.wait_for_function(HAS_MODEL)
        server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1})
        came = page.locator("#requests tbody td:nth-child(3)")
        expect(came).to_contain_text("s ago")
        page.get_by_role("button", name="Freeze").click()
        page.wait_for_timeout(300)
        frozen = came.inner_text()
        page.wait_for_timeout(5_000)
        assert came.inner_text() == frozen
        page.get_by_role("button", name="Resume").click()
        page.wait_for_timeout(5_700)  # nothing happens, and the server is well
        assert float(came.inner_text().split()[0]) > 10, "time stands still where nothing happens"
        expect(page.locator("#live .trouble")).to_be_hidden()
        server.process.send_signal(signal.SIGSTOP)
        expect(page.locator("#live .trouble")).to_contain_text("The server sends nothing", timeout=PATIENCE_MS)
        page.wait_for_timeout(300)
        broken = came.inner_text()
        page.wait_for_timeout(600)
        assert came.inner_text() == broken
        server.process.send_signal(signal.SIGCONT)
        expect(page.locator("#live .trouble")).to_be_hidden()
        assert not complaints
    assert server.http.get("/live/state", params={"step": 3}).status_code == 400
    server.stop()


def test_keys_are_asked_for_and_tenants_see_no_names_of_others(browser: Browser) -> None:
    server = ServerProcess("--api-key", "ann:a1", "--api-key", "bob:b1", "--admin-api-key", "root")
    try:
        for key in ("a1", "b1"):
            server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 5}, authorization=f"Bearer {key}")
        assert server.http.get("/live/state").status_code == 401
        login = {"username": "any", "password": "a1"}
        with opened(browser, f"{server.url}/#live", http_credentials=login) as (page, complaints):
            expect(page.locator("#requests tbody tr")).to_have_count(2)
            assert page.locator("#requests tbody").inner_text().count("another tenant's") == 1
            page.locator("#key").evaluate(
                "field => { field.value = 'wrong'; field.dispatchEvent(new Event('change')) }"
            )
            expect(page.locator("#live .trouble")).to_contain_text("401")
            complaints.clear()
            page.locator("#key").evaluate(TYPE, "ключ")
            expect(page.locator("#live .trouble")).to_contain_text("characters that a header cannot carry")
            page.locator("#key").evaluate(TYPE, "root")
            expect(page.locator("#live .trouble")).to_be_hidden()
            expect(page.locator("#requests tbody")).not_to_contain_text("another tenant's")
    finally:
        server.stop()


def test_a_viewer_does_not_hold_the_server_up(browser: Browser) -> None:
    server = ServerProcess()
    with opened(browser, f"{server.url}/#live") as (page, _):
        page.wait_for_function(HAS_MODEL)
        begin_s = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - begin_s < 5, "it waited for a viewer"


def test_a_recording_gives_the_same_picture_twice(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    server = ServerProcess("--event-log", str(path), "--max-num-seqs", "2")
    try:
        with load(server, 4, max_tokens=20):
            server.wait_for("work", "/live/state", lambda answer: figures_of(answer)["num_steps"] > 50)
        figures = figures_of(server.http.get("/live/state"))
    finally:
        server.stop()
    with viewing(path) as url:
        pictures: list[str] = []
        for _ in range(2):
            with opened(browser, f"{url}/#live", viewport={"width": 900, "height": 700}) as (page, complaints):
                expect(page.locator(".player")).to_contain_text("run.jsonl")
                if not pictures:  # the first requests fail: the page says so, and tries again
                    page.route("**/live/state", lambda route: route.abort(), times=2)
                    page.reload()
                    expect(page.locator("#live .trouble").first).to_contain_text("Trying again")
                    expect(page.locator(".player")).to_contain_text("run.jsonl")
                    expect(page.locator("#live .trouble").first).to_be_hidden()
                    complaints.clear()
                expect(page.get_by_role("link", name="Playground")).to_be_hidden()
                page.locator("#player-step").fill("30")
                expect(page.locator(".player")).to_contain_text("Step 30, ")
                page.locator("#player-on").click()
                expect(page.locator(".player")).to_contain_text("Step 31, ")
                expect(page.locator("#step-told")).to_contain_text("Step 31:")
                page.evaluate("() => new Promise((drawn) => requestAnimationFrame(drawn))")
                pictures.append(drawn(page, "#live"))
                page.locator("#requests tbody button.link").first.click()
                expect(page.locator("#followed table")).to_contain_text("prefill")
                page.locator("#player-play").click()
                page.wait_for_function("() => Number(document.querySelector('#player-step').value) > 40")
                page.locator("#player-play").click()
                assert not complaints
        assert pictures[0] == pictures[1]
        last = figures_of(httpx.get(f"{url}/live/state"))
        assert last["generation_tokens"] == figures["generation_tokens"]
        assert httpx.head(f"{url}/live/state").status_code == 200
        refused = httpx.get(f"{url}/live/state?step=-1")
        assert (refused.status_code, "must be from 0" in refused.json()["error"]["message"]) == (400, True)
