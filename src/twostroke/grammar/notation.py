"""From what people write (JSON schema, regular expression, choices, Lark, GBNF) to llguidance's one notation."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from twostroke.errors import InvalidParameter
from twostroke.grammar.backend import WrittenCalls
from twostroke.grammar.json_schema import constraining, wide_objects
from twostroke.sampling_params import StructuredOutputs

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Between the parts of JSON. Unbounded, a weak model may well write spaces until max_tokens; 32 indent six levels."""

_MAX_REASON = 200
NO_TEXT = "no text but the empty one matches it, or no token of this model can begin one"
TOO_MANY_WAYS = "there are too many ways to go on at one place, as with more than 500 optional properties of one object"
_TOP = '%llguidance {"no_forcing": true}\nstart: @wanted'
"""Every tokenization of an allowed text is allowed. By default llguidance leaves only the tokenizer's own where the
text is certain, which would take the last way out of a request whose bad_words or allowed_token_ids forbid it."""


def to_llguidance(wanted: StructuredOutputs, calls: WrittenCalls | None = None) -> str:
    """The grammar in llguidance's JSON form; whether it can be followed is not looked at.

    Args:
        wanted: the form.
        calls: tool calls that may be written instead.

    Raises:
        InvalidParameter: a GBNF grammar or a JSON schema that cannot even be read.
    """
    try:
        inner = _inner(wanted)
        parts = [inner | {"name": "wanted"}] if calls is None else _either(inner, calls)
    except (ValueError, RecursionError) as error:
        raise refusal(wanted, str(error)) from error
    return json.dumps({"grammars": [{"lark_grammar": _TOP}, *parts]}, ensure_ascii=False)


def wide_parts(wanted: StructuredOutputs) -> Iterator[str]:
    """Yield a grammar for each place of a JSON schema that may have too many ways to go on."""
    if isinstance(wanted.json, str):
        for part in wide_objects(json.loads(wanted.json)):
            yield to_llguidance(StructuredOutputs(json=part))


def _either(form: dict[str, object], calls: WrittenCalls) -> list[dict[str, object]]:
    """Parts of a grammar of what has the form or begins as a call does; behind its beginning a call is free."""
    beginning = calls.beginning
    if not beginning and calls.markers:
        markers = [json.dumps(marker) for marker in calls.markers] + _tokens(calls.first_tokens)
        beginning = f"beginning: {' | '.join(markers)}"
    rest = " | ".join(["TEXT", *_tokens(calls.tokens)])
    ways = ["@form", *([f"beginning ({rest})*"] if beginning else []), *(["@call"] if calls.bare else [])]
    lark = f"start: {' | '.join(ways)}\n{beginning}\nTEXT: /(.|\\n)+/"
    parts: list[dict[str, object]] = [{"lark_grammar": lark, "name": "wanted"}, form | {"name": "form"}]
    return [*parts, _json(json.dumps(calls.bare)) | {"name": "call"}] if calls.bare else parts


def _tokens(token_ids: Collection[int]) -> list[str]:
    return [f"<[{token_id}]>" for token_id in sorted(token_ids)]


def refusal(wanted: StructuredOutputs, reason: str) -> InvalidParameter:
    """The error for what llguidance does not take. Of its report, with quotations and positions, a line is kept."""
    found = re.search(r"^error: (.+)$", reason, re.MULTILINE)
    line = found.group(1) if found else re.sub(r"^(at )?\d+\(\d+\): ", "", reason.strip()).partition("\n")[0]
    if line.startswith("NoExtension"):
        line = NO_TEXT
    if "items; max is" in line or "Too many items" in line:
        line = TOO_MANY_WAYS
    return InvalidParameter(
        f"structured_outputs.{wanted.kind}",
        getattr(wanted, wanted.kind),
        f"cannot be followed: {line[:_MAX_REASON] or 'no reason was given'}",
        "Ask for less, and check the rest in the text.",
    )


def _inner(wanted: StructuredOutputs) -> dict[str, object]:
    """What was asked for, as one part of a grammar."""
    if wanted.regex is not None:
        return _only(LLMatcher.grammar_from_regex(wanted.regex))
    if wanted.choice is not None:
        texts = " | ".join(json.dumps(text) for text in wanted.choice)  # a control character has to be escaped
        return {"lark_grammar": f"start: {texts}"}
    if wanted.grammar is not None:
        try:
            return {"lark_grammar": any_to_lark(wanted.grammar)}
        except Exception as error:  # GbnfToLarkError is a plain Exception
            raise ValueError(str(error)) from error
    schema = '{"type": "object"}' if wanted.json is None else wanted.json
    assert isinstance(schema, str), "StructuredOutputs keeps a schema as text"
    return _json(schema)


def _json(schema: str) -> dict[str, object]:
    return _only(
        # against the schema's own "x-guidance", too
        LLMatcher.grammar_from_json_schema(
            json.dumps(constraining(json.loads(schema)), ensure_ascii=False),
            overrides={"whitespace_pattern": WHITESPACE, "lenient": False},
        )
    )


def _only(grammar: str) -> dict[str, object]:
    """The one part of a grammar in JSON form."""
    (part,) = json.loads(grammar)["grammars"]
    return part
