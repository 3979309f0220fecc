"""One generation's text taken apart into reasoning, content and tool calls while it comes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from twostroke.api.parsers.deltas import Delta, ParsedMessage, join_deltas
from twostroke.api.parsers.families import (
    REQUIRED,
    TOOL_CALL_FAMILIES,
    ToolCallFamily,
    named_tool,
    read_content,
    read_plain_content,
)
from twostroke.api.parsers.output import Output
from twostroke.api.parsers.reasoning import REASONING_FAMILIES, ReasoningFamily, read_reasoning
from twostroke.api.parsers.source import Reading, Source
from twostroke.api.parsers.tool_choice import NamedTool, Tool, ToolChoice, checked_tool_choice
from twostroke.errors import InvalidParameter

Family = TypeVar("Family")

_NEWLINES = re.compile(r"\n*")


class ChatParser:
    """The text of one choice, in pieces, to deltas.

    However the text is cut, the deltas add up to the same message. No text is lost: what is not markup, or looks like a
    call and is none, comes out as it is; only layout beside markup goes (`Output`).

    Args:
        tool_calls: how calls are written; None if there can be none.
        reasoning: how reasoning is written; None if it is not told from content.
        tools: what may be called.
        starts_in_reasoning: whether the text begins within the reasoning.
        max_tool_calls: further calls are dropped.
    """

    def __init__(
        self,
        tool_calls: ToolCallFamily | None,
        reasoning: ReasoningFamily | None,
        *,
        tools: Sequence[Tool] = (),
        starts_in_reasoning: bool = False,
        max_tool_calls: int | None = None,
    ) -> None:
        self._tool_calls = tool_calls
        self._reasoning = reasoning
        self._tools: Mapping[str, Tool] = {tool.name: tool for tool in tools}
        self._starts_in_reasoning = starts_in_reasoning
        self._source = Source()
        self._output = Output(max_tool_calls)
        self._num_chars = 0
        self._reasoning_end: int | None = None
        """How many characters the reasoning has with its tags, 0 without reasoning; None until that is known."""
        self._num_reasoning_tokens = 0
        self._reading = self._read()

    @property
    def markup(self) -> frozenset[str]:
        """Texts that the parser has to see: those that are special tokens must not be skipped by the detokenizer."""
        calls = (*self._tool_calls.markers, *self._tool_calls.markup) if self._tool_calls else ()
        return frozenset(calls + (self._reasoning.markup if self._reasoning else ()))

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens up to the end of the reasoning, its tags among them (`completion_tokens_details.reasoning_tokens`).

        Exact where tokens are pushed one by one, or given to `parse`; of a push in which the reasoning ends, the same
        share of the tokens as of the characters. Final after `finish`; 0 before it is known that there is reasoning.
        """
        is_known = self._reasoning_end is not None or self._starts_in_reasoning or self._output.has_reasoning
        return self._num_reasoning_tokens if is_known else 0

    def push(self, text: str, num_tokens: int = 0) -> list[Delta]:
        """What is certain with the next text; `num_tokens` is how many tokens were sampled for it."""
        assert not self._source.has_ended, "text after the end"
        start = self._num_chars
        self._num_chars += len(text)
        self._source.append(text)
        return self._advance(start, num_tokens)

    def finish(self) -> list[Delta]:
        """The generation has ended, for whatever reason: what is left."""
        self._source.has_ended = True
        deltas = self._advance(self._num_chars, 0)
        self._output.finish()
        return deltas + self._output.drain()

    def parse(self, text: str, token_texts: Iterable[str] = ()) -> ParsedMessage:
        """A whole generation as a message; the arguments are those of `push_whole`."""
        return join_deltas(self.push_whole(text, token_texts))

    def push_whole(self, text: str, token_texts: Iterable[str] = ()) -> list[Delta]:
        """A whole generation at once; for a parser that has read nothing.

        Args:
            text: all of it.
            token_texts: what each token added to it, for `num_reasoning_tokens`; read as far as the reasoning goes.
        """
        deltas = self.push(text) + self.finish()
        num_chars_left = self._reasoning_end or 0
        for token_text in token_texts:
            if num_chars_left <= 0:
                break
            num_chars_left -= len(token_text)
            self._num_reasoning_tokens += 1
        return deltas

    def _advance(self, start: int, num_tokens: int) -> list[Delta]:
        was_known = self._reasoning_end is not None
        next(self._reading, None)
        end = self._reasoning_end
        if end == 0:
            self._num_reasoning_tokens = 0
        elif end is None or end >= self._num_chars:
            self._num_reasoning_tokens += 0 if was_known else num_tokens
        elif not was_known:
            self._num_reasoning_tokens += math.ceil(num_tokens * (end - start) / (self._num_chars - start))
        return self._output.drain()

    def _read(self) -> Reading[None]:
        if self._reasoning is not None and (
            yield from read_reasoning(self._source, self._output, self._reasoning, is_open=self._starts_in_reasoning)
        ):
            self._reasoning_end = self._num_chars - self._source.num_unread
            yield from self._source.every(_NEWLINES)
            self._source.forget()
        else:
            self._reasoning_end = 0
        if self._tool_calls is None:
            yield from read_plain_content(self._source, self._output.verbatim_content)
        else:
            yield from read_content(self._source, self._output, self._tool_calls, self._tools)


def make_parser(
    tool_call_parser: str | None,
    reasoning_parser: str | None,
    *,
    tools: Sequence[Tool] = (),
    tool_choice: ToolChoice = "auto",
    parallel_tool_calls: bool = True,
    prompt: str = "",
) -> ChatParser:
    """A parser for one choice of one request.

    Args:
        tool_call_parser: a name of TOOL_CALL_FAMILIES; None if the model's calls are not to be looked for.
        reasoning_parser: a name of REASONING_FAMILIES; None if reasoning is not to be told from content.
        tools: what the request offers.
        tool_choice: a required or named call is one of `tool_choice_schema`, in no family's form.
        parallel_tool_calls: False to deliver no more than the first call.
        prompt: the rendered chat, or the end of it, which may have opened the reasoning.

    Raises:
        InvalidParameter: there is no parser of that name, or the tools do not have what was chosen.
    """
    family = _looked_up("tool_call_parser", tool_call_parser, TOOL_CALL_FAMILIES)
    reasoning = _looked_up("reasoning_parser", reasoning_parser, REASONING_FAMILIES)
    tool_choice = checked_tool_choice(tools, tool_choice)
    if isinstance(tool_choice, NamedTool):
        family = named_tool(tool_choice.name)
    elif tool_choice == "required":
        family = REQUIRED
    elif tool_choice == "none" or not tools:
        family = None
    return ChatParser(
        family,
        reasoning,
        tools=tools,
        starts_in_reasoning=reasoning is not None and reasoning.is_open_after(prompt),
        max_tool_calls=None if parallel_tool_calls else 1,
    )


def _looked_up(parameter: str, name: str | None, families: Mapping[str, Family]) -> Family | None:
    if name is not None and name not in families:
        raise InvalidParameter(parameter, name, f"must be one of {', '.join(sorted(families))}")
    return None if name is None else families[name]
