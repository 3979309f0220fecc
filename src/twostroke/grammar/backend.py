"""Interface of a grammar backend to the rest of the engine, independent of the implementation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from twostroke.sampling_params import StructuredOutputs

TokenBits = NDArray[np.int32]
"""int32 [ceil(V / 32)]: one bit per column of the logits. Token i is bit i % 32, from the lowest, of word i // 32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionalCallSyntax:
    """Syntax of optional tool calls: calls that the model may write instead of an answer that has a required form."""

    markers: tuple[str, ...] = ()
    """Texts one of which precedes calls."""
    markup: tuple[str, ...] = ()
    """Texts within and after calls that may be special tokens, as the markers may be."""
    bare: Mapping[str, Any] | None = None
    """JSON schema of a call without a marker."""
    beginning: str = ""
    """Lark rules, `beginning` first, for a marker and the text after it until it is certain that this is a call.

    Without them the marker alone decides. Markers and markup are written in the rules as JSON strings.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredCallSyntax:
    """Syntax of a required tool call, for models that do not write calls as plain JSON."""

    rules: str
    """Lark rules, `start` first. Markup is written in them as JSON strings, and arguments as `@NAME`."""
    schemas: Mapping[str, Mapping[str, Any]]
    """JSON schemas of the arguments, by the NAME used in the rules."""
    markup: tuple[str, ...]
    """Texts in the rules that are replaced by special tokens if the model has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionalCallTokens:
    """Syntax of optional tool calls (`OptionalCallSyntax`), in the texts and token ids of one model."""

    markers: tuple[str, ...]
    first_tokens: frozenset[int]
    """Ids, at the beginning of a text, of the special tokens that are markers."""
    tokens: frozenset[int]
    """Ids of the special tokens within and after calls."""
    bare: Mapping[str, Any] | None
    beginning: str


class GrammarMatcher(Protocol):
    """Grammar state of one generated sequence: a function of the tokens that it has accepted."""

    def fill_mask(self, bits: TokenBits) -> None:
        """Set the bits of the tokens that may come next, end-of-text tokens included where the text may end here.

        No bit is set after a token that was not allowed, or when the grammar has exceeded its limits (see `failure`).
        """
        ...

    def accept(self, token_id: int) -> None:
        """Advance by one token."""
        ...

    def copy(self) -> GrammarMatcher:
        """Return an independent copy. Drafts are tried on copies, because a copy costs less than a rollback."""
        ...

    @property
    def is_accepting(self) -> bool:
        """Whether the text may end here."""
        ...

    @property
    def failure(self) -> str:
        """Reason why no token is allowed; empty while one is."""
        ...


class GrammarBackend(Protocol):
    """Factory of matchers for one model; safe to share between threads."""

    def warm_up(self) -> None:
        """Do the one-time work of the first grammar now. A server calls this, so that no request waits for it."""
        ...

    def compile(self, wanted: StructuredOutputs, calls: OptionalCallSyntax | RequiredCallSyntax | None = None) -> str:
        """Check a request's structured outputs, and return the grammar as text that `matcher` reads in any process.

        Args:
            wanted: the form of the output.
            calls: syntax of the tool calls that the model may write instead, or of the call that `wanted` requires.

        Raises:
            InvalidParameter: the form is not supported; the message names the part that is not.
            EngineUnavailable: the check could not be completed.
        """
        ...

    def matcher(self, grammar: str) -> GrammarMatcher:
        """Return a matcher at the beginning of a text.

        Args:
            grammar: text that `compile` returned. The first call for a grammar is slow. To keep an engine from waiting,
                call this earlier from another thread and discard the result.
        """
        ...
