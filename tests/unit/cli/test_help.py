"""`--help` of each command fits two screens; `--help-all` has every flag."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import pytest
from cyclopts import App
from rich.console import Console

from twostroke.cli.commands import app
from twostroke.cli.help_pages import COMMANDS, LINES, PAGES
from twostroke.cli.main import has_early_engine
from twostroke.cli.other_programs import run_command_line
from twostroke.cli.short_help import HELP_ALL, help_of

MOST_LINES = 60
IN_BENCH = [name for name in PAGES if name.startswith("bench ")]


def command_named(words: str) -> App:
    """Return a command by its words."""
    found = app
    for word in words.split():
        found = found[word]
    return found


@cache
def flags_of(words: str) -> frozenset[str]:
    """Return the flags and the words of a command that help shows."""
    arguments = command_named(words).assemble_argument_collection(parse_docstring=False)
    return frozenset(argument.name for argument in arguments if argument.show and argument.parse)


def shown(words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int) -> str:
    """Return what a command prints in a terminal of a width."""
    monkeypatch.setattr(app, "console", Console(width=width))
    with pytest.raises(SystemExit) as ended:
        run_command_line(app, words, "twostroke")
    assert ended.value.code in (None, 0)
    return capsys.readouterr().out


def test_every_command_has_a_page() -> None:
    def commands(parent: App, chain: tuple[str, ...]) -> Iterator[str]:
        for name in parent:
            if not name.startswith("-") and parent[name].show:
                one = parent[name]
                yield from [" ".join((*chain, name))] if one.default_command else commands(one, (*chain, name))

    assert set(commands(app, ())) == set(PAGES)
    assert set(COMMANDS) == {name.split()[0] for name in PAGES}


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("words", [*PAGES, "bench", ""])
def test_help_fits_two_screens(
    words: str, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = shown([*words.split(), "--help"], capsys, monkeypatch, width)
    assert page.startswith("Usage: twostroke")
    assert HELP_ALL in page
    assert len(page.splitlines()) <= MOST_LINES
    assert max(map(len, page.splitlines())) <= width
    for name in [*COMMANDS] if not words else [name.split()[1] for name in IN_BENCH] if words == "bench" else []:
        assert re.search(rf"^│ {name} +[A-Z]", page, re.MULTILINE), name


@pytest.mark.parametrize("words", PAGES)
def test_short_help_shows_flags_that_exist_and_examples(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = PAGES[words]
    flags = page.flags.split()
    assert sorted(set(flags) - flags_of(words)) == []
    assert len(flags) == len(set(flags))
    assert set(page.lines or {}) <= set(flags), "a line is of a flag that is shown"
    text = shown([*words.split(), "--help"], capsys, monkeypatch, 200)
    for flag in flags:
        assert re.search(rf"{flag}[ \n]", text), flag
    for example, what in page.examples:
        assert f"{example}  # {what}" in text
        assert len(f"{example}  # {what}") <= 80
        assert example.split("| ")[-1].startswith(f"twostroke {words}")


@pytest.mark.parametrize("words", PAGES)
def test_help_all_shows_every_flag_with_its_choices(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shown([*words.split(), HELP_ALL], capsys, monkeypatch, 200)
    missing = {flag for flag in flags_of(words) if not re.search(rf"(^|[ │]){re.escape(flag)}\b", text)}
    assert missing == set()
    if "--dtype" in flags_of(words):
        assert "[choices: auto, float32, float16, bfloat16] [default: auto]" in " ".join(text.replace("│", " ").split())


def test_every_line_is_of_a_flag_that_a_page_shows() -> None:
    assert set(LINES) <= {flag for page in PAGES.values() for flag in page.flags.split()}


def test_a_prompt_is_no_request_for_help() -> None:
    words = ["generate", "--", HELP_ALL]
    with help_of(words) as known:
        assert known == words
    with help_of(["generate", HELP_ALL, "--", HELP_ALL]) as known:
        assert known == ["generate", "--help", "--", HELP_ALL]
    assert not has_early_engine(["serve", HELP_ALL])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["serve", "--prot", "3"], "Unknown option: --prot. Did you mean --port? --help-all lists every flag."),
        (["quantize", "a", "b"], "--quantization is required by quantize: 'int8' or 'int4'. --help shows how."),
        (["generate", "x", "--max-tokens"], "--max-tokens needs a value. --help shows how."),
        (["view"], "EVENT_LOG is required by view. --help shows how."),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_a_command_that_lacks_something_says_what_and_where_to_look(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command_line(app, words, "twostroke")
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"twostroke: {told}")
