"""The playground in a real browser, against a real server: what a person does with it, and what they see."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from browsing import take_picture
from server_process import ServerProcess

PATIENCE_MS = 20_000
# a container has no sandbox of its own, and nothing may be fetched from elsewhere
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
PROMPT = "def fibonacci(n):\n"
KEY = "a-key-of-ours"


@pytest.fixture(scope="module")
def browser(find_program: Callable[[str, str], str]) -> Iterator[Browser]:
    chromium = find_program("chromium", "chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, headless=True, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def complaints() -> list[str]:
    """Messages of the browser's console; a test that provokes one removes it."""
    return []


@pytest.fixture
def page(browser: Browser, server: ServerProcess, complaints: list[str]) -> Iterator[Page]:
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = opened(context.new_page(), server.url, complaints)
    yield page
    context.close()
    assert not complaints


def opened(page: Page, url: str, complaints: list[str]) -> Page:
    def hear(message: ConsoleMessage) -> None:
        complaints.append(f"{message.type}: {message.text}")

    page.on("console", hear)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.set_default_timeout(PATIENCE_MS)
    page.goto(url)
    expect(page.locator("#model")).to_contain_text("tokens")
    return page


def fill(page: Page, **knobs: str) -> None:
    """Fill in the fields; greedy by default."""
    for name, value in {"temperature": "0", "max_tokens": "24", **knobs}.items():
        page.locator(f"[name={name}]").fill(value)


def ended(page: Page, how: str) -> None:
    expect(page.locator("#status")).to_have_text(how, timeout=PATIENCE_MS)


def number(page: Page, figure: str) -> float:
    found = re.match(r"[\d.]+", page.locator(figure).inner_text())
    assert found, f"{figure} is no number: {page.locator(figure).inner_text()!r}"
    return float(found[0])


def test_a_prompt_is_continued_and_timed(page: Page, server: ServerProcess) -> None:
    fill(page, stop="nothing that comes\\n", top_p="0.9", top_k="40", seed="7", temperature="0.8")
    page.get_by_role("textbox", name="Prompt").fill(PROMPT)
    page.get_by_role("button", name="Generate").click()
    ended(page, "Ended: length.")
    sent: Any = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0.8, "seed": 7, "top_p": 0.9, "top_k": 40}
    choice = server.post("/v1/completions", sent).json()["choices"][0]
    assert page.locator("#answer .made").text_content() == choice["text"]
    assert page.locator("#answer .given").text_content() == PROMPT
    assert number(page, "#num-output-tokens") == 24
    assert number(page, "#num-prompt-tokens") == len(server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"])
    # 24 tokens took TTFT + 23 TPOT, as it is written with three digits
    whole_ms = number(page, "#ttft") + 23 * number(page, "#tpot")
    assert 24_000 / number(page, "#rate") == pytest.approx(whole_ms, rel=0.05)


def test_text_comes_while_it_is_made_and_stops_when_it_is_told_to(page: Page, server: ServerProcess) -> None:
    fill(page, max_tokens="3000")
    page.locator("#text").fill(PROMPT)
    page.locator("#text").press("Control+Enter")
    made = page.locator("#answer[aria-busy=true] .made")
    expect(made).not_to_be_empty()
    early = len(made.text_content() or "")
    page.wait_for_function("length => document.querySelector('.made').textContent.length > length", arg=early)
    expect(page.locator("#send")).to_be_disabled()
    page.get_by_role("button", name="Stop").click()
    ended(page, "Stopped.")
    server.wait_until_idle()
    assert number(page, "#num-output-tokens") < 3000
    assert page.locator("#error").is_hidden()
    expect(page.locator("#send")).to_be_enabled()


def test_a_conversation_remembers(page: Page, server: ServerProcess) -> None:
    page.get_by_label("Chat").check()
    fill(page)
    messages: list[dict[str, str]] = []
    for number_of_turn, said in enumerate(("reads a file", "now sorts it")):
        messages.append({"role": "user", "content": said})
        page.get_by_label("Message").fill(said)
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#answer .made")).to_have_count(number_of_turn + 1)
        ended(page, "Ended: length.")
        body = {"messages": messages, "max_tokens": 24, "temperature": 0}
        content = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
        assert page.locator("#answer .made").last.text_content() == content
        messages.append({"role": "assistant", "content": content})
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator("#answer")).to_be_empty()


def test_what_was_refused_is_no_part_of_a_conversation(page: Page, complaints: list[str]) -> None:
    page.get_by_label("Chat").check()
    fill(page, temperature="-1")
    page.get_by_label("Message").fill("sorts a list")
    page.get_by_role("button", name="Send").click()
    ended(page, "Failed.")
    complaints.clear()
    expect(page.locator("#answer .role")).to_have_count(0)
    expect(page.get_by_label("Message")).to_have_value("sorts a list")


