"""Conversation that runs through the engine, the same for all APIs; subclasses write the answer.

    /v1/chat/completions ────────────────────┐                              ┌─► chat.py
    /v1/messages  ─► chat_from_messages() ───┼─► ChatRequest ─► Conversation ├─► messages.py
    /v1/responses ─► chat_from_response() ───┤                              ├─► responses.py
    /api/chat     ─► chat_from_ollama() ─────┘                              └─► ollama.py

Errors about a parameter use the client's name of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from types import MappingProxyType
from typing import ClassVar

from twostroke.api.dialect import Dialect, Form, form_of
from twostroke.api.generation import (
    AnswerHead,
    Caller,
    GenerationCall,
    UsageCount,
    check_stream_options,
    input_size,
    run_in_thread_if_large,
    run_in_thread_if_long,
    shared_params,
)
from twostroke.api.parsers.chat_parser import ChatParser, ContentStopFinder, make_parser
from twostroke.api.parsers.output import ContentDelta, Delta, OnContent
from twostroke.api.parsers.tool_choice import NO_TOOLS
from twostroke.api.protocol.chat import ChatRequest
from twostroke.api.protocol.fields import as_sent, tier_of
from twostroke.client.chat_inputs import ChatInputs
from twostroke.client.engine_client import EngineClient
from twostroke.client.input_processor import ParserSettings, PromptInput
from twostroke.errors import InvalidParameter
from twostroke.outputs import CompletionOutput, RequestOutput
from twostroke.request import FinishReason
from twostroke.sampling_params import SamplingParams, StructuredOutputs
from twostroke.tokenizer.messages import text_of
from twostroke.tokenizer.tokenizer import TokenTexts

ParameterNames = Mapping[str, str]
"""Map from a chat's parameter names to those of another API."""


@contextlib.contextmanager
def with_client_names(words: ParameterNames) -> Generator[None]:
    """Raise errors about a parameter under the client's name of it.

    Args:
        words: names that differ.

    Raises:
        InvalidParameter: the block's own, with the client's name.
    """
    try:
        yield
    except InvalidParameter as error:
        if error.name not in words:
            raise
        raise InvalidParameter(words[error.name], error.value, error.limit, error.remedy) from error


CHAT_PARAMETER_NAMES: ParameterNames = MappingProxyType({"logprobs": "top_logprobs"})
"""Names in a chat itself: `logprobs` is a flag there, and `top_logprobs` the number."""


PROMPT_TAIL_TOKENS = 16
"""Tokens at the prompt's end from which the parser sees whether the template has opened the reasoning."""


class ContentReader:
    """Reader of a choice that is content only; nothing is parsed."""

    num_reasoning_tokens: int = 0
    has_incomplete_call: bool = False

    def read(self, part: CompletionOutput) -> list[Delta]:
        """Return the deltas of the next output."""
        return [ContentDelta(part.text)] if part.text else []


class ParsingReader:
    """Reader of a choice in which the model may reason or call tools.

    Args:
        parser: parser of the model's dialect, for this choice alone.
        token_texts: text that each new token adds, for this choice alone.
    """

    def __init__(self, parser: ChatParser, token_texts: TokenTexts) -> None:
        self._parser = parser
        self._token_texts = token_texts

    @property
    def num_reasoning_tokens(self) -> int:
        """Reasoning tokens read so far."""
        return self._parser.num_reasoning_tokens

    @property
    def has_incomplete_call(self) -> bool:
        """Whether the text ends within a call."""
        return self._parser.has_incomplete_call

    def read(self, part: CompletionOutput) -> list[Delta]:
        """Return the deltas that are certain with the next output; with the last output, all that remain."""
        found = self._parser.push(part.text, self._token_texts.of(part.token_ids))
        if part.finish_reason is not None:
            found += self._parser.finish(is_cut=part.finish_reason is not FinishReason.STOP)
        return found


ChoiceReader = ContentReader | ParsingReader


