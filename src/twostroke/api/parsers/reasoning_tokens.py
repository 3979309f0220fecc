"""Number of reasoning tokens of a generation."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class ReasoningTokens:
    """Counter of the tokens that begin within reasoning, its tags included.

    Token texts and tag positions may come in any order; the count is the same whether a generation is read at once or
    streamed. Positions are characters of the raw text.
    """

    def __init__(self) -> None:
        self._starts: deque[int] = deque()
        """Start positions of tokens that are not yet classified."""
        self._boundaries: deque[tuple[int, bool]] = deque()
        """Positions where reasoning begins or ends, and whether the text before is reasoning."""
        self._num_counted = 0
        self._num_chars = 0
        self._is_inside = False
        self._is_over = False

    def begin(self, place: int) -> None:
        """Record that reasoning begins here."""
        self._boundaries.append((place, False))
        self._is_inside = True

    def end(self, place: int) -> None:
        """Record that the current reasoning ends here."""
        self._boundaries.append((place, True))
        self._is_inside = False

    def close(self) -> None:
        """Record that no more reasoning begins."""
        self._is_over = True

    def take(self, token_texts: Iterable[str]) -> None:
        """Take the texts that the next tokens add; nothing is read once no further token can be reasoning."""
        if self._is_settled:
            return
        for text in token_texts:
            self._starts.append(self._num_chars)
            self._num_chars += len(text)
            self._settle()
            if self._is_settled:
                self._starts.clear()
                return

    @property
    def num_tokens(self) -> int:
        """Reasoning tokens so far; 0 until it is known that there is reasoning."""
        self._settle()
        return self._num_counted + (len(self._starts) if self._is_inside else 0)

    @property
    def _is_settled(self) -> bool:
        return self._is_over and not self._is_inside and not self._boundaries

    def _settle(self) -> None:
        while self._starts and self._boundaries:
            place, is_reasoning = self._boundaries[0]
            if self._starts[0] < place:
                self._starts.popleft()
                self._num_counted += is_reasoning
            else:
                self._boundaries.popleft()