def test_a_refusal_is_told_in_words(page: Page, complaints: list[str]) -> None:
    fill(page, temperature="-1")
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_role("alert")).to_contain_text("temperature")
    ended(page, "Failed.")
    assert "400" in complaints.pop()  # the browser's own note
    fill(page, seed="9007199254740993")
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_role("alert")).to_contain_text("seed=9007199254740993")
    fill(page, seed="1")
    page.get_by_role("button", name="Generate").click()
    ended(page, "Ended: length.")
    expect(page.get_by_role("alert")).to_be_hidden()


def test_where_the_time_went(page: Page) -> None:
    fill(page)
    page.get_by_role("button", name="Generate").click()
    ended(page, "Ended: length.")
    page.locator("#timeline summary").click()
    expect(page.locator("#timeline-text")).to_contain_text("24 output tokens")
    expect(page.locator("#timeline-text")).to_contain_text("decode")


def test_programs_do_the_same(page: Page, server: ServerProcess) -> None:
    fill(page, temperature="0.8", top_k="40", seed="7", stop="\\n\n'")
    prompt = '# it\'s "quoted" \\ $HOME\n'
    page.locator("#text").fill(prompt)
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#status")).to_contain_text("Ended")
    shown = page.locator("#answer .made").text_content()

    page.get_by_role("button", name="Copy as curl").click()
    expect(page.locator("#copied")).to_have_text("Copied.")
    words = shlex.split(page.evaluate("navigator.clipboard.readText()"))
    assert "TWOSTROKE_API_KEY" not in " ".join(words), "this server has no keys"
    assert words[:3] == ["curl", "-N", f"{server.url}/v1/completions"]
    body = json.loads(words[-1])
    assert (body["prompt"], body["stop"], body["stream"]) == (prompt, ["\n", "'"], True)
    events = server.events("/v1/completions", body)
    assert "".join(event["choices"][0]["text"] for event in events) == shown

    page.get_by_role("button", name="Copy as openai-python").click()
    expect(page.locator("#code")).to_contain_text("OpenAI")
    program = page.evaluate("navigator.clipboard.readText()")
    assert "extra_body" in program
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.stdout == shown, ran.stderr


@pytest.mark.parametrize("mode", ["Prompt", "Chat"])
def test_tokens_show_how_likely_they_were(page: Page, server: ServerProcess, mode: str, pictures: Path | None) -> None:
    page.get_by_label(mode, exact=True).first.check()
    fill(page)
    page.get_by_label("Show probabilities").check()
    page.locator("#text").fill(PROMPT)
    page.locator("#send").click()
    ended(page, "Ended: length.")
    tokens = page.locator("#answer .made .token")
    if mode == "Prompt":
        sent: Any = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "logprobs": 5}
        choice = server.post("/v1/completions", sent).json()["choices"][0]
        text, expected = choice["text"], choice["logprobs"]["tokens"]
        logprob = choice["logprobs"]["token_logprobs"][1]
    else:
        sent = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24, "temperature": 0}
        choice = server.post("/v1/chat/completions", {**sent, "logprobs": True, "top_logprobs": 5}).json()["choices"][0]
        text, expected = choice["message"]["content"], [entry["token"] for entry in choice["logprobs"]["content"]]
        logprob = choice["logprobs"]["content"][1]["logprob"]
    assert page.locator("#answer .made").text_content() == text
    assert tokens.all_text_contents() == expected
    tokens.first.hover()
    expect(page.locator("#alternatives li")).to_have_count(5)
    page.locator("#answer").focus()
    for _ in range(2):  # the first token, the second
        page.keyboard.press("ArrowRight")
    expect(page.locator("#alternatives")).to_contain_text(f"log-probability {logprob:.3f}")
    if mode == "Prompt":
        take_picture(page, pictures, "page-playground")


