"""How many tokens of a generation are reasoning."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class ReasoningTokens:
    """Counts the tokens that begin within reasoning, its tags among them.

    Texts of tokens and places of tags may come in any order: the count is the same whether a generation is read at once
    or as it comes. Places are characters of the raw text.
    """

    def __init__(self) -> None:
        self._starts: deque[int] = deque()
        """Places where tokens begin of which it is not known what they are."""
        self._boundaries: deque[tuple[int, bool]] = deque()
        """Places where reasoning begins or ends, and whether the text before is reasoning."""
        self._num_counted = 0
        self._num_chars = 0
        self._is_inside = False
        self._is_over = False

    def begin(self, place: int) -> None:
        """Note that reasoning begins here."""
        self._boundaries.append((place, False))
        self._is_inside = True

    def end(self, place: int) -> None:
        """Note that the reasoning that began last ends here."""
        self._boundaries.append((place, True))
        self._is_inside = False

    def close(self) -> None:
        """Note that no more reasoning begins."""
        self._is_over = True

    def take(self, token_texts: Iterable[str]) -> None:
        """Take what the next tokens add to the text; nothing is read where no token can be reasoning any more."""
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
        """Tokens so far; 0 before it is known that there is reasoning."""
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
