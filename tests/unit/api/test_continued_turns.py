"""A turn that is continued: what it says already decides whether the model goes on thinking or answering."""

from __future__ import annotations

from typing import Any

import pytest

from twostroke.api.parsers.chat_parser import REASONING_FAMILIES, make_parser


def after(family: str, prompt: str, said: str, text: str) -> tuple[str, str]:
    parsed = make_parser(None, family, prompt=prompt + said, said=said).parse(text)
    return parsed.reasoning, parsed.content


CONTINUED: dict[str, tuple[str, str, str, str, tuple[str, str]]] = {
    "an answer": ("deepseek_r1", "<assistant>", "The answer is", " 42.", ("", " 42.")),
    "an answer behind closed reasoning": ("qwen3", "<think>\n\n</think>\n\n", "The answer is", " 42.", ("", " 42.")),
    "reasoning, just opened": ("qwen3", "<assistant>", "<think>\n", "Hm.</think>42", ("Hm.", "42")),
    "reasoning": ("qwen3", "<assistant>", "<think>\nFirst,", " 6*7.</think>42", (" 6*7.", "42")),
    "reasoning of a model that always thinks": (
        "deepseek_r1",
        "",
        "<think>\nFirst,",
        " 6*7.</think>42",
        (" 6*7.", "42"),
    ),
    "reasoning that the prompt opened": ("qwen3", "<assistant><think>\n", "First,", " so.</think>42", (" so.", "42")),
    "an answer with its reasoning": ("deepseek_r1", "", "<think>Hm.</think>The", " end", ("", " end")),
    "an answer about tags": ("deepseek_r1", "", "Close it by </think>, as", " I did", ("", " I did")),
    "nothing": ("deepseek_r1", "<assistant>", "", "Hm.</think>42", ("Hm.", "42")),
    "space": ("qwen3", "<assistant><think>\n", " \n", "Hm.</think>42", ("Hm.", "42")),
    "other tags": ("seed_oss", "<assistant>", "<seed:think>So", " on</seed:think>42", (" on", "42")),
    "words": ("granite", "", "Here is my thought process: a", " b Here is my response: c", (" b ", " c")),
    "brackets": ("mistral", "[/INST]", "[THINK]a", "b[/THINK]c", ("b", "c")),
}


@pytest.mark.parametrize("name", CONTINUED)
def test_what_a_turn_says_already_decides(name: str) -> None:
    family, prompt, said, text, expected = CONTINUED[name]
    assert after(family, prompt, said, text) == expected


@pytest.mark.parametrize("family", REASONING_FAMILIES)
def test_a_template_may_trim_what_is_continued(family: str) -> None:
    opens, closes = REASONING_FAMILIES[family].opens[0], REASONING_FAMILIES[family].closes[0]
    parser = make_parser(None, family, prompt=f"<assistant>{opens}\nso", said=f"  {opens}\nso  ")
    parsed = parser.parse(f" on{closes}42")
    assert (parsed.reasoning, parsed.content) == (" on", "42")
    answered: Any = make_parser(None, family, prompt="<assistant>Well, so", said="Well, so \n").parse(" on")
    assert (answered.reasoning, answered.content) == ("", " on")