# [contrasts of the words for probabilities with what they stand on, colours of the states of blocks]
LEGENDS = """() => {
  const pixel = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const over = (element) => {
    if (element.parentElement) over(element.parentElement);
    paint(getComputedStyle(element).backgroundColor);
  };
  const paint = (colour) => {
    pixel.fillStyle = colour;
    pixel.fillRect(0, 0, 1, 1);
    return [...pixel.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const luminance = (rgb) => {
    const linear = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    const [red, green, blue] = rgb.map((value) => linear(value / 255));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const contrasts = [...document.querySelectorAll("#chances .token")].map((token) => {
    over(token);
    const [ground, ink] = [paint("transparent"), paint(getComputedStyle(token).color)].map(luminance);
    return (Math.max(ground, ink) + 0.05) / (Math.min(ground, ink) + 0.05);
  });
  const marks = [...document.querySelectorAll("#blocks .mark")];
  const blocks = marks.map((mark) => paint(getComputedStyle(mark, "::before").backgroundColor));
  return [contrasts, blocks];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_legends_can_be_read(page: Page, scheme: Literal["light", "dark"]) -> None:
    page.emulate_media(color_scheme=scheme)
    contrasts, blocks = page.evaluate(LEGENDS)
    assert len(contrasts) == 5
    assert min(contrasts) >= 4.5, f"WCAG 2 AA: {contrasts}"
    assert len(blocks) == 8
    assert min(math.dist(a, b) for a, b in combinations(blocks, 2)) > 40, f"two states look the same: {blocks}"


@pytest.mark.parametrize("mode", ["Prompt", "Chat"])
def test_an_answer_fits_its_schema(page: Page, mode: str) -> None:
    page.get_by_label(mode, exact=True).first.check()
    fill(page, max_tokens="60")
    page.locator("#text").fill(PROMPT)
    page.get_by_label("Schema of the answer").fill('{"enum": [')
    page.locator("#send").click()
    expect(page.get_by_role("alert")).to_contain_text("The JSON schema is not valid JSON")
    page.get_by_label("Schema of the answer").fill("[1]")
    page.locator("#send").click()
    expect(page.get_by_role("alert")).to_contain_text("must be an object")
    page.get_by_label("Schema of the answer").fill('{"enum": ["two strokes", null, true]}')
    page.locator("#send").click()
    ended(page, "Ended: stop.")
    content = page.locator("#answer .made").text_content() or ""
    assert json.loads(content) in ["two strokes", None, True]

    page.get_by_role("button", name="Copy as openai-python").click()
    expect(page.locator("#copied")).to_have_text("Copied.")
    program = page.evaluate("navigator.clipboard.readText()")
    assert '"two strokes", None, True' in program
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert mode == "Chat" or ran.stdout == content, ran.stderr  # the chat has continued


def test_percentiles_are_interpolated_within_their_buckets(page: Page) -> None:
    # 10 up to 1 s, 10 up to 2 s, none up to 4 s, 5 above
    found = page.evaluate(
        """async () => {
          const { quantile, shareWithin } = await import("/page/histograms.js");
          const histogram = { bounds: [1, 2, 4], counts: [10, 10, 0, 5], count: 25 };
          const quantiles = [0.2, 0.6, 0.8, 0.99].map((share) => quantile(histogram, share));
          const shares = [0.5, 1, 1.5, 3, 9].map((limit) => shareWithin(histogram, limit));
          return [quantiles, shares, quantile({ bounds: [1], counts: [0, 0], count: 0 }, 0.5)];
        }"""
    )
    quantiles, shares, nothing = found
    assert quantiles == pytest.approx([0.5, 1.5, 2, math.inf])
    assert shares == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])
    assert nothing is None


def test_the_rate_is_told_while_text_comes(page: Page) -> None:
    fill(page, max_tokens="3000")
    page.locator("#text").fill(PROMPT)
    page.locator("#send").click()
    expect(page.locator("#answer[aria-busy=true]")).to_be_visible()
    expect(page.locator("#recent-rate")).to_have_text(re.compile(r"\d"))
    page.get_by_role("button", name="Show in the live view").click()
    expect(page.locator("#followed")).to_contain_text("cmpl-")
    expect(page.locator("#requests tr.followed")).to_have_count(1)
    page.get_by_role("link", name="Playground").click()
    page.get_by_role("button", name="Stop").click()
    ended(page, "Stopped.")


def test_a_server_with_keys_asks_for_one(browser: Browser, complaints: list[str]) -> None:
    server = ServerProcess("--api-key", KEY)
    try:
        refused = server.http.get("/")
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, 'Basic realm="twostroke"')
        # a challenge there would have the browser open its dialogue over the page
        assert server.http.get("/v1/models").headers["www-authenticate"].startswith("Bearer")
        context = browser.new_context(http_credentials={"username": "", "password": KEY})
        page = opened(context.new_page(), server.url, complaints)
        fill(page)
        page.get_by_role("button", name="Generate").click()
        ended(page, "Ended: length.")
        page.get_by_role("button", name="Copy as curl").click()  # the page has not seen the key: the browser has it
        expect(page.locator("#code")).to_contain_text('-H "Authorization: Bearer $TWOSTROKE_API_KEY"')
        page.get_by_label("Key", exact=True).fill("another")
        page.get_by_role("button", name="Generate").click()
        expect(page.get_by_role("alert")).to_contain_text("a valid API key is needed")
        assert any("401" in complaint for complaint in complaints)
        page.get_by_role("button", name="Copy as curl").click()
        expect(page.locator("#code")).to_contain_text("$TWOSTROKE_API_KEY")
        assert "another" not in page.locator("body").inner_text()
        context.close()
    finally:
        server.stop()
