"""Sampling and stopping parameters of one request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, cast

from twostroke.config.checks import check_bool, check_int, check_number, check_unicode
from twostroke.errors import InvalidParameter, UnknownParameter
from twostroke.plain_words import kind_of

MAX_N = 128
"""Most sequences that one request may ask for: each has its own KV memory and batch slot."""

MAX_STOP_STRINGS = 64
MAX_BAD_WORDS = 1024
MAX_SEED = 2**63 - 1
MAX_STRUCTURE_BYTES = 2**16
"""Most bytes of a schema, a grammar, or all choices together, in UTF-8; far beyond any form a model could follow."""
_ASK_FOR_LESS = "Ask for less, and check the rest in the text."
REPETITION_PENALTIES = (0.01, 100.0)
"""Range of repetition_penalty. Logits are divided and multiplied by it in float32; much smaller ones would become 0,
and the logits infinite."""


_TOKEN_ID = re.compile("[0-9]{1,19}")
_Params = TypeVar("_Params", "StructuredOutputs", "SamplingParams")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """Required form of an output; exactly one of these fields, whose names are vLLM's.

    Errors in the form itself appear when it is compiled for a model (grammar/).

    Raises:
        InvalidParameter: none or several fields are set, or one has the wrong type or is too long.
        UnknownParameter: a keyword is not a field.
    """

    json: str | Mapping[str, Any] | None = None
    """JSON schema, as an object or as a string; kept as a string."""
    regex: str | None = None
    """Regular expression that the whole output matches; no look-around, no back-references."""
    choice: tuple[str, ...] | None = None
    """Strings of which the output is one."""
    grammar: str | None = None
    """Context-free grammar: Lark's notation, or llama.cpp's GBNF."""
    json_object: bool | None = None
    """Whether the output is any JSON object."""

    def __new__(cls, **given: Any) -> StructuredOutputs:
        """Refuse unknown names before the generated constructor would, and offer the nearest known one."""
        return _new(cls, given, "structured_outputs")

    def __post_init__(self) -> None:
        """Check the types, and turn a schema into a string."""
        if self.json_object is not None:
            check_bool("structured_outputs.json_object", self.json_object)
        given = self._given
        if len(given) != 1:
            limit = f"must have exactly one of {', '.join(f.name for f in fields(self))}"
            raise InvalidParameter("structured_outputs", given, limit, "Ask for two forms in two requests.")
        name = f"structured_outputs.{given[0]}"
        if self.json is not None:
            object.__setattr__(self, "json", _schema(name, self.json))
        elif self.choice is not None:
            object.__setattr__(self, "choice", _texts(name, self.choice, MAX_STRUCTURE_BYTES))
            if not self.choice:
                raise InvalidParameter(name, [], "must have at least one text")
        texts = self.choice or (self.json, self.regex, self.grammar)  # json_object is none
        num_bytes = sum(_num_bytes(name, text) for text in texts if text is not None)
        if num_bytes > MAX_STRUCTURE_BYTES:
            limit = f"has {num_bytes} bytes in UTF-8; at most {MAX_STRUCTURE_BYTES} are allowed"
            raise InvalidParameter(name, "...", limit, _ASK_FOR_LESS)

    @property
    def kind(self) -> str:
        """Name of the field that is set."""
        return self._given[0]

    @property
    def _given(self) -> list[str]:
        return [f.name for f in fields(self) if getattr(self, f.name) not in (None, False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request; the names and defaults are vLLM's.

    Order in which they act on the logits: structured_outputs, allowed_token_ids, bad_words, min_tokens, logit_bias,
    penalties, temperature, min_p, top_k, top_p, then the choice (Gumbel-max with per-request noise).

    The defaults are the same for every model: values that a model recommends in its generation_config.json are not
    applied (vLLM's `--generation-config vllm`), so a request means the same everywhere. They are logged when the model
    is loaded.

    A new field also goes to: the checks below and the order above; `SamplingFields` (api/protocol/sampling.py); the
    place where it acts (sampling/); `_everything` (runner/largest_steps.py), if it costs memory; a request in
    tests/api/test_fields.py that shows it. Flags and OpenAPI follow automatically.

    Raises:
        InvalidParameter: a value is out of its range, or two contradict each other.
        UnknownParameter: a keyword is not a field.
    """

    n: int = 1
    """Sequences to generate for the prompt."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy, below 0 is refused."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this; in (0, 1]."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the most likely one; in [0, 1]."""
    repetition_penalty: float = 1.0
    """Above 1 discourages tokens of prompt and output, below 1 encourages them; in [0.01, 100]."""
    presence_penalty: float = 0.0
    """Subtracted once from tokens already in the output; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence from tokens already in the output; in [-2, 2]."""
    # not hashed, because no mapping is; equal parameters still have equal hashes
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    """Numbers to add to the logits of these token ids; each in [-100, 100]."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Token ids that may be generated; others may not."""
    bad_words: tuple[str, ...] = ()
    """Words that may not be generated."""
    seed: int | None = None
    """Seed that makes sampling reproducible; a request without one is given one, which its output reports."""
    max_tokens: int | None = 16
    """Most tokens to generate; None runs to the end of the context."""
    min_tokens: int = 0
    """Number of first tokens that do not end the generation, as in vLLM: among them, end-of-text and stop tokens are
    not sampled, and stop strings within their text are ignored. The earliest end is with the next token, with
    max_tokens, or with structured_outputs that are complete."""
    stop: tuple[str, ...] = ()
    """Strings that end the generation; a string or a sequence of strings."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the generation; they are not part of the text."""
    include_stop_str_in_output: bool = False
    """Whether the text keeps the stop string that ended it."""
    ignore_eos: bool = False
    """Whether to continue after the model's own end-of-text tokens."""
    logprobs: int | None = None
    """Log-probabilities of the chosen token and this many of the most likely ones, per output token."""
    prompt_logprobs: int | None = None
    """Log-probabilities for each token of the prompt but the first; otherwise as logprobs."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    structured_outputs: StructuredOutputs | None = None
    """Required form of the output, also as a mapping of StructuredOutputs' fields. A form that is complete ends the
    output, with finish_reason "stop"; if it may also continue, only an end-of-text token ends it, which ignore_eos
    prevents."""

    def __new__(cls, **given: Any) -> SamplingParams:
        """Refuse unknown names before the generated constructor would, and offer the nearest known one."""
        return _new(cls, given, "sampling")

    def __post_init__(self) -> None:
        """Normalise the shorthand forms (one stop string, lists) and check every range."""
        if self.stop != ():
            self._set("stop", _texts("stop", self.stop, MAX_STOP_STRINGS))
        if self.bad_words != ():
            self._set("bad_words", _texts("bad_words", self.bad_words, MAX_BAD_WORDS))
        if self.stop_token_ids != ():
            self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
        if self.logit_bias is not None:
            self._set("logit_bias", _bias(self.logit_bias))
        if self.structured_outputs is not None:
            self._set("structured_outputs", _structured(self.structured_outputs))
        self._check_choice()
        self._check_length()
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            check_bool(name, getattr(self, name))

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    def check_against_model(
        self,
        vocab_size: int,
        max_logprobs: int,
        eos_token_ids: Iterable[int] = (),
        bad_words_token_ids: Iterable[Sequence[int]] = (),
    ) -> None:
        """Check what depends on the model and the engine's limits.

        Args:
            vocab_size: columns of the model's logits.
            max_logprobs: the engine's limit.
            eos_token_ids: the model's end-of-text tokens.
            bad_words_token_ids: the bad words as token ids of the model's tokenizer.

        Raises:
            InvalidParameter: a token id is outside the vocabulary, too many log-probabilities are requested, or no
                token may be sampled first.
        """
        for name in ("allowed_token_ids", "logit_bias", "stop_token_ids"):
            outside = [i for i in getattr(self, name) or () if i >= vocab_size]
            if outside:
                limit = f"token ids of this model are 0 to {vocab_size - 1}"
                raise InvalidParameter(name, outside, limit, "Leave these out.")
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None and value > max_logprobs:
                remedy = f"Ask for fewer, or start the engine with --max-logprobs {value}."
                raise InvalidParameter(name, value, f"at most max_logprobs, which is {max_logprobs}", remedy)
        ends = {*eos_token_ids, *self.stop_token_ids} if self.min_tokens else set[int]()
        bad = {ids[0] for ids in bad_words_token_ids if len(ids) == 1}
        if ends or bad:
            self._check_first_choice(vocab_size, ends, bad)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_choice(self) -> None:
        check_number("temperature", self.temperature, 0.0, 100.0, "at least 0 (0 is greedy) and at most 100")
        check_number("top_p", self.top_p, 0.0, 1.0, "more than 0 and at most 1", low_open=True)
        check_int("top_k", self.top_k, -1, limit="a whole number, 0 or -1 for all tokens")
        check_number("min_p", self.min_p, 0.0, 1.0, "between 0 and 1")
        check_number("repetition_penalty", self.repetition_penalty, *REPETITION_PENALTIES, "between 0.01 and 100")
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0, "between -2 and 2")
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "between -2 and 2")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidParameter("allowed_token_ids", [], "at least one token id", "Leave it out to allow all.")
        if self.seed is not None:
            check_int("seed", self.seed, 0, MAX_SEED)

    def _check_first_choice(self, vocab_size: int, ends: set[int], bad: set[int]) -> None:
        """Refuse parameters that leave no first token to sample.

        Only bad words of several tokens can leave none later, depending on the sampled tokens; that ends only this
        request. (No logit_bias bans a token: -100 is finite.)
        """
        allowed = self.allowed_token_ids or range(vocab_size)
        if any(i not in ends and i not in bad for i in allowed):
            return
        reasons: list[str] = []
        if not ends.isdisjoint(allowed):
            reasons.append(f"min_tokens={self.min_tokens} excludes those that end the generation")
        if not bad.isdisjoint(allowed):
            reasons.append("bad_words forbids single tokens")
        name = "allowed_token_ids" if self.allowed_token_ids else "bad_words" if bad else "stop_token_ids"
        limit = f"leaves no token to draw: {' and '.join(reasons)}"
        raise InvalidParameter(name, getattr(self, name), limit, "Allow one more token.")

    def _check_length(self) -> None:
        check_int("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1)
        check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                check_int(name, value, 0)


def _new(cls: type[_Params], given: Mapping[str, Any], where: str) -> _Params:
    """Return an instance to be initialised by keywords, after checking that all are known."""
    known = {f.name for f in fields(cls)}
    for name in given:
        if name not in known:
            raise UnknownParameter(name, known, where)
    return object.__new__(cls)


def _texts(name: str, value: object, most: int) -> tuple[str, ...]:
    texts: tuple[Any, ...] = (value,) if isinstance(value, str) else () if value is None else _tuple(name, value)
    if any(not isinstance(text, str) or not text for text in texts):
        raise InvalidParameter(name, value, "must be a string or several, none of them empty")
    if len(texts) > most:
        raise InvalidParameter(name, f"{len(texts)} strings", f"at most {most}")
    for text in texts:
        check_unicode(name, text)
    return texts


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    ids = () if value is None else _tuple(name, value)
    if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
        raise InvalidParameter(name, value, "must be token ids, whole numbers of at least 0")
    return ids


def _tuple(name: str, value: object) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple, set, frozenset, range)):
        raise InvalidParameter(name, value, "must be a sequence")
    return tuple(value)


def _bias(value: object) -> dict[int, float]:
    given: Any = value
    if not isinstance(given, Mapping):
        raise InvalidParameter("logit_bias", value, "must map token ids to numbers that are added to their logits")
    bias: dict[int, float] = {}
    for key, amount in cast(Mapping[Any, Any], given).items():
        # JSON has only text keys, so "42" means token 42.
        token_id: Any = int(key) if isinstance(key, str) and _TOKEN_ID.fullmatch(key) else key
        check_int("logit_bias", token_id, 0, limit="keyed by token ids, whole numbers of at least 0")
        check_number("logit_bias", amount, -100.0, 100.0, "between -100 and 100 for each token")
        bias[token_id] = float(amount)
    return bias


def _structured(given: object) -> StructuredOutputs:
    if isinstance(given, StructuredOutputs):
        return given
    if not isinstance(given, Mapping):
        limit = "must be StructuredOutputs, or an object with one of its fields"
        raise InvalidParameter("structured_outputs", given, limit)
    fields_by_name = cast(Mapping[Any, Any], given)
    return StructuredOutputs(**{str(name): value for name, value in fields_by_name.items()})


def _schema(name: str, given: object) -> str:
    """Return the JSON text of a schema; the order of its keys is that of the output's."""
    limit, remedy = "must be a JSON schema", 'Send an object such as {"type": "object"}, or its text.'
    if isinstance(given, str) and len(given) > MAX_STRUCTURE_BYTES:
        raise InvalidParameter(
            name, f"{len(given)} characters", f"at most {MAX_STRUCTURE_BYTES} bytes in UTF-8", _ASK_FOR_LESS
        )
    try:
        parsed = json.loads(given) if isinstance(given, str) else given
        if not isinstance(parsed, Mapping):
            raise InvalidParameter(name, given, f"{limit}, an object", remedy)
        return given if isinstance(given, str) else json.dumps(parsed, ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise InvalidParameter(name, given, f"{limit}, not nested as deeply as this") from error
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidParameter):
            raise
        raise InvalidParameter(name, given, f"{limit}; {error}", remedy) from error


def _num_bytes(name: str, text: object) -> int:
    if not isinstance(text, str):
        raise InvalidParameter(name, text, f"must be a string, not {kind_of(text)}")
    check_unicode(name, text)
    return len(text.encode("utf-8"))
