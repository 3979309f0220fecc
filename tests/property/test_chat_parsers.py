"""However a generation is cut into pieces, its deltas add up to what the naive parser finds in the whole."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from chat_outputs import OUTPUTS, TOOLS, Output
from oracle import naive_chat_parser as naive
from twostroke.api.parsers.chat_parser import REASONING_FAMILIES, make_parser
from twostroke.api.parsers.families import TOOL_CALL_FAMILIES
from twostroke.api.parsers.output import Delta, ParsedMessage, ToolCallArguments, ToolCallBegin, join_deltas
from twostroke.api.parsers.tool_choice import ChatTools, NamedTool, ToolChoice

REASONING_PARSERS = (None, *sorted(naive.REASONING_TAGS))


def streamed(
    pieces: list[str], tool_call_parser: str | None, reasoning_parser: str | None, tool_choice: ToolChoice, prompt: str
) -> ParsedMessage:
    parser = make_parser(tool_call_parser, reasoning_parser, ChatTools(TOOLS, tool_choice), prompt=prompt)
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    check_order(deltas)
    return join_deltas(deltas)


def check_order(deltas: list[Delta]) -> None:
    """Calls are numbered as they begin, arguments belong to the last one, and nothing is empty."""
    num_calls = 0
    for delta in deltas:
        if isinstance(delta, ToolCallBegin):
            assert delta.index == num_calls
            num_calls += 1
        else:
            assert delta.text
        if isinstance(delta, ToolCallArguments):
            assert delta.index == num_calls - 1


def expected(output: Output, text: str) -> ParsedMessage:
    family = REASONING_FAMILIES.get(output.reasoning_parser or "")
    inside = family is not None and family.is_open_after(output.prompt)
    return naive.parse(output.tool_call_parser, output.reasoning_parser, text, TOOLS, starts_in_reasoning=inside)


def pieces_of(data: st.DataObject, text: str) -> list[str]:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12).map(sorted), label="cuts")
    return [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("output", OUTPUTS, ids=str)
def test_every_cut_in_two_and_every_character_alone(output: Output) -> None:
    text = output.text
    for cut in range(len(text) + 1):
        pieces = [text[:cut], text[cut:]]
        assert (
            streamed(pieces, output.tool_call_parser, output.reasoning_parser, "auto", output.prompt) == output.message
        )
    assert (
        streamed(list(text), output.tool_call_parser, output.reasoning_parser, "auto", output.prompt) == output.message
    )


@pytest.mark.parametrize("output", OUTPUTS, ids=str)
def test_every_beginning(output: Output) -> None:
    """Cut off anywhere, as by max_tokens."""
    for end in range(len(output.text)):
        text = output.text[:end]
        found = streamed(list(text), output.tool_call_parser, output.reasoning_parser, "auto", output.prompt)
        assert found == expected(output, text)


@pytest.mark.parametrize("output", [o for o in OUTPUTS if o.tool_call_parser], ids=str)
def test_nothing_of_a_call_that_max_tokens_cut_is_content(output: Output) -> None:
    """At every place; streamed as whole. Content is a beginning of what it is in the whole text."""
    name = output.tool_call_parser
    assert name is not None
    family = TOOL_CALL_FAMILIES[name]
    opening = REASONING_FAMILIES[output.reasoning_parser].opens if output.reasoning_parser else ()
    for end in range(len(output.text) + 1):
        text = output.text[:end]
        whole, stream = (
            make_parser(name, output.reasoning_parser, ChatTools(TOOLS), prompt=output.prompt) for _ in range(2)
        )
        found = whole.parse(text, is_cut=True)
        deltas = [delta for char in text for delta in stream.push(char)] + stream.finish(is_cut=True)
        assert join_deltas(deltas) == found
        if name != "openai" or not text.rstrip().endswith("<|message|>"):  # a call without arguments, or what was cut
            assert found.tool_calls == expected(output, text).tool_calls
        content = found.content.rstrip()
        if content[-1:] in {marker[0] for marker in family.markers}:  # one character may as well be text
            content = content[:-1].rstrip()
        is_told = not family.bare or any(tool.name in text for tool in TOOLS)
        if is_told and not any(tag.startswith(text.lstrip()) for tag in opening):
            assert output.message.content.startswith(content)


@given(output=st.sampled_from(OUTPUTS), data=st.data())
def test_outputs_with_slips(output: Output, data: st.DataObject) -> None:
    """Something left out, doubled, put in, or from another output."""
    text = output.text
    for _ in range(data.draw(st.integers(1, 3), label="slips")):
        begin = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(begin, min(len(text), begin + 30)))
        other = data.draw(st.sampled_from([o for o in OUTPUTS if o.tool_call_parser == output.tool_call_parser])).text
        put = data.draw(
            st.sampled_from(["", text[begin:end] * 2, other, '"', "{", "}", "\\", "\n", ",", " ", "<", "1"])
        )
        text = text[:begin] + put + text[end:]
    assume("#" not in text)  # the naive parser of Python reads comments
    found = streamed(pieces_of(data, text), output.tool_call_parser, output.reasoning_parser, "auto", output.prompt)
    assert found == expected(output, text)


WORDS = {
    name: sorted({word for o in OUTPUTS if o.tool_call_parser == name for word in re.findall(r"[\w▁｜|]+|\W", o.text)})  # noqa: RUF001
    for name in TOOL_CALL_FAMILIES
}


@given(data=st.data(), name=st.sampled_from(sorted(TOOL_CALL_FAMILIES)), reasoning=st.sampled_from(REASONING_PARSERS))
def test_markup_and_words_in_any_order(data: st.DataObject, name: str, reasoning: str | None) -> None:
    markup = sorted(make_parser(name, reasoning, ChatTools(TOOLS)).markup)
    heads = [o.text[:n] for o in OUTPUTS if o.tool_call_parser == name for n in (20, 40, 60)]
    words = st.sampled_from(WORDS[name]) | st.sampled_from(
        [*markup, *heads, '{"name": "now", "arguments": ', "now(", "now"]
    )
    text = "".join(data.draw(st.lists(words, max_size=25), label="words"))
    assume("#" not in text)
    prompt = data.draw(st.sampled_from(["", "<think>\n", "[THINK]"]), label="prompt")
    inside = reasoning is not None and REASONING_FAMILIES[reasoning].is_open_after(prompt)
    found = streamed(pieces_of(data, text), name, reasoning, "auto", prompt)
    assert found == naive.parse(name, reasoning, text, TOOLS, starts_in_reasoning=inside)


@given(data=st.data(), name=st.sampled_from(sorted(TOOL_CALL_FAMILIES)), text=st.text(max_size=40))
@example(data=None, name="hermes", text=" \n")
def test_text_that_is_no_call_comes_out_as_it_is(data: st.DataObject | None, name: str, text: str) -> None:
    pieces = pieces_of(data, text) if data else list(text)
    assert streamed(pieces, name, None, "auto", "") == ParsedMessage("", text, ())


@given(data=st.data(), output=st.sampled_from([o for o in OUTPUTS if o.reasoning_parser]))
def test_reasoning_tokens_are_the_same_token_by_token_and_at_once(data: st.DataObject, output: Output) -> None:
    tokens = [piece for piece in pieces_of(data, output.text) if piece]
    streaming = make_parser(output.tool_call_parser, output.reasoning_parser, ChatTools(TOOLS), prompt=output.prompt)
    for token in tokens:
        streaming.push(token, [token])
    streaming.finish()
    whole = make_parser(output.tool_call_parser, output.reasoning_parser, ChatTools(TOOLS), prompt=output.prompt)
    whole.parse(output.text, tokens)
    assert whole.num_reasoning_tokens == streaming.num_reasoning_tokens
    assert (whole.num_reasoning_tokens > 0) == bool(output.reasoning or output.name == "nothing thought")


@given(data=st.data(), tool_choice=st.sampled_from(["required", NamedTool("get_weather")]))
def test_calls_that_are_bare_json(data: st.DataObject, tool_choice: ToolChoice) -> None:
    bits = [
        '[{"name": "now", "parameters": {',
        '{"city": "',
        "Paris",
        '"}',
        "}, ",
        "}]",
        '{"name": "get_weather"',
        " ",
        "x",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(bits), max_size=8), label="bits"))
    found = streamed(pieces_of(data, text), "hermes", None, tool_choice, "")
    expected = naive.parse("hermes", None, text, TOOLS, tool_choice=tool_choice)
    assert found == replace(expected, content="")  # what is no call is the grammar of one that was cut