class Conversation(GenerationCall):
    """One chat request; subclasses write its answer.

    Args:
        engine: engine that runs it.
        request: request that matches the schema.
        dialect: syntax of the model's reasoning and tool calls.
        head: head of the answer.
    """

    words: ClassVar[ParameterNames] = CHAT_PARAMETER_NAMES
    """The client's names of parameters, if they differ."""

    def __init__(self, engine: EngineClient, request: ChatRequest, dialect: Dialect, head: AnswerHead) -> None:
        super().__init__(engine, head)
        self.request = request
        self.usage = UsageCount()
        self.tools = NO_TOOLS
        self._dialect = dialect
        self._form: Form | None = None
        self._prompt_tail = ""
        self.said = ""
        """Text of the last message that the model continues; empty if it begins a new one."""
        self._shown_token_ids = frozenset[int]()

    @property
    def tier(self) -> dict[str, str]:
        """The answer's service tier field, if the request has one."""
        return tier_of(self.request.service_tier, uses_priority=self.engine.facts.uses_priority)

    async def open(self, caller: Caller) -> None:
        """Check everything and queue the conversation; raise what Completion.open raises."""
        request = self.request
        with with_client_names(self.words):
            params = await run_in_thread_if_large(self._checked_params, self._amount())
            prompt = await self._prepared(params)
        if request.continue_final_message:
            self.said = text_of(request.messages[-1])
        if not self._is_content_only:
            self._store_prompt_end(prompt)
        self._begin(request, [prompt], caller, streams=bool(request.stream))

    async def count_tokens(self) -> int:
        """Return the number of prompt tokens. Everything is checked as in `open`, and nothing runs."""
        with with_client_names(self.words):
            await run_in_thread_if_large(self._checked_params, self._amount())
        inputs = self.engine.inputs
        frames = bool(self.request.add_special_tokens)

        def count() -> int:  # no length check: the count of a conversation that is too long is wanted, too
            text = inputs.render_chat(self._chat())
            return len(inputs.encode(text, add_special_tokens=frames))

        return await run_in_thread_if_long(count, self._amount(), renders=True)

    async def whole(self) -> RequestOutput:
        """Return the whole output; raise what AnswerGeneration.whole raises."""
        (output,) = await self.generation.whole()
        self.usage.add(0, output)
        return output

    def choice_reader(self) -> ChoiceReader:
        """Return a reader of one choice."""
        if self._is_content_only:
            return ContentReader()
        skips = self.request.skip_special_tokens is not False
        return ParsingReader(self._parser(), TokenTexts(self.engine.tokenizer, skips, self._shown_token_ids))

    @property
    def _is_content_only(self) -> bool:
        """Whether the text of a choice is content only."""
        return self._dialect.reasoning_parser is None and self.tools.choice == "none"

    def _store_prompt_end(self, prompt: PromptInput) -> None:
        """Store what parsers need from the prompt."""
        self._shown_token_ids = prompt.shown_token_ids
        tail = prompt.prompt_token_ids[-PROMPT_TAIL_TOKENS:]
        self._prompt_tail = self.engine.tokenizer.decode(tail, skip_special_tokens=False)
        if self.request.continue_final_message:
            self._prompt_tail = prompt.prompt_text or self._prompt_tail

    def _parser(self, on_content: OnContent | None = None) -> ChatParser:
        """Return a parser for one choice.

        With a structured output only text that the form itself marks as reasoning is reasoning.
        """
        return make_parser(
            self._dialect.tool_call_parser,
            self._dialect.reasoning_parser,
            self.tools,
            prompt=self._prompt_tail if self._form is None else None,
            said=self.said,
            calls_come_first=self._form is not None and self._form_allows_calls,
            on_content=on_content,
        )

    def _checked_params(self) -> SamplingParams:
        request = self.request
        request.check_refused()
        check_stream_options(request)
        if request.tools or request.tool_choice is not None:
            self.tools = self._dialect.tools_of(request)
        form = request.structured_outputs
        if form is not None or request.response_format is not None or self.tools is not NO_TOOLS:
            self._form = form_of(form, request.response_format, self.tools)
        return chat_params(request, None if self._form is None else self._form.wanted)

    async def _prepared(self, params: SamplingParams) -> PromptInput:
        form = self._form
        with contextlib.nullcontext() if form is None else form.asker.named():
            return await run_in_thread_if_long(
                lambda: self._prompt(params), self._amount(), compiles=form is not None, renders=True
            )

    def _amount(self) -> int:
        """Return the amount of input to check, render and tokenize."""
        request = self.request
        given = (request.messages, request.tools, request.documents, request.chat_template_kwargs)
        return input_size(*given, request.bad_words, request.response_format)

    def _prompt(self, params: SamplingParams) -> PromptInput:
        """Return the conversation as checked tokens."""
        return self.engine.inputs.process_chat(
            self._chat(),
            params,
            self.request,
            answer=None if self._is_content_only else self._answer_form(),
        )

    def _answer_form(self) -> ParserSettings:
        """Return the parser's demands on the text; stop strings are searched in content only."""
        return ParserSettings(
            shown_tokens=self._parser().markup,
            end_tokens=self._dialect.turn_ends,
            find_stops=lambda stops: ContentStopFinder(stops, self._parser),
            calls=self._dialect.calls(self.tools) if self._form_allows_calls else None,
        )

    @property
    def _form_allows_calls(self) -> bool:
        """Whether calls are allowed beside the form: true for JSON; other forms describe the whole output."""
        given = self.request.structured_outputs
        return given is None or given.json_ is not None or bool(given.json_object)

    def _chat(self) -> ChatInputs:
        """Return the conversation and the chat template's other inputs."""
        request = self.request
        template_kwargs = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort is not None:
            template_kwargs.setdefault("reasoning_effort", request.reasoning_effort)
        continues = bool(request.continue_final_message)
        tools = [as_sent(tool) for tool in request.tools or ()]
        begins_answer = not continues if request.add_generation_prompt is None else request.add_generation_prompt
        return ChatInputs(
            request.messages,
            tools=tools if self.tools.choice != "none" else None,
            documents=request.documents,
            add_generation_prompt=begins_answer,
            continue_final_message=continues,
            chat_template_kwargs=template_kwargs,
        )


def chat_params(request: ChatRequest, form: StructuredOutputs | None) -> SamplingParams:
    """Return the sampling parameters of a chat whose output must have `form`; raise what `completion_params` raises."""
    given = shared_params(request, form)
    given["max_tokens"] = request.max_completion_tokens or request.max_tokens
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidParameter("top_logprobs", request.top_logprobs, "needs logprobs", "Set logprobs to true.")
    if request.logprobs:
        given["logprobs"] = request.top_logprobs or 0
    return SamplingParams(**given)
