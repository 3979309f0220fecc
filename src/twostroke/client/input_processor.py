"""Checks of prompts and sampling parameters, and encoding to token ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypedDict, cast

from twostroke.client.chat_inputs import ChatInputs
from twostroke.client.stop_strings import StopFinder, StopStrings
from twostroke.config.checks import check_int
from twostroke.engine.facts import EngineFacts
from twostroke.errors import InvalidParameter, InvalidPrompt, UnknownParameter, shown
from twostroke.grammar.backend import GrammarBackend, OptionalCallSyntax, RequiredCallSyntax
from twostroke.grammar.guidance import Guidance
from twostroke.plain_words import kind_of
from twostroke.sampling_params import SamplingParams
from twostroke.tokenizer.chat_template import ChatTemplate
from twostroke.tokenizer.tokenizer import Tokenizer


class PromptDict(TypedDict, total=False):
    """A prompt as an object with exactly one of the two keys."""

    prompt: str
    prompt_token_ids: Sequence[int]


Prompt = str | PromptDict
"""Type of a completion's prompt."""

TruncationSide = Literal["left", "right"]
"""End of a too long prompt that is cut off."""


class PromptEncodingOptions(Protocol):
    """Settings for turning a prompt into tokens: fields of requests, where None is the default."""

    add_special_tokens: bool | None
    """Whether special tokens are added to a text, as the model expects. Default: yes for completions, no for chats,
    whose template adds them."""
    truncate_prompt_tokens: int | None
    """Number of tokens to keep; -1 keeps what leaves room for max_tokens. Default: all."""
    truncation_side: TruncationSide | None
    """End at which tokens are cut off. Default: left, so that the last ones are kept."""


WHOLE = slice(None)
"""Slice of all tokens of a prompt."""

_PROMPT_KEYS = ("prompt", "prompt_token_ids")
MIN_FIRST_CHARS = 1 << 14
"""Minimum number of characters of a long text that are encoded first."""
CHARS_PER_TOKEN = 4
"""Characters per token of usual texts; the first part of a long text has so many for each token of the context."""


@dataclass(frozen=True, slots=True)
class PromptInput:
    """A request's input, ready for the engine."""

    prompt_text: str | None
    """Text of the prompt, after the chat template if there was one; None if the caller gave token ids."""
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    """Sampling parameters; max_tokens is set, to at most the remaining context."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """Token id sequences that spell a bad word; the last id of one may not follow the others."""
    eos_token_ids: frozenset[int] = frozenset()
    """End-of-text tokens of the model, even if the request ignores them."""
    shown_token_ids: frozenset[int] = frozenset()
    """Special tokens that are part of the text nevertheless."""
    grammar: str | None = None
    """Compiled grammar of structured outputs."""
    wants_hidden_state: bool = False
    """Whether the result is the hidden state of the last token, instead of tokens."""
    find_stops: Callable[[Sequence[str]], StopFinder] = StopStrings
    """Factory of the search for stop strings in a sequence's text; by default they may occur anywhere in it."""

    @property
    def max_tokens(self) -> int:
        """Most tokens to generate."""
        assert self.params.max_tokens is not None, "the input processor sets max_tokens"
        return self.params.max_tokens


@dataclass(frozen=True, slots=True)
class ParserSettings:
    """Settings that the parser of a chat's output needs."""

    shown_tokens: Collection[str] = ()
    """Special tokens that are part of the output's text, because the parser has to read them."""
    end_tokens: Collection[str] = ()
    """Special tokens that end the text, beside the model's end-of-text tokens."""
    find_stops: Callable[[Sequence[str]], StopFinder] = StopStrings
    """Factory of the search for stop strings, as in PromptInput."""
    calls: OptionalCallSyntax | RequiredCallSyntax | None = None
    """Tool calls that may be written in place of structured outputs, or the form of a required call."""


