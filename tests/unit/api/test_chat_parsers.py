"""Parsed outputs of each family, how early each part is delivered, and the count of reasoning tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chat_outputs import NOW, OUTPUTS, PARIS, TOOLS, Output
from oracle import naive_chat_parser as naive
from twostroke.api.parsers.chat_parser import make_parser
from twostroke.api.parsers.families import TOOL_CALL_FAMILIES
from twostroke.api.parsers.output import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolCall,
    ToolCallArguments,
    ToolCallBegin,
    join_deltas,
)
from twostroke.api.parsers.tool_choice import ChatTools, NamedTool, Tool
from twostroke.errors import InvalidParameter


def token_by_token(
    pieces: list[str], tool_call_parser: str | None, reasoning_parser: str | None = None
) -> list[list[Delta]]:
    """Return the deltas of each piece and of the end."""
    parser = make_parser(tool_call_parser, reasoning_parser, ChatTools(TOOLS))
    return [*(parser.push(piece, [piece]) for piece in pieces), parser.finish()]


@pytest.mark.parametrize("output", OUTPUTS, ids=str)
def test_message(output: Output) -> None:
    parser = make_parser(output.tool_call_parser, output.reasoning_parser, ChatTools(TOOLS), prompt=output.prompt)
    assert parser.parse(output.text) == output.message


@pytest.mark.parametrize("output", OUTPUTS, ids=str)
def test_oracle_agrees_with_what_was_written_by_hand(output: Output) -> None:
    is_opened = output.prompt.endswith(("<think>\n", "<|message|>"))
    inside = is_opened or (output.reasoning_parser == "deepseek_r1" and not output.prompt)
    assert (
        naive.parse(output.tool_call_parser, output.reasoning_parser, output.text, TOOLS, starts_in_reasoning=inside)
        == output.message
    )


def test_every_family_has_an_oracle_and_outputs() -> None:
    assert set(naive.PARSERS) == set(TOOL_CALL_FAMILIES) == {o.tool_call_parser for o in OUTPUTS if o.tool_call_parser}


def test_arguments_stream_as_they_are_written() -> None:
    pieces = ["<tool_call>", "\n", '{"name": "', 'now", "argu', 'ments": {"a', '": "b', 'c"}', "}\n</tool", "_call>"]
    assert token_by_token(pieces, "hermes") == [
        [],
        [],
        [],
        [],
        [ToolCallBegin(0, "now"), ToolCallArguments(0, '{"a')],
        [ToolCallArguments(0, '": "b')],
        [ToolCallArguments(0, 'c"}')],
        [],
        [],
        [],
    ]


def test_strings_between_tags_stream_and_numbers_wait() -> None:
    pieces = [
        "<function=get_weather>",
        "<parameter=city>",
        "\nPa",
        'r"is\n',
        "</parameter>",
        "<parameter=days>1",
        "2</parameter>",
    ]
    assert token_by_token(pieces, "qwen3_coder") == [
        [],
        [ToolCallBegin(0, "get_weather"), ToolCallArguments(0, '{"city": ')],
        [ToolCallArguments(0, '"Pa')],
        [ToolCallArguments(0, 'r\\"is')],
        [ToolCallArguments(0, '"')],
        [ToolCallArguments(0, ', "days": ')],
        [ToolCallArguments(0, "12")],
        [],
    ]


def test_content_is_kept_back_no_longer_than_it_may_be_markup() -> None:
    assert token_by_token(["a <", "b ", "<tool_", "x"], "hermes") == [
        [ContentDelta("a")],
        [ContentDelta(" <b")],
        [],
        [ContentDelta(" <tool_x")],
        [],
    ]


def test_without_tools_nothing_is_kept_back() -> None:
    parser = make_parser("hermes", None)
    assert parser.push("\n <tool_call>") == [ContentDelta("\n <tool_call>")]
    assert parser.markup == frozenset()


def test_reasoning_streams_and_newlines_beside_tags_go() -> None:
    assert token_by_token(["<thi", "nk>", "\n", "a\n", "b", "\n", "</think>", "\n\n", "c"], None, "qwen3") == [
        [],
        [],
        [],
        [ReasoningDelta("a")],
        [ReasoningDelta("\nb")],
        [],
        [],
        [],
        [ContentDelta("c")],
        [],
    ]


@pytest.mark.parametrize(
    ("reasoning_parser", "pushes", "num_tokens"),
    [
        ("qwen3", [("<think>", 1), ("\n", 1), ("a", 1), ("</think>", 1), ("\n\n", 1), ("b", 1)], 4),
        ("qwen3", [("  ", 1), ("a", 1), ("<think>b</think>", 1)], 0),
        ("qwen3", [("<think>", 1), ("", 2), ("b", 1)], 4),
        ("deepseek_r1", [("a", 1), ("", 3), ("</think>\n\n", 1), ("b", 5)], 5),
        ("deepseek_r1", [("a</think>" + "b" * 27, 8)], 1),
        ("mistral", [("[THI", 1), ("NK]a", 1), ("b", 1)], 3),
        (None, [("a</think>b", 8)], 0),
    ],
)
def test_reasoning_tokens(reasoning_parser: str | None, pushes: list[tuple[str, int]], num_tokens: int) -> None:
    parser = make_parser(None, reasoning_parser)
    for text, num in pushes:
        parser.push(text, [text, *[""] * (num - 1)])
    parser.finish()
    assert parser.num_reasoning_tokens == num_tokens


def test_reasoning_tokens_count_while_it_goes_on() -> None:
    parser = make_parser(None, "qwen3")
    parser.push("<thi", ["<thi"])
    assert parser.num_reasoning_tokens == 0
    parser.push("nk>a", ["nk>a"])
    assert parser.num_reasoning_tokens == 2


@pytest.mark.parametrize("output", [o for o in OUTPUTS if len(o.tool_calls) > 1], ids=str)
def test_one_call_at_most(output: Output) -> None:
    parser = make_parser(output.tool_call_parser, None, ChatTools(TOOLS, parallel=False))
    assert parser.parse(output.text).tool_calls == output.tool_calls[:1]


def test_required_and_named_calls_are_bare_json() -> None:
    text = '[{"name": "get_weather", "parameters": {"city": "Paris"}}, {"name": "now", "parameters": {}}]'
    assert make_parser("mistral", None, ChatTools(TOOLS, "required")).parse(text).tool_calls == (PARIS, NOW)
    parser = make_parser("mistral", None, ChatTools(TOOLS, NamedTool("get_weather")))
    assert parser.push(' {"city": "Pa') == [ToolCallBegin(0, "get_weather"), ToolCallArguments(0, '{"city": "Pa')]
    assert make_parser(None, None, ChatTools(TOOLS, NamedTool("now"))).parse("{}").tool_calls == (NOW,)


def test_a_thought_may_come_before_a_required_call() -> None:
    parser = make_parser(None, "qwen3", ChatTools(TOOLS, NamedTool("now")))
    message = parser.parse("<think>\n{}\n</think>\n\n{}")
    assert (message.reasoning, message.tool_calls) == ("{}", (NOW,))


def test_no_call_where_none_is_allowed() -> None:
    text = '<tool_call>{"name": "now"}</tool_call> '
    assert make_parser("hermes", None, ChatTools(TOOLS, "none")).parse(text).content == text


def test_markup_names_the_tokens_that_must_be_seen() -> None:
    assert make_parser("mistral", "mistral", ChatTools(TOOLS)).markup == {
        *("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]")
    }
    assert {"<|action_start|>", "<|plugin|>", "<|action_end|>"} < make_parser("internlm", None, ChatTools(TOOLS)).markup
    assert "<｜tool▁sep｜>" in make_parser("deepseek_v3", None, ChatTools(TOOLS)).markup  # noqa: RUF001


@pytest.mark.parametrize("parameter", ["tool_call_parser", "reasoning_parser"])
def test_unknown_name_lists_the_known(parameter: str) -> None:
    names = [None, "gpt"] if parameter == "reasoning_parser" else ["gpt", None]
    with pytest.raises(InvalidParameter, match=rf"{parameter}='gpt': must be one of deepseek_.*, qwen3"):
        make_parser(names[0], names[1])


def test_streamed_string_values_are_valid_json_however_they_are_cut() -> None:
    text = 'a"\\\n\t\x00\u2028é😀'
    for cut in range(len(text)):
        parser = make_parser("qwen3_coder", None, ChatTools(TOOLS))
        deltas = parser.push(f"<function=get_weather><parameter=city>{text[:cut]}")
        deltas += parser.push(f"{text[cut:]}</parameter></function>") + parser.finish()
        arguments = "".join(d.text for d in deltas if isinstance(d, ToolCallArguments))
        assert json.loads(arguments) == {"city": text}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, " 3\n", " 3\n"),
        ({"type": ["string", "null"]}, "None", None),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "3", "3"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "NULL", None),
        ({"type": "integer"}, " 3 ", 3),
        ({"type": "integer"}, "3.5", 3.5),
        ({"type": "integer"}, "0x10", 16),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
        ({"type": "boolean"}, "FALSE", False),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "number"}, "Infinity", "Infinity"),
        ({"type": "array"}, "['\\d', (1,)]", ["\\d", [1]]),
        ({"type": "array"}, "['\\ud800']", "['\\ud800']"),
        ({"type": "array"}, "[" * 3000, "[" * 3000),
        ({"type": "object"}, "{1: 2}", "{1: 2}"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"$ref": "#/$defs/x"}, "{}", {}),
        ({"type": 3, "anyOf": 4}, "x", "x"),
        (True, "[1]", [1]),
    ],
)
def test_plain_values_become_what_the_schema_says(schema: Any, text: str, value: object) -> None:
    tool = Tool("f", {"type": "object", "properties": {"a": schema}})
    parser = make_parser("qwen3_coder", None, ChatTools([tool]))
    (call,) = parser.parse(f"<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>").tool_calls
    assert json.loads(call.arguments) == {"a": value}


OBJECT = '{"a": "<parameter=b>\\n</function>", "n": [1, {"deep": null}]}'


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        (OBJECT, OBJECT),
        (f"\n{OBJECT}\n", OBJECT),
        ("{}", "{}"),
        (" { } ", "{ }"),
        ("", "{}"),
        ("\n", "{}"),
        ("\n<parameter=a>\n{\n</parameter>\n", '{"a": "{"}'),
        ("get_weather", None),
        ("{'a': 1}", None),
        ("[1]", None),
        ('"{}"', None),
        ("<arg>1</arg>", None),
        ("a<parameter=a>1</parameter>", None),
        ("{a}", None),
    ],
)
@pytest.mark.parametrize("around", ["<tool_call>\n{}\n</tool_call>", "{}"], ids=["wrapped", "bare"])
def test_an_object_between_the_tags_is_the_arguments_and_no_argument_is_lost(
    body: str, arguments: str | None, around: str
) -> None:
    """Text that is neither an object nor parameters is content, including its markup."""
    text = around.replace("{}", f"<function=get_weather>{body}</function>")
    whole = make_parser("qwen3_coder", None, ChatTools(TOOLS)).parse(text)
    for size in (1, 2, 3, 7):
        parser = make_parser("qwen3_coder", None, ChatTools(TOOLS))
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
        assert join_deltas(deltas) == whole
    if arguments is None:
        assert (whole.content, whole.tool_calls) == (text, ())
    else:
        assert (whole.content, whole.tool_calls) == ("", (ToolCall("get_weather", arguments),))


@pytest.mark.parametrize("cut", range(len("<function=get_weather>"), len("<function=get_weather>" + OBJECT)))
def test_an_object_that_is_cut_is_half_a_call(cut: int) -> None:
    text = f"<function=get_weather>{OBJECT}</function>"[:cut]
    parser = make_parser("qwen3_coder", None, ChatTools(TOOLS))
    said = parser.parse(text, is_cut=True)
    assert said.content == ""
    assert parser.has_incomplete_call or not said.tool_calls


def test_python_warnings_of_odd_escapes_stay_inside() -> None:
    call = make_parser("pythonic", None, ChatTools(TOOLS)).parse(r"[get_weather(city='\d')]").tool_calls
    assert call == (ToolCall("get_weather", r'{"city": "\\d"}'),)
