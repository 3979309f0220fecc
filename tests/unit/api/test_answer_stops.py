"""A chat's stop strings stop its answer: reasoning and calls may hold them, and no half call counts as one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chat_outputs import TOOLS
from twostroke.api.chat import ChatChoice
from twostroke.api.conversation import ParsingReader
from twostroke.api.parsers.chat_parser import ChatParser, ContentStopFinder, make_parser
from twostroke.api.parsers.json_text import is_complete_value
from twostroke.api.parsers.output import OnContent
from twostroke.api.parsers.tool_choice import ChatTools
from twostroke.client.input_processor import PromptInput
from twostroke.client.output_processor import OutputKind, OutputProcessor
from twostroke.engine.token_update import SequenceStatus, TokenUpdate
from twostroke.model.model_files import find_model
from twostroke.request import FinishReason
from twostroke.sampling_params import SamplingParams
from twostroke.tokenizer.tokenizer import TokenTexts

TOKENIZER = find_model("embedded", with_weights=False).tokenizer()
CALL = '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>'
THOUGHT = "<think>Question: 6*7?</think>"


def parser(on_content: OnContent | None = None) -> ChatParser:
    return make_parser("hermes", "qwen3", ChatTools(TOOLS), on_content=on_content)


def find_stops(stops: Any) -> ContentStopFinder:
    return ContentStopFinder(stops, parser)


class Answer:
    """Answer to a client, streamed and whole; both must be equal.

    An exception is half a call with which the model itself ends: the stream has sent it before it was known to be half.
    """

    def __init__(self, text: str, *stop: str, tokens: int = 1, ends: FinishReason = FinishReason.STOP, **params: Any):
        ids = TOKENIZER.encode(text, add_special_tokens=False)
        sampling = SamplingParams(stop=stop, max_tokens=500, **params)
        given = PromptInput(prompt_text="", prompt_token_ids=(5,), params=sampling, find_stops=find_stops)
        streamed, whole = (self._run(given, ids, kind, tokens, ends) for kind in (OutputKind.DELTA, OutputKind.FINAL))
        assert streamed == whole
        message, self.reason, self.stop, self.num_tokens, self.num_reasoning_tokens = whole
        self.content, self.thoughts, self.calls = message["content"], message["reasoning"], message["calls"]

    @staticmethod
    def _run(given: PromptInput, ids: list[int], kind: OutputKind, tokens: int, ends: FinishReason) -> Any:
        processor = OutputProcessor(TOKENIZER)
        (name,) = processor.add("r", given, seeds=(0,), arrival_time_s=0.0, kind=kind)
        choice = ChatChoice(
            ParsingReader(parser(), TokenTexts(TOKENIZER, True, frozenset())),
            prefix="",
            shows_reasoning=True,
            names_tool=False,
        )
        message: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
        num_tokens = 0
        begun = SequenceStatus(scheduled_time_s=0.0)
        parts = [tuple(ids[i : i + tokens]) for i in range(0, len(ids), tokens)]
        updates = [TokenUpdate(name, 0.0, part, status=begun) for part in parts]
        status = SequenceStatus(finish_reason=ends)
        for update in [*updates, TokenUpdate(name, 0.0, (0,) if ends is FinishReason.STOP else (), status=status)]:
            for output in processor.process([update]).outputs:
                (part,) = output.outputs
                num_tokens += len(part.token_ids)
                if kind is OutputKind.FINAL:
                    found = choice.message(part)
                    functions = [call["function"] for call in found.get("tool_calls", [])]
                    message |= {"content": found["content"] or "", "reasoning": found.get("reasoning", "")}
                    message["calls"] = [[function["name"], function["arguments"]] for function in functions]
                for delta in choice.deltas(part) if kind is OutputKind.DELTA else []:
                    message["content"] += delta.get("content") or ""
                    message["reasoning"] += delta.get("reasoning", "")
                    for call in delta.get("tool_calls", []):
                        if "id" in call:
                            message["calls"].append([call["function"]["name"], ""])
                        message["calls"][call["index"]][1] += call["function"]["arguments"]
                if part.finish_reason is not None:
                    reason = choice.finish_reason(part)
                    if kind is OutputKind.DELTA and reason == "stop":
                        message["calls"] = [call for call in message["calls"] if is_complete_value(call[1])]
                    return message, reason, part.stop_reason, num_tokens, choice.num_reasoning_tokens
        raise AssertionError("it never ended")


def test_reasoning_may_hold_a_stop_string() -> None:
    answer = Answer(THOUGHT + "42 Question: x", "Question:")
    assert (answer.thoughts, answer.content) == ("Question: 6*7?", "42 ")
    assert (answer.reason, answer.stop) == ("stop", "Question:")
    without = Answer(THOUGHT + "42 ")
    assert answer.num_reasoning_tokens == without.num_reasoning_tokens
    upto = TOKENIZER.encode(THOUGHT + "42 Question:", add_special_tokens=False)
    assert answer.num_tokens == len(upto)


def test_a_call_may_hold_a_stop_string() -> None:
    answer = Answer(CALL, "\n")
    assert (answer.content, answer.calls) == ("", [["now", '{"a": 1}']])
    assert (answer.reason, answer.stop) == ("tool_calls", None)


@pytest.mark.parametrize("stop", ['"', "{", "}", "now", "arguments", "tool_call", "<tool_call>", "</tool_call>", ":"])
def test_no_part_of_a_call_stops_it(stop: str) -> None:
    answer = Answer(CALL, stop)
    assert (answer.content, answer.calls, answer.reason) == ("", [["now", '{"a": 1}']], "tool_calls")


@pytest.mark.parametrize(
    ("text", "stop", "content", "calls"),
    [
        ("one two three", "two", "one ", 0),
        ("one two three", "three", "one two ", 0),
        ("Sure.\n" + CALL, "\n", "Sure.", 0),
        ("Sure." + CALL + "Question: x", "Question:", "Sure.", 1),
        (CALL + "\n" + CALL + "\nbye", "bye", "", 2),
        (CALL + "\n\nbye", "\n", "bye", 1),
        ("\n\n" + CALL, "\n", "", 1),
        ("\nbye", "\nbye", "", 0),
        ("a <tool_call>no call Question:", "Question:", "a <tool_call>no call ", 0),
        ("a <tool_call>no call", "<tool_call>", "a ", 0),
        ("a <tool_c", "<tool_c", "a ", 0),
        (THOUGHT + "\n\nyes\nno", "\n", "yes", 0),
        ("<think>never closed. Question:", "Question:", "", 0),
        ("aab", "ab", "a", 0),
    ],
)
@pytest.mark.parametrize("tokens", [1, 3, 1000])
def test_content_stops_where_it_holds_one(text: str, stop: str, content: str, calls: int, tokens: int) -> None:
    answer = Answer(text, stop, tokens=tokens)
    assert (answer.content, len(answer.calls)) == (content, calls)


def test_a_stop_string_can_be_kept() -> None:
    answer = Answer(THOUGHT + "42 Question: x", "Question:", include_stop_str_in_output=True)
    assert answer.content == "42 Question:"


def test_the_first_tokens_end_nothing() -> None:
    text = THOUGHT + "x Question: y Question: z"
    first = len(TOKENIZER.encode(THOUGHT + "x Question:", add_special_tokens=False))
    assert Answer(text, "Question:", min_tokens=first).content == "x Question: y "


HALF = CALL[: CALL.index("1")]


def test_half_a_call_that_is_cut_is_told_by_its_finish_reason() -> None:
    answer = Answer(HALF, ends=FinishReason.LENGTH)
    assert (answer.calls, answer.reason) == ([["now", '{"a": ']], "length")


@pytest.mark.parametrize(
    ("text", "content", "num_calls"),
    [(HALF, "", 0), (f"Sure. {HALF}", "Sure.", 0), (f"{CALL}\n{HALF}", "", 1)],
)
def test_half_a_call_with_which_the_model_ends_is_none(text: str, content: str, num_calls: int) -> None:
    answer = Answer(text)
    assert (answer.content.rstrip(), answer.calls) == (content, [["now", '{"a": 1}']] * num_calls)
    assert answer.reason == "stop"


PIECES = ["<think>", "</think>", CALL, "<tool_call>", "</tool_call>", '{"name"', "Q:", "Q", ":", "a", "\n", " "]


@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=9),
    stops=st.lists(st.sampled_from(["Q:", "a", "Qa", "a:"]), min_size=1, max_size=2, unique=True),
    cuts=st.lists(st.integers(1, 5), min_size=1),
)
@example(pieces=["<think>", "Q:", "</think>", "Q", ":"], stops=["Q:"], cuts=[1])
@example(pieces=["Q", CALL, ":"], stops=["Q:"], cuts=[3])
def test_what_is_found_depends_on_the_text_alone(pieces: list[str], stops: list[str], cuts: list[int]) -> None:
    text = "".join(pieces)

    def run(sizes: list[int]) -> tuple[str, str | None]:
        finder, released, start = ContentStopFinder(stops, parser), "", 0
        for index in range(len(text) + 1):
            end = min(len(text), start + sizes[index % len(sizes)])
            more, match = finder.push(text[start:end]) if start < len(text) else finder.finish()
            if match is not None:
                return released + more[: match.start], match.stop
            released += more
            if start >= len(text):
                break
            start = end
        return released, None

    kept, stop = run(cuts)
    assert (kept, stop) == run([len(text) + 1])
    assert text.startswith(kept)
    whole, mine = parser().parse(text), parser().parse(kept)
    assert mine.reasoning == whole.reasoning
    assert mine.tool_calls == whole.tool_calls[: len(mine.tool_calls)]
    assert whole.content.startswith(mine.content.rstrip())
    if stop is None:
        assert kept == text
        if not whole.tool_calls:
            assert not any(one in whole.content for one in stops)
    else:
        assert text[len(kept) :].startswith(stop)
        if not mine.tool_calls:
            assert not any(one in mine.content for one in stops)


@pytest.mark.parametrize("end", range(1, CALL.index('"a"')))
@pytest.mark.parametrize("stop", [(), ("\n",), ("name",)], ids=str)
def test_a_call_that_max_tokens_cuts_in_its_head_is_no_content_and_no_stop(end: int, stop: tuple[str, ...]) -> None:
    found = Answer(f"Sure. {CALL[:end]}", *stop, ends=FinishReason.LENGTH)
    assert found.content.rstrip() == ("Sure. <" if end == 1 else "Sure.")
    assert found.reason == "length"


def test_a_marker_behind_which_the_model_itself_ends_is_content() -> None:
    assert Answer("Write <tool_call>").content == "Write <tool_call>"
    assert Answer("Write <tool_call>", ends=FinishReason.LENGTH).content.rstrip() == "Write"