class InputProcessor:
    """The checks and encoding of prompts for one model; thread-safe.

    Args:
        tokenizer: of the model.
        max_model_len: longest prompt plus output.
        vocab_size: embedding rows of the model.
        max_logprobs: most log-probabilities a request may ask for per token.
        eos_token_ids: the model's end-of-text tokens, see `tokenizer.settings.read_eos_token_ids`.
        grammars: compiles structured outputs; None creates one, which is not shared with an engine in this process.
        chat_template: Jinja source instead of the model's own.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        vocab_size: int,
        max_logprobs: int = 20,
        eos_token_ids: Collection[int] = (),
        grammars: GrammarBackend | None = None,
        chat_template: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._first_chars = max(MIN_FIRST_CHARS, CHARS_PER_TOKEN * max_model_len)
        self._vocab_size = vocab_size
        self._max_logprobs = max_logprobs
        self._eos_token_ids = frozenset(eos_token_ids)
        self._grammars = grammars or Guidance(tokenizer, vocab_size, self._eos_token_ids)
        templates = tokenizer.chat_templates if chat_template is None else {"default": chat_template}
        self.chat_template = ChatTemplate(templates, tokenizer.named_tokens)
        """Template that renders conversations for the model."""

    @classmethod
    def of_engine(
        cls,
        facts: EngineFacts,
        tokenizer: Tokenizer,
        grammars: GrammarBackend | None = None,
        chat_template: str | None = None,
    ) -> InputProcessor:
        """Return the input processor for an engine's limits.

        Args:
            facts: of the engine.
            tokenizer: of the model.
            grammars: shared with an engine in the same process.
            chat_template: Jinja source instead of the model's own.
        """
        return cls(
            tokenizer,
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            max_logprobs=facts.max_logprobs,
            eos_token_ids=facts.eos_token_ids,
            grammars=grammars,
            chat_template=chat_template,
        )

    def process(
        self, prompt: Prompt, params: SamplingParams | None = None, framing: PromptEncodingOptions | None = None
    ) -> PromptInput:
        """Check and encode a completion prompt.

        Args:
            prompt: text, or {"prompt_token_ids": [...]}.
            params: how to sample and when to stop.
            framing: settings of the encoding; None: the defaults.

        Raises:
            InvalidPrompt: empty, too long, not text, or token ids that the model does not have.
            UnknownParameter: an unknown key of the prompt object.
            InvalidParameter: a sampling parameter that this model cannot serve, or no SamplingParams at all.
        """
        params = _checked_kind(params)
        kept = WHOLE if framing is None else self._kept(framing, params)
        frames = framing is None or framing.add_special_tokens is not False
        if isinstance(prompt, str):
            return self._process_text(prompt, params, frames, kept)
        given = cast(Any, prompt)
        if not isinstance(given, Mapping):
            raise InvalidPrompt(
                f"a prompt must be a string or {{'prompt_token_ids': [...]}}, not {kind_of(given)}. "
                "Send several prompts as several requests."
            )
        for key in given:
            if key not in _PROMPT_KEYS:
                raise UnknownParameter(str(key), _PROMPT_KEYS, "the prompt")
        if len(given) != 1:
            raise InvalidPrompt("a prompt object must have either 'prompt' or 'prompt_token_ids'.")
        if "prompt" in given:
            return self._process_text(given["prompt"], params, frames, kept)
        token_ids = self._checked_token_ids(given["prompt_token_ids"], is_whole=kept == WHOLE)
        return self._checked(None, token_ids[kept], params)

    def process_embedding(self, prompt: Prompt, framing: PromptEncodingOptions | None = None) -> PromptInput:
        """Check a prompt whose last hidden state is wanted; arguments and errors are those of `process`."""
        # no token is sampled; the hidden state counts as the one token
        checked = self.process(prompt, SamplingParams(max_tokens=1), framing)
        return dataclasses.replace(checked, wants_hidden_state=True)

    def process_chat(
        self,
        chat: ChatInputs,
        params: SamplingParams | None = None,
        framing: PromptEncodingOptions | None = None,
        *,
        answer: ParserSettings | None = None,
    ) -> PromptInput:
        """Render a conversation with the model's chat template and check it; raise what `process` raises.

        The template adds the begin token if the model has one. `answer` has the settings for a parser of the output.
        """
        params = _checked_kind(params)
        kept = WHOLE if framing is None else self._kept(framing, params)
        frames = framing is not None and bool(framing.add_special_tokens)
        text = self.render_chat(chat)
        if answer is None:
            return self._process_text(text, params, frames, kept)
        prompt = self._process_text(text, params, frames, kept, answer.calls)
        return dataclasses.replace(
            prompt,
            shown_token_ids=self._special_ids(answer.shown_tokens),
            eos_token_ids=prompt.eos_token_ids | self._special_ids(answer.end_tokens),
            find_stops=answer.find_stops,
        )

    def render_chat(self, chat: ChatInputs) -> str:
        """Return a conversation as text for the model; see ChatTemplate.render."""
        return self.chat_template.render(
            chat.messages,
            tools=chat.tools,
            documents=chat.documents,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            template_kwargs=chat.chat_template_kwargs,
        )

    def encode(self, text: Any, *, add_special_tokens: bool = True) -> Sequence[int]:
        """Return the token ids of any text, including an empty or a long one.

        For a long text they take four bytes each; see Tokenizer.encode_compact.

        Raises:
            InvalidPrompt: not a string, invalid Unicode, or a text for which the tokenizer has no ids.
        """
        if not isinstance(text, str):
            raise InvalidPrompt(f"the prompt must be a string, not {kind_of(text)}.")
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise InvalidPrompt(
                    f"the prompt has half a character (a lone surrogate) at position {error.start}; send valid Unicode."
                ) from error
        return self._tokenizer.encode_compact(text, add_special_tokens=add_special_tokens)

    def _special_ids(self, tokens: Collection[str]) -> frozenset[int]:
        """Return the ids of those of the tokens that are special tokens of this model."""
        return self._tokenizer.special_token_ids.intersection(map(self._tokenizer.token_id, tokens))

    def _kept(self, framing: PromptEncodingOptions, params: SamplingParams) -> slice:
        """Return the slice of its tokens that a prompt keeps."""
        most = framing.truncate_prompt_tokens
        if most is None:
            return WHOLE
        if most == -1:
            most = max(1, self._max_model_len - (params.max_tokens or 1))
        check_int("truncate_prompt_tokens", most, 1, limit="at least 1, or -1 for what fits")
        return slice(most) if framing.truncation_side == "right" else slice(-most, None)

    def _process_text(
        self,
        text: Any,
        params: SamplingParams,
        add_special_tokens: bool,
        kept: slice,
        calls: OptionalCallSyntax | RequiredCallSyntax | None = None,
    ) -> PromptInput:
        if isinstance(text, str) and kept == WHOLE:
            least = self._tokenizer.min_num_tokens(text)  # an exact count of megabytes of text would take seconds
            if least >= self._max_model_len:
                raise self._too_long(f"at least {least} tokens, by its {len(text)} characters", least)
            if len(text) > self._first_chars:
                self._check_prefixes(text, add_special_tokens)
        token_ids = self.encode(text, add_special_tokens=add_special_tokens)
        # The ids of a tokenizer that passed check_vocab are in range, so only their number is checked.
        return self._checked(text, tuple(token_ids[kept]), params, calls)

    def _check_prefixes(self, text: str, add_special_tokens: bool) -> None:
        """Refuse a text that is far too long by its beginning; encoding all of it may take minutes.

        A beginning of more than twice the context is certain: cutting may give its last words more tokens than they
        have in the whole text, but not so many.
        """
        size = self._first_chars
        while size < len(text):
            num_tokens = len(self.encode(text[:size], add_special_tokens=add_special_tokens))
            if num_tokens > 2 * self._max_model_len:
                raise self._too_long(f"more than {num_tokens // 2} tokens, by its first {size} characters", num_tokens)
            size *= 4

    def _checked_token_ids(self, given: Any, *, is_whole: bool) -> tuple[int, ...]:
        """Return the checked ids; if all are kept, their number is checked first."""
        if not isinstance(given, (list, tuple)):
            raise InvalidPrompt(f"prompt_token_ids must be a list of token ids, not {kind_of(given)}.")
        token_ids = cast(Sequence[Any], given)
        if is_whole and len(token_ids) >= self._max_model_len:
            raise self._too_long(f"{len(token_ids)} tokens", len(token_ids))
        for position, token_id in enumerate(token_ids):
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise InvalidPrompt(
                    f"prompt_token_ids[{position}] is {shown(token_id)}, {kind_of(token_id)}; ids are whole numbers."
                )
            if not 0 <= token_id < self._vocab_size:
                raise InvalidPrompt(
                    f"prompt_token_ids[{position}] is {token_id}; this model's ids go from 0 to {self._vocab_size - 1}."
                )
        return tuple(token_ids)

    def _too_long(self, length: str, num_tokens: int) -> InvalidPrompt:
        most = self._max_model_len
        return InvalidPrompt(
            f"the prompt has {length}; with max_model_len {most} it may have {most - 1}, so that one is left for "
            f"the output. Shorten it, or start the engine with --max-model-len {num_tokens + 1} or more."
        )

    def _checked(
        self,
        text: str | None,
        token_ids: tuple[int, ...],
        params: SamplingParams,
        calls: OptionalCallSyntax | RequiredCallSyntax | None = None,
    ) -> PromptInput:
        num_left = self._max_model_len - len(token_ids)
        if not token_ids:
            raise InvalidPrompt("the prompt is empty: it has no tokens. Send at least one.")
        if num_left < 1:
            raise self._too_long(f"{len(token_ids)} tokens", len(token_ids))
        bad_words = tuple(seq for word in params.bad_words for seq in self._bad_word(word))
        wanted = params.structured_outputs
        return PromptInput(
            prompt_text=text,
            prompt_token_ids=token_ids,
            params=self._checked_params(params, num_left, bad_words),
            bad_words_token_ids=bad_words,
            eos_token_ids=self._eos_token_ids,
            grammar=None if wanted is None else self._grammars.compile(wanted, calls),
        )

    def _checked_params(
        self, params: SamplingParams, num_left: int, bad_words: Sequence[tuple[int, ...]]
    ) -> SamplingParams:
        params.check_against_model(self._vocab_size, self._max_logprobs, self._eos_token_ids, bad_words)
        if params.min_tokens > num_left:
            raise InvalidParameter("min_tokens", params.min_tokens, f"at most {num_left}, what the context leaves")
        # Asking for more than fits is no error: the generation ends with finish_reason "length" at the context's end.
        max_tokens = num_left if params.max_tokens is None else min(params.max_tokens, num_left)
        return params if max_tokens == params.max_tokens else dataclasses.replace(params, max_tokens=max_tokens)

    def _bad_word(self, word: str) -> list[tuple[int, ...]]:
        """Return the ids of the word at the start of a text and behind a space; they usually differ."""
        stem = word.lstrip() or word
        sequences: list[tuple[int, ...]] = []
        for spelling in (stem, f" {stem}"):
            ids = tuple(self._tokenizer.encode(spelling, add_special_tokens=False))
            # A sequence that ends like a known one is forbidden already.
            if ids and not any(ids[-len(known) :] == known for known in sequences):
                sequences.append(ids)
        if not sequences:
            raise InvalidParameter("bad_words", word, "each must have at least one token in this model")
        return sequences


def _checked_kind(given: object) -> SamplingParams:
    """Return the sampling parameters, or the defaults for None."""
    if given is None:
        return SamplingParams()
    if not isinstance(given, SamplingParams):
        remedy = "Write SamplingParams(max_tokens=16), or leave it out."
        raise InvalidParameter("sampling_params", given, f"must be SamplingParams, not {kind_of(given)}", remedy)
    return given
