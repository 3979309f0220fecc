"""Windows of a text, in an order that follows from a seed, so that a run can be resumed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twostroke.errors import InvalidParameter
from twostroke.plain_words import reason_of
from twostroke.tokenizer.tokenizer import Tokenizer

MIN_TOKENS = 64
"""Fewest tokens of a text; a shorter one is too short to learn from."""


def read_tokens(path: Path, tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    """Return the token ids of a UTF-8 file.

    Raises:
        InvalidParameter: there is no such file, it is not UTF-8, or the text is too short.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InvalidParameter("data", str(path), "there is no such file", "Give a file of UTF-8 text.") from None
    except (OSError, UnicodeDecodeError) as error:
        limit = f"cannot be read as UTF-8 text ({reason_of(error)})"
        raise InvalidParameter("data", str(path), limit, "Give a file of UTF-8 text.") from error
    token_ids = np.array(tokenizer.encode(text, add_special_tokens=False), np.int64)
    if len(token_ids) < MIN_TOKENS:
        limit = f"has {len(token_ids)} tokens; at least {MIN_TOKENS} are needed"
        raise InvalidParameter(
            "data", str(path), limit, "Give a longer text, of the kind that the model should generate."
        )
    return token_ids


class Windows:
    """Batches of windows; each epoch cuts the text at other places and visits the windows in another order."""

    def __init__(
        self, token_ids: npt.NDArray[np.int64], window: int, seed: int, place: tuple[int, int] = (0, 0)
    ) -> None:
        """Continue at `place`, an (epoch, cursor) that the property `place` returned."""
        assert len(token_ids) >= window, (len(token_ids), window)
        self._token_ids, self._window, self._seed = token_ids, window, seed
        self._epoch, self._cursor = place
        self._starts = self._cut()

    @property
    def place(self) -> tuple[int, int]:
        """Position in the text: all that a checkpoint has to keep."""
        return self._epoch, self._cursor

    def _cut(self) -> npt.NDArray[np.int64]:
        rng = np.random.default_rng((self._seed, self._epoch))
        spare = len(self._token_ids) - self._window
        first = int(rng.integers(min(spare, self._window - 1) + 1))
        return rng.permutation(np.arange(first, spare + 1, self._window))

    def next(self, count: int) -> Tensor:
        """Return the next windows: [count, window] int64."""
        rows: list[npt.NDArray[np.int64]] = []
        while len(rows) < count:
            if self._cursor >= len(self._starts):
                self._epoch, self._cursor = self._epoch + 1, 0
                self._starts = self._cut()
            start = self._starts[self._cursor]
            rows.append(self._token_ids[start : start + self._window])
            self._cursor += 1
        return torch.from_numpy(np.stack(rows))
