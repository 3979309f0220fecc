"""What the rest of the engine knows of grammars, whoever implements them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from twostroke.sampling_params import StructuredOutputs

TokenBits = NDArray[np.int32]
"""A bit for each column of the logits: token i is bit i % 32, from the lowest, of word i // 32. [ceil(V / 32)]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeCalls:
    """How a model writes tool calls that it is free to make, where its answer otherwise has a form."""

    markers: tuple[str, ...] = ()
    """Texts of which one stands before calls."""
    markup: tuple[str, ...] = ()
    """Texts within and behind calls that may be special tokens, as the markers may be."""
    bare: Mapping[str, Any] | None = None
    """JSON schema of a call without a marker."""
    beginning: str = ""
    """Lark rules, `beginning` first, of a marker and what follows it until it is certain that this is a call; without
    them the marker alone decides. Markers and markup stand in it as JSON writes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredCall:
    """How a model writes a call that it must make, where that is not JSON alone."""

    rules: str
    """Lark rules, `start` first. Markup stands in them as JSON writes it, and `@NAME` for arguments."""
    schemas: Mapping[str, Mapping[str, Any]]
    """JSON schema of the arguments, by that name."""
    markup: tuple[str, ...]
    """Texts in the rules for which special tokens are written where the model has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCalls:
    """The same in texts and tokens of one model."""

    markers: tuple[str, ...]
    first_tokens: frozenset[int]
    """Special tokens that are markers, by their ids at the beginning of a text."""
    tokens: frozenset[int]
    """Special tokens within and behind calls."""
    bare: Mapping[str, Any] | None
    beginning: str


class GrammarMatcher(Protocol):
    """How far one generated sequence has come in its grammar: a function of the tokens that it accepted."""

    def fill_mask(self, bits: TokenBits) -> None:
        """Says which tokens may come next: bits that are set. End-of-text tokens may where the text may end here.

        None may after a token that was not allowed, or when the grammar has outgrown its limits (`failure`).
        """
        ...

    def accept(self, token_id: int) -> None:
        """Takes the next token."""
        ...

    def copy(self) -> GrammarMatcher:
        """An independent one; drafts are tried on copies, which cost less than what it takes to roll back."""
        ...

    @property
    def is_accepting(self) -> bool:
        """Whether the text may end here."""
        ...

    @property
    def failure(self) -> str:
        """Why no token may come; empty while one may."""
        ...


class GrammarBackend(Protocol):
    """Makes matchers for one model; safe to share between threads."""

    def warm_up(self) -> None:
        """Does now what the first grammar would wait for; a server does, whose other requests would wait with it."""
        ...

    def compile(self, wanted: StructuredOutputs, calls: FreeCalls | RequiredCall | None = None) -> str:
        """Checks what a request wants, and writes it as `matcher` reads it, here or in another process.

        Args:
            wanted: the form of the output.
            calls: tool calls that the model may make instead, or how it writes the call that `wanted` requires.

        Raises:
            InvalidParameter: it cannot be followed; the message names what is not supported.
            EngineUnavailable: whether it can was not found out.
        """
        ...

    def matcher(self, grammar: str) -> GrammarMatcher:
        """A matcher at the beginning of a text.

        Args:
            grammar: what `compile` made. The first time takes a while, so whoever receives requests for an engine that
                must not wait may ask for a matcher in a thread of its own, and throw it away.
        """
        ...
