"""Channels of gpt-oss: what streams when, what is counted, and what goes back into the next turn's prompt."""

from __future__ import annotations

from typing import Any

import pytest

import text_fakes
from chat_output import NOW, TOOLS
from harmony_template import TEMPLATE
from twostroke.api.dialect import Dialect
from twostroke.api.parsers.chat_parser import AnswerStops, make_parser
from twostroke.api.parsers.output import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallBegin
from twostroke.api.parsers.tool_choice import ChatTools, NamedTool
from twostroke.client.chat_inputs import ChatInputs
from twostroke.client.input_processor import AnswerForm, InputProcessor
from twostroke.errors import InvalidParameter
from twostroke.tokenizer.chat_template import ChatTemplate

PARSERS = ("openai", "openai_gptoss")
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


def test_every_channel_streams_as_it_is_written() -> None:
    parser = make_parser(*PARSERS, ChatTools(TOOLS))
    pieces = ["<|channel|>", "analysis", "<|message|>", "H", "m.", "<|end|>", "<|start|>", "assistant", "<|channel|>"]
    pieces += ["commentary to=functions.now ", "<|constrain|>", "json", "<|message|>", '{"a', '": 1', "}", "<|call|>"]
    pieces += ["<|start|>assistant<|channel|>final<|message|>", "Yes", "."]
    found = [parser.push(piece) for piece in pieces] + [parser.finish()]
    assert [deltas for deltas in found if deltas] == [
        [ReasoningDelta("H")],
        [ReasoningDelta("m.")],
        [ToolCallBegin(0, "now"), ToolCallArguments(0, '{"a')],
        [ToolCallArguments(0, '": 1')],
        [ToolCallArguments(0, "}")],
        [ContentDelta("Yes")],
        [ContentDelta(".")],
    ]


def test_tokens_of_every_thought_count_wherever_it_stands() -> None:
    tokens = ["<|channel|>", "analysis", "<|message|>", "Hm", ".", "<|end|>", "<|start|>", "assistant", "<|channel|>"]
    tokens += ["commentary", "<|message|>", "Wait", "<|end|>", "<|start|>", "assistant", "<|channel|>", "analysis"]
    tokens += ["<|message|>", "So", "<|end|>", "<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "Yes"]
    parser = make_parser(*PARSERS, ChatTools(TOOLS))
    for token in tokens:
        parser.push(token, [token])
    parser.finish()
    whole = make_parser(*PARSERS, ChatTools(TOOLS))
    assert whole.parse("".join(tokens), tokens).content == "Wait\nYes"
    assert whole.num_reasoning_tokens == parser.num_reasoning_tokens == 6 + 7


@pytest.mark.parametrize("cut", range(len(THOUGHT), len(THOUGHT) + 70))
def test_nothing_of_a_header_that_max_tokens_cut_is_told(cut: int) -> None:
    text = f"{THOUGHT}<|channel|>commentary to=functions.now <|constrain|>json<|message|>{{"[:cut]
    message = make_parser(*PARSERS, ChatTools(TOOLS)).parse(text, is_cut=True)
    assert (message.reasoning, message.content.removesuffix("<"), message.tool_calls) == ("Hm.", "", ())


@pytest.mark.parametrize(
    ("choice", "text"), [("required", '[{"name": "now", "parameters": {}}]'), (NamedTool("now"), "{}")]
)
def test_calls_that_are_required_are_bare_json(choice: Any, text: str) -> None:
    assert make_parser(*PARSERS, ChatTools(TOOLS, choice), prompt=None).parse(text).tool_calls == (NOW,)


def test_stop_strings_are_looked_for_in_the_answer_alone() -> None:
    stops = AnswerStops(["Hm", "json"], lambda hear: make_parser(*PARSERS, ChatTools(TOOLS), hear_content=hear))
    text = THOUGHT + "<|channel|>commentary to=functions.now json<|message|>{}<|call|><|start|>assistant"
    text += "<|channel|>final<|message|>Yes. Hm?"
    pushed, match = "", None
    while match is None:
        _, match = stops.push(text[len(pushed)])
        pushed += text[len(pushed)]
    assert match.stop == "Hm"
    assert pushed == text.removesuffix("?")


@pytest.mark.parametrize(
    ("calls", "reasoning", "told"),
    [
        ("openai", None, "needs the reasoning parser openai_gptoss"),
        ("openai", "qwen3", "Add --reasoning-parser openai_gptoss"),
        ("hermes", "openai_gptoss", "Use --tool-call-parser openai"),
    ],
)
def test_parsers_of_different_formats_are_refused(calls: str, reasoning: str | None, told: str) -> None:
    with pytest.raises(InvalidParameter, match=told):
        Dialect(calls, reasoning)


def test_what_ends_a_turn() -> None:
    assert Dialect(*PARSERS).turn_ends == Dialect(None, "openai_gptoss").turn_ends == ("<|return|>", "<|call|>")
    assert Dialect("hermes", "qwen3").turn_ends == ()


def test_tokens_that_end_a_turn_end_the_text() -> None:
    tokenizer = text_fakes.tokenizer("byte_level")
    inputs = InputProcessor(tokenizer, max_model_len=64, vocab_size=600, eos_token_ids=(1,), chat_template=TEMPLATE)
    chat = ChatInputs([{"role": "user", "content": "a?"}])
    ends = ("<|im_start|>", "no token", "a")  # the last is no special token
    assert inputs.process_chat(chat, answer=AnswerForm(end_tokens=ends)).eos_token_ids == {
        1,
        tokenizer.token_id("<|im_start|>"),
    }
    assert inputs.process_chat(chat).eos_token_ids == {1}


CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}]
ASKED = {"role": "user", "content": "a?"}
CALLED = {"role": "assistant", "reasoning_content": "Hm.", "content": None, "tool_calls": CALLS}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "b"}
ANSWERED = {"role": "assistant", "reasoning_content": "So.", "content": "c"}


