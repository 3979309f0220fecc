"""Channels of gpt-oss: what streams when, what is counted, and what goes back into the next turn's prompt."""

from __future__ import annotations

import functools
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

import text_fakes
from chat_output import NOW, TOOLS
from grammar_walks import allowed, walk
from harmony_template import TEMPLATE
from twostroke.api.dialect import Dialect
from twostroke.api.parsers.chat_parser import ContentStopFinder, make_parser
from twostroke.api.parsers.output import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallBegin
from twostroke.api.parsers.tool_choice import ChatTools, NamedTool, Tool
from twostroke.client.chat_inputs import ChatInputs
from twostroke.client.input_processor import InputProcessor, ParserSettings
from twostroke.errors import InvalidParameter
from twostroke.grammar.backend import GrammarMatcher
from twostroke.grammar.guidance import Guidance
from twostroke.sampling_params import StructuredOutputs
from twostroke.tokenizer.chat_template import ChatTemplate
from twostroke.tokenizer.tokenizer import Tokenizer

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


HEADER = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>"
SPECIAL = ("<|channel|>", "<|start|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")


@functools.cache
def tokenizer_of(special: tuple[str, ...]) -> Tokenizer:
    """A tokenizer whose special tokens are these of harmony, too."""
    source = text_fakes.folder("byte_level")
    raw = RawTokenizer.from_file(str(source / "tokenizer.json"))
    raw.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    with tempfile.TemporaryDirectory() as name:
        raw.save(f"{name}/tokenizer.json")
        shutil.copy(source / "tokenizer_config.json", name)
        return Tokenizer.from_folder(Path(name))


@pytest.mark.parametrize(
    ("special", "end_texts"),
    [(SPECIAL, ("<|return|>", "<|call|>")), (SPECIAL, ("<|return|>",)), ((), ("<|end|>",))],
    ids=["harmony", "the call ends no turn", "no special tokens"],
)
@pytest.mark.parametrize("choice", ["required", NamedTool("now")], ids=["required", "named"])
def test_a_required_call_is_a_message_to_its_function(
    choice: Any, special: tuple[str, ...], end_texts: tuple[str, ...]
) -> None:
    tokenizer, tools = tokenizer_of(special), ChatTools(TOOLS, choice)
    num_columns = tokenizer.max_token_id + 1
    ends = {tokenizer.token_id(text) or 0 for text in end_texts}
    grammars = Guidance(tokenizer, num_columns, ends)
    matcher = matcher_at_start(grammars, tools)
    opening = tokenizer.token_id("<|channel|>") if special else None
    for token_id in tokenizer.encode(HEADER + "{}", add_special_tokens=False):
        choices = allowed(matcher, num_columns)
        assert token_id in choices
        assert not ends & choices
        if opening is not None:
            assert choices == {opening}  # only the token itself is allowed at the beginning
            opening = None
        matcher.accept(token_id)
    assert ends <= allowed(matcher, num_columns)
    if special:  # only its end is allowed after a call
        assert allowed(matcher, num_columns) == ends | {tokenizer.token_id("<|call|>")}
    for seed in range(5):
        walked, has_ended = walk(matcher_at_start(grammars, tools), num_columns, ends, random.Random(seed))
        text = tokenizer.decode(walked, skip_special_tokens=False)
        assert text.startswith(HEADER.partition("now")[0])
        message = make_parser(*PARSERS, tools, prompt=None).parse(text, is_cut=not has_ended)
        assert (message.reasoning, message.content, len(message.tool_calls)) == ("", "", 1)
        assert message.tool_calls[0].name in ([tool.name for tool in TOOLS] if choice == "required" else ["now"])


def matcher_at_start(grammars: Guidance, tools: ChatTools) -> GrammarMatcher:
    return grammars.matcher(grammars.compile(StructuredOutputs(json=tools.schema), Dialect(*PARSERS).calls(tools)))


@pytest.mark.parametrize("choice", ["required", NamedTool("now")], ids=["required", "named"])
def test_a_required_call_that_was_cut_is_no_content(choice: Any) -> None:
    text = HEADER + '{"a": 1}<|call|>'
    for end in range(len(text)):
        message = make_parser(*PARSERS, ChatTools(TOOLS, choice), prompt=None).parse(text[:end], is_cut=True)
        assert (message.reasoning, message.content) == ("", "")
        assert bool(message.tool_calls) == (end > len(HEADER) + 1), text[:end]
    assert make_parser(*PARSERS, ChatTools(TOOLS, choice), prompt=None).parse(HEADER + "{}").tool_calls == (NOW,)


def test_a_name_that_no_header_can_hold_cannot_be_required() -> None:
    tools = ChatTools([Tool("now and then")], "required")
    with pytest.raises(InvalidParameter, match="names in calls of this model have no spaces") as told:
        Dialect(*PARSERS).calls(tools)
    assert (told.value.name, told.value.value) == ("tools", "now and then")
    assert Dialect("hermes").calls(tools) is None


def test_stop_strings_are_looked_for_in_the_answer_alone() -> None:
    stops = ContentStopFinder(["Hm", "json"], lambda hear: make_parser(*PARSERS, ChatTools(TOOLS), on_content=hear))
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
    assert inputs.process_chat(chat, answer=ParserSettings(end_tokens=ends)).eos_token_ids == {
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
