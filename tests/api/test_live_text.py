"""Texts of prompts: nowhere unless the server was told to keep them, and then for whose they are, at a click."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
    """The id of an answer."""
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


def test_a_server_that_was_not_told_to_keeps_none(server: ServerProcess) -> None:
    request_id = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1}).json()["id"]
    refused = server.http.get(f"/v1/requests/{request_id}/prompt")
    assert refused.status_code == 404
    assert "start it with --live-text" in refused.json()["error"]["message"]


def test_the_page_shows_it_at_a_click_and_not_before(
    keeping: ServerProcess, find_program: Callable[[str, str], str]
) -> None:
    asked(keeping, prompt=PROMPT)
    login = {"username": "any", "password": "a1"}
    with (
        chromium(find_program("chromium", "chromium")) as browser,
        opened(browser, f"{keeping.url}/#live", http_credentials=login) as (page, complaints),
    ):
        page.locator("#requests tbody tr button.link").first.click()
        expect(page.locator("#followed table")).to_contain_text("prefill")
        expect(page.locator("body")).not_to_contain_text("secret_of_ann")
        page.get_by_role("button", name="Show its prompt").click()
        expect(page.locator("#followed pre.prompt")).to_have_text(PROMPT)  # as text, whatever markup it has
        page.get_by_role("button", name="Follow nobody").click()
        expect(page.locator("body")).not_to_contain_text("secret_of_ann")
        assert not complaints
