"""The lab of a real server: experiments beside it, for its administrator alone, and in a browser."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import APIResponse, Page, Route, expect

from browsing import chromium, opened, take_picture
from metrics_page import check_documented
from server_process import ServerProcess

SMALL: dict[str, Any] = {
    "a": {"batching": "static"},
    "b": {"max_num_seqs": 4},
    "workload": {"num_requests": 6, "prompt_words": 10, "min_output": 5, "max_output": 20},
}
LONG: dict[str, Any] = {**SMALL, "workload": {"num_requests": 60, "min_output": 1000, "max_output": 1000}}


@pytest.fixture(scope="module")
def lab() -> Iterator[ServerProcess]:
    server = ServerProcess("--lab")
    yield server
    server.stop()


def test_its_metrics_are_on_the_page(lab: ServerProcess) -> None:
    check_documented(lab.http.get("/metrics").text)


def ended(server: ServerProcess) -> dict[str, Any]:
    """Return the final status of the experiment."""
    return server.wait_for("done", "/lab/experiment", lambda answer: answer.json()["state"] != "running").json()


def children(server: ServerProcess) -> list[str]:
    command = ["ps", "--ppid", str(server.process.pid), "-o", "pid="]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()


def test_without_the_flag_there_is_none(server: ServerProcess) -> None:
    for answer in (server.http.get("/lab"), server.post("/lab/experiment", {}), server.http.delete("/lab/experiment")):
        assert answer.status_code == 404
        assert "--lab" in answer.json()["error"]["message"]
    assert b'<a href="#lab" hidden>' in server.http.get("/").content


def test_two_settings_give_the_same_tokens_beside_a_server_that_serves(lab: ServerProcess) -> None:
    before = children(lab)
    assert lab.post("/lab/experiment", SMALL).json()["state"] == "running"
    busy = lab.post("/lab/experiment", SMALL)
    assert busy.status_code == 409
    assert "an experiment is running" in busy.json()["error"]["message"]
    assert lab.post("/v1/completions", {"prompt": "def f():", "max_tokens": 5}).status_code == 200
    done = ended(lab)
    assert done["state"] == "done", done
    assert done["verdict"]["tokens"] == "Tokens: equal for all 6 requests, in all 8 runs."
    assert done["verdict"]["apart"]["num_preemptions"] == 0
    for side in ("a", "b"):
        speed = done["results"][side]["figures"]["output_tokens_per_s"]
        assert 0 < speed["low"] <= speed["median"] <= speed["high"]
        assert len(done["results"][side]["lanes"]) == 6
    assert children(lab) == before


def test_an_experiment_is_stopped_with_its_processes(lab: ServerProcess) -> None:
    before = children(lab)
    lab.post("/lab/experiment", LONG)
    lab.wait_for("running", "/lab/experiment", lambda answer: "Run 1 of" in answer.json()["doing"])
    assert len(children(lab)) > len(before)

    def stop(delay_s: float) -> httpx.Response:
        time.sleep(delay_s)
        return httpx.delete(f"{lab.url}/lab/experiment", timeout=60)

    with ThreadPoolExecutor(2) as pool:  # a double click
        stops = [pool.submit(stop, delay_s) for delay_s in (0, 0.03)]
    assert stops[0].result().json() == {"stopped": True}
    assert stops[1].result().status_code == 200
    assert lab.http.get("/lab/experiment").json()["state"] == "stopped"
    assert children(lab) == before
    assert lab.http.delete("/lab/experiment").json() == {"stopped": False}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "JSON object"),
        (b"[]", "JSON object"),
        (b'{"a":' + b"[" * 50_000, "JSON object"),
        (b'{"story": "x"}', "must be one of"),
        (b'{"a": {"batching": "dynamic"}}', "batching"),
    ],
    ids=["empty", "list", "deep", "no such story", "no such value"],
)
def test_nonsense_is_refused_in_words(lab: ServerProcess, body: bytes, told: str) -> None:
    answer = lab.http.post("/lab/experiment", content=body)
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]


def test_settings_that_do_not_fit_fail_in_words(lab: ServerProcess) -> None:
    lab.post("/lab/experiment", {**SMALL, "a": {"kv_cache_memory": 100_000}})
    failed = ended(lab)
    assert failed["state"] == "failed"
    assert "KV memory" in failed["problem"]


def test_it_is_the_administrators() -> None:
    server = ServerProcess("--lab", "--api-key", "k", "--admin-api-key", "root")
    try:
        assert server.http.get("/lab", headers={"authorization": "Bearer k"}).status_code == 401
        assert server.post("/lab/experiment", SMALL, authorization="Bearer k").status_code == 401
        assert server.http.get("/lab", headers={"authorization": "Bearer root"}).status_code == 200
    finally:
        server.stop()


def test_a_server_that_ends_ends_its_experiment() -> None:
    server = ServerProcess("--lab")
    server.post("/lab/experiment", LONG)
    server.wait_for("running", "/lab/experiment", lambda answer: "Run 1 of" in answer.json()["doing"])
    pids = children(server)
    begin_s = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - begin_s < 15, "it waited for the experiment"
    for pid in pids:
        assert subprocess.run(["ps", "-p", pid], capture_output=True, check=False).returncode != 0


def test_a_story_is_told_at_a_click(
    lab: ServerProcess, find_program: Callable[[str, str], str], pictures: Path | None
) -> None:
    with (
        chromium(find_program("chromium", "chromium")) as browser,
        opened(browser, f"{lab.url}/#lab") as (page, complaints),
    ):
        expect(page.locator(".card")).to_have_count(6)
        page.get_by_role("button", name="Run: Speculative decoding").dblclick()  # starts one experiment only
        expect(page.locator(".verdict .tokens")).to_contain_text("equal for all 5 requests, in all 8", timeout=120_000)
        told = httpx.get(f"{lab.url}/lab/experiment").json()
        figures = told["results"]["b"]["figures"]
        expect(page.locator(".verdict .effect").first).to_contain_text("Tokens a second: ")
        per_pass = f"{figures['tokens_per_pass']['median']:.2f} tokens"
        effects = re.compile(f"{re.escape(per_pass)}|the difference may be chance")  # on a busy machine
        expect(page.locator(".verdict .effect").first).to_contain_text(effects)
        expect(page.locator(".verdict .price")).to_contain_text("Cost. Of the draft tokens")
        table = page.locator("#experiment table")
        expect(table).to_contain_text("TTFT p50")
        for name, row in (("output_tokens_per_s", "tokens per second"), ("duration_s", "total time, s")):
            is_told = (
                table.locator("tr").filter(has=page.get_by_role("rowheader", name=row, exact=True)).locator(".better")
            )
            expect(is_told).to_have_count(abs(told["verdict"]["apart"][name]))
        expect(page.locator("#experiment")).to_contain_text("A side with drafts has no ITL")
        take_picture(page, pictures, "page-lab")
        lanes_tell_reasons(page)
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        names_and_figures = "rows => rows.map((row) => row.children[1].offsetTop - row.children[0].offsetTop)"
        page.locator("#experiment .scrolled").evaluate("part => { part.scrollTop = part.scrollHeight; }")
        assert set(table.locator("tbody tr").evaluate_all(names_and_figures)) == {0}, (
            "names are not beside their figures"
        )
        figure = table.locator("td").first.bounding_box()
        assert figure is not None
        assert figure["x"] + figure["width"] < 390, "names leave no room for figures"
        assert not complaints


def test_a_late_answer_does_not_hide_an_experiment_that_was_started(
    lab: ServerProcess, find_program: Callable[[str, str], str]
) -> None:
    """The page asks for the last experiment when it opens; a click may come before that answer."""
    lab.post("/lab/experiment", {**SMALL, "a": {"kv_cache_memory": 100_000}})
    assert ended(lab)["state"] == "failed"
    with (
        chromium(find_program("chromium", "chromium")) as browser,
        opened(browser, f"{lab.url}/#live") as (page, complaints),
    ):
        held: list[tuple[Route, APIResponse]] = []

        def hold_the_first(route: Route) -> None:
            if route.request.method != "GET" or held:
                route.continue_()
            else:
                held.append((route, route.fetch()))

        page.route("**/lab/experiment", hold_the_first)
        page.get_by_role("link", name="Lab").click()
        button = page.get_by_role("button", name="Run: Speculative decoding")
        expect(button).to_be_enabled()
        while not held:
            page.wait_for_timeout(10)
        with page.expect_response(lambda answer: answer.request.method == "POST"):
            button.click()
        route, answer = held[0]
        route.fulfill(response=answer)
        expect(page.locator("#experiment")).to_contain_text("Run 1 of 8", timeout=60_000)
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("#experiment")).to_contain_text("Stopped.")
        assert not complaints


def lanes_tell_reasons(page: Page) -> None:
    """Check that lanes show their reasons, by arrow keys and by pointer."""
    side = page.locator(".side[data-side=a]")
    line = side.locator(".told")
    expect(line).to_contain_text("All 5 requests are drawn")
    side.locator("canvas").focus()
    for key, told in (("ArrowDown", "request-0: "), ("ArrowDown", "request-1: "), ("ArrowRight", "request-1: ")):
        page.keyboard.press(key)
        expect(line).to_contain_text(told)
    expect(line).to_have_text(re.compile(r"request-1: waited for .+, [\d.]+ ms, starting at [\d.]+ ms: \w.*"))
    side.locator("canvas").hover(position={"x": 3, "y": 45})
    expect(line).to_contain_text("request-4: ")
    page.keyboard.press("Escape")
    expect(line).to_contain_text("All 5 requests are drawn")


def test_a_form_says_what_is_wrong_and_an_outage_ends(
    lab: ServerProcess, find_program: Callable[[str, str], str]
) -> None:
    with (
        chromium(find_program("chromium", "chromium")) as browser,
        opened(browser, f"{lab.url}/#lab") as (page, complaints),
    ):
        workload = page.locator("fieldset[data-side=workload]")
        run_both, refused = page.get_by_role("button", name="Run both"), page.locator("#lab form .trouble")
        for name, typed, told in (("num_requests", "9000", "num_requests"), ("rate", "1e", "rate of “Workload”")):
            workload.locator(f"[name={name}]").fill("")
            workload.locator(f"[name={name}]").press_sequentially(typed)
            run_both.click()
            expect(refused).to_contain_text(told)
            workload.locator(f"[name={name}]").fill("2")
        workload.locator("[name=rate]").fill(".5")
        workload.locator("[name=num_requests]").fill("05")
        workload.locator("[name=max_output]").fill("30")
        run_both.click()
        expect(refused).to_be_hidden()
        expect(page.locator("#experiment")).to_contain_text("Run 1 of 8", timeout=60_000)
        assert lab.http.get("/lab/experiment").json()["experiment"]["workload"]["rate"] == 0.5
        page.context.set_offline(True)
        trouble = page.locator("#lab > .trouble")
        expect(trouble).to_contain_text("trying again")
        assert lab.http.delete("/lab/experiment").json() == {"stopped": True}
        page.context.set_offline(False)
        expect(trouble).to_be_hidden()
        expect(page.locator("#experiment")).to_contain_text("Stopped.")
        lab.post("/lab/experiment", LONG)  # by another client; the page shows it, and can stop it
        page.get_by_role("link", name="Live").click()
        page.get_by_role("link", name="Lab").click()
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("#experiment")).to_contain_text("Stopped.")
        assert not [said for said in complaints if "400" not in said and "ERR_INTERNET_DISCONNECTED" not in said]
