"""Texts of prompts: nowhere unless the server was told to keep them, and then for whose they are, at a click."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from urllib.parse import quote

import httpx
import pytest
from playwright.sync_api import expect

from browsing import chromium, opened
from server_process import ServerProcess

PROMPT = "def secret_of_ann(): # <b>ünd</b>\n    return"


@pytest.fixture(scope="module")
def keeping() -> Iterator[ServerProcess]:
    server = ServerProcess("--live-text", "--api-key", "ann:a1", "--api-key", "bob:b1", "--admin-api-key", "root")
    yield server
    server.stop()


def asked(server: ServerProcess, key: str = "a1", **body: object) -> str:
    """Return the id of an answer."""
    answer = server.post("/v1/completions", {"max_tokens": 2, **body}, authorization=f"Bearer {key}")
    assert answer.status_code == 200
    return answer.json()["id"]


def prompt_of(server: ServerProcess, request_id: str, key: str) -> httpx.Response:
    return server.http.get(f"/v1/requests/{request_id}/prompt", headers={"authorization": f"Bearer {key}"})


def test_a_prompt_is_shown_to_its_tenant_and_to_the_administrator_alone(keeping: ServerProcess) -> None:
    request_id = asked(keeping, prompt=PROMPT)
    for key in ("a1", "root"):
        assert prompt_of(keeping, request_id, key).json() == {"request_id": request_id, "prompt": PROMPT}
    refused = prompt_of(keeping, request_id, "b1")
    assert refused.status_code == 404
    unknown = prompt_of(keeping, "cmpl-nobody", "b1")
    assert refused.text.replace(request_id, "X") == unknown.text.replace("cmpl-nobody", "X"), (
        "not even that it is there"
    )
    assert prompt_of(keeping, request_id, "wrong").status_code == 401


def test_each_of_several_prompts_has_its_own_name_and_ids_stay_ids(keeping: ServerProcess) -> None:
    request_id = asked(keeping, prompt=[[5, 6, 7], [8, 9]])
    assert prompt_of(keeping, f"{request_id}-1", "a1").json()["prompt_token_ids"] == [8, 9]


def test_of_requests_by_one_name_each_tenant_sees_its_last_and_any_by_its_number(keeping: ServerProcess) -> None:
    for key, prompt in (("a1", "first"), ("b1", "of bob"), ("a1", "second"), ("b1", "last of bob")):
        request_id = asked(keeping, key, prompt=prompt, request_id="again\nand/again")
    name = quote(request_id, safe="")  # a line break and a slash, as its caller would have it
    assert prompt_of(keeping, name, "a1").json()["prompt"] == "second"
    assert prompt_of(keeping, name, "b1").json()["prompt"] == "last of bob"
    rows = keeping.http.get("/live/state", headers={"authorization": "Bearer a1"}).json()
    at = rows["fields"]["request"].index("id")
    ids = [row[at] for row in rows["engines"]["engine"]["requests"]]
    numbers = sorted(
        int(found[1]) for found in (re.fullmatch(r"cmpl-again\nand/again#(\d+)\.0", i) for i in ids) if found
    )
    told = [prompt_of(keeping, f"{name}%23{number}", "a1") for number in numbers]
    assert [answer.json()["prompt"] for answer in told] == ["first", "second"]
    timeline = keeping.http.get(f"/v1/requests/{name}/timeline", headers={"authorization": "Bearer a1"})
    assert timeline.status_code == 200


def test_a_server_that_was_not_told_to_keeps_none(server: ServerProcess) -> None:
    request_id = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1}).json()["id"]
    refused = server.http.get(f"/v1/requests/{request_id}/prompt")
    assert refused.status_code == 404
    assert "start it with --live-text" in refused.json()["error"]["message"]


def test_the_page_shows_it_at_a_click_and_not_before(
    keeping: ServerProcess, find_program: Callable[[str, str], str]
) -> None:
    for prompt in (PROMPT, "another"):
        asked(keeping, prompt=prompt, request_id="same")
    login = {"username": "any", "password": "a1"}
    with (
        chromium(find_program("chromium", "chromium")) as browser,
        opened(browser, f"{keeping.url}/#live", http_credentials=login) as (page, complaints),
    ):
        page.locator("#requests tbody tr", has_text="cmpl-same#").nth(1).locator("button.link").click()  # the first
        expect(page.locator("#followed table")).to_contain_text("prefill")
        expect(page.locator("body")).not_to_contain_text("secret_of_ann")
        page.get_by_role("button", name="Show prompt").click()
        expect(page.locator("#followed pre.prompt")).to_have_text(PROMPT)  # as text, whatever markup it has
        page.get_by_role("button", name="Clear selection").click()
        expect(page.locator("body")).not_to_contain_text("secret_of_ann")
        assert not complaints
