"""With a forced format a model may call a tool instead: it writes the format, or a call that the parser finds."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

import text_fakes
from chat_outputs import TOOLS
from grammar_walks import allowed, backend, eos_id, num_columns, text_of, walk
from twostroke.api.parsers.chat_parser import make_parser
from twostroke.api.parsers.families import TOOL_CALL_FAMILIES, optional_call_syntax
from twostroke.api.parsers.tool_choice import ChatTools
from twostroke.grammar.backend import GrammarMatcher
from twostroke.sampling_params import StructuredOutputs

NAMES = [tool.name for tool in TOOLS]
FORM = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
TOKENIZER = text_fakes.tokenizer("byte_level")
COLUMNS, EOS = num_columns("byte_level"), eos_id("byte_level")


def matcher_of(family: str) -> GrammarMatcher:
    grammars = backend("byte_level")
    calls = optional_call_syntax(TOOL_CALL_FAMILIES[family], NAMES)
    return grammars.matcher(grammars.compile(StructuredOutputs(json=FORM), calls))


def takes(matcher: GrammarMatcher, text: str) -> bool:
    """Return whether a text may be written, and may end there."""
    trial = matcher.copy()
    for token_id in TOKENIZER.encode(text, add_special_tokens=False):
        if token_id not in allowed(trial, COLUMNS):
            return False
        trial.accept(token_id)
    return EOS in allowed(trial, COLUMNS) or trial.is_accepting


@pytest.mark.parametrize("family", TOOL_CALL_FAMILIES)
def test_what_may_be_written_is_the_form_or_a_call(family: str) -> None:
    matcher, found_calls = matcher_of(family), 0
    for seed in range(30):
        token_ids, has_ended = walk(matcher.copy(), COLUMNS, [EOS], random.Random(seed), max_tokens=300)
        text = text_of(TOKENIZER, token_ids)
        parsed = make_parser(family, None, ChatTools(TOOLS), calls_come_first=True).parse(text)
        found_calls += bool(parsed.tool_calls)
        if not has_ended:
            continue
        if parsed.tool_calls:
            assert parsed.tool_calls[0].name in NAMES
        else:
            assert isinstance(json.loads(parsed.content)["ok"], bool), text
    assert found_calls


WRITTEN = {
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```"  # noqa: RUF001
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",  # noqa: RUF001
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"  # noqa: RUF001
    "<｜tool▁calls▁end｜>",  # noqa: RUF001
    "glm45": "<tool_call>now\n</tool_call>",
    "glm47": "<tool_call>now</tool_call>",
    "granite": '<|tool_call|>[{"name": "now", "arguments": {}}]',
    "hermes": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "internlm": '<|action_start|><|plugin|>\n{"name": "now", "parameters": {}}\n<|action_end|>',
    "jamba": '<tool_calls>[\n  {"name": "now", "arguments": {}}\n]</tool_calls>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "llama3_json": '{"name": "now", "parameters": {}}',
    "llama4_pythonic": "<|python_start|>[now()]<|python_end|>",
    "mistral": '[TOOL_CALLS][{"name": "now", "arguments": {}}]',
    "openai": "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>",
    "phi4_mini_json": 'functools[{"name": "now", "arguments": {}}]',
    "pythonic": "[now()]",
    "qwen3_coder": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "qwen3_xml": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("family", WRITTEN)
def test_calls_as_models_write_them(family: str) -> None:
    matcher, text = matcher_of(family), WRITTEN[family]
    assert takes(matcher, text)
    assert takes(matcher, '{"ok": true}')
    parsed = make_parser(family, None, ChatTools(TOOLS), calls_come_first=True).parse(text)
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("now", "{}")]
    assert parsed.content == ""
    assert not takes(matcher, text.replace("now", "later"))
    assert not takes(matcher, "Well. " + text)
    marker = next(iter(TOOL_CALL_FAMILIES[family].markers), "[")
    assert not takes(matcher, marker)
    assert not takes(matcher, marker + "words")


@pytest.mark.parametrize(
    "text",
    [
        '[TOOL_CALLS]now[ARGS]{"a": 1}',
        "[TOOL_CALLS]now{}",
        '[TOOL_CALLS]now[CALL_ID]abcdef123[ARGS]{"a": 1}',
        '[TOOL_CALLS] [ { "name" : "now" , "arguments" : { "a": 1 } } ]',
    ],
)
def test_mistrals_ways(text: str) -> None:
    assert takes(matcher_of("mistral"), text)
    assert len(make_parser("mistral", None, ChatTools(TOOLS)).parse(text).tool_calls) == 1


@pytest.mark.parametrize(
    "text",
    [
        '[get_weather(city="Paris", days=-3, fresh=True)]',
        "[get_weather(city='Pa\\'r\\n', options={'a': [None, 1.5, \"x\"]}), now( )]",
    ],
)
def test_pythons_ways(text: str) -> None:
    assert takes(matcher_of("pythonic"), text)
    parsed = make_parser("pythonic", None, ChatTools(TOOLS), calls_come_first=True).parse(text)
    assert parsed.tool_calls[0].name == "get_weather"


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder", "granite", "kimi_k2", "deepseek_v31"])
def test_the_beginning_of_a_call_that_was_cut_is_no_content(family: str) -> None:
    text = WRITTEN[family]
    for end in range(1, len(text)):
        parser = make_parser(family, None, ChatTools(TOOLS), calls_come_first=True)
        assert parser.parse(text[:end]).content == "", text[:end]


def test_json_may_hold_what_looks_like_a_call() -> None:
    text = '{"html": "<tool_call>\\n<function=now>\\n</function>\\n</tool_call>", "b": "<function=now></function>"}'
    parsed = make_parser("qwen3_coder", None, ChatTools(TOOLS), calls_come_first=True).parse(text)
    assert (parsed.content, parsed.tool_calls) == (text, ())


def test_markers_may_be_special_tokens() -> None:
    special = "<|im_start|>"
    family = dataclasses.replace(TOOL_CALL_FAMILIES["hermes"], markers=(special,))
    grammars = backend("byte_level")
    matcher = grammars.matcher(grammars.compile(StructuredOutputs(json=FORM), optional_call_syntax(family, NAMES)))
    marker = TOKENIZER.token_id(special)
    assert marker in TOKENIZER.special_token_ids
    assert marker in allowed(matcher, COLUMNS)
    matcher.accept(marker)
    for token_id in TOKENIZER.encode('{"name": "now", "arguments":', add_special_tokens=False):
        assert EOS not in allowed(matcher, COLUMNS)
        matcher.accept(token_id)
    for token_id in TOKENIZER.encode(" {}}", add_special_tokens=False):
        matcher.accept(token_id)
    assert EOS in allowed(matcher, COLUMNS)


def test_names_that_no_parser_finds_cannot_be_called() -> None:
    grammars = backend("byte_level")
    calls = optional_call_syntax(TOOL_CALL_FAMILIES["hermes"], ["get weather", "now"])
    matcher = grammars.matcher(grammars.compile(StructuredOutputs(json=FORM), calls))
    assert takes(matcher, WRITTEN["hermes"])
    assert not takes(matcher, WRITTEN["hermes"].replace("now", "get weather"))
    none = optional_call_syntax(TOOL_CALL_FAMILIES["hermes"], ["get weather"])
    assert takes(grammars.matcher(grammars.compile(StructuredOutputs(json=FORM), none)), '{"ok": false}')