def test_reasoning_goes_back_beside_a_call_and_not_once_there_is_an_answer() -> None:
    template = ChatTemplate({"default": TEMPLATE}, {})
    text = template.render([ASKED, CALLED, RESULT])
    assert "<|channel|>analysis<|message|>Hm.<|end|>" in text
    assert '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a":1}<|call|>' in text
    assert text.endswith("<|end|><|start|>assistant")
    text = template.render([ASKED, CALLED, RESULT, ANSWERED, ASKED])
    assert "Hm." not in text
    assert "So." not in text
    assert "<|channel|>final<|message|>c<|end|>" in text


def test_a_text_beside_reasoning_and_a_call_goes_back_where_the_template_takes_one_of_both() -> None:
    chat = [ASKED, CALLED | {"content": "Let me look."}, RESULT]
    text = ChatTemplate({"default": TEMPLATE}, {}).render(chat)
    assert "<|channel|>analysis<|message|>Hm.\nLet me look.<|end|>" in text
    plain = "{% for m in messages %}[{{ m.content }}|{{ m.thinking }}]{% endfor %}"
    assert "[Let me look.|Hm.]" in ChatTemplate({"default": plain}, {}).render(chat)


def test_a_turn_that_is_continued_goes_on_in_its_channel() -> None:
    template = ChatTemplate({"default": TEMPLATE}, {})
    said = {"role": "assistant", "content": "It is"}
    prompt = template.render([ASKED, said], add_generation_prompt=False, continue_final_message=True)
    assert prompt.endswith("<|channel|>final<|message|>It is")
    assert make_parser(*PARSERS, ChatTools(TOOLS), prompt=prompt, said="It is").parse(" noon.").content == " noon."
    opened = prompt.removesuffix("final<|message|>It is") + "analysis<|message|>"
    message = make_parser(*PARSERS, ChatTools(TOOLS), prompt=opened).parse("Hm.<|end|>Yes.")
    assert (message.reasoning, message.content) == ("Hm.", "Yes.")
