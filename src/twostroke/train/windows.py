"""A text cut into windows, in an order that follows from a seed, so that a run can be resumed."""

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
"""Below, there is nothing to learn from."""


def read_tokens(path: Path, tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    """The token ids of a UTF-8 file.

    Raises:
        InvalidParameter: no such file, one that is not UTF-8, or too short a text.
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
        raise InvalidParameter("data", str(path), limit, "Give a longer text, like what the model is to write.")
    return token_ids


class Windows:
    """Batches of windows; each epoch cuts the text from another place and goes through it in another order."""

    def __init__(
        self, token_ids: npt.NDArray[np.int64], window: int, seed: int, place: tuple[int, int] = (0, 0)
    ) -> None:
        """Goes on at `place`, an (epoch, cursor) that `place` gave before."""
        assert len(token_ids) >= window, (len(token_ids), window)
        self._token_ids, self._window, self._seed = token_ids, window, seed
        self._epoch, self._cursor = place
        self._starts = self._cut()

    @property
    def place(self) -> tuple[int, int]:
        """All that a checkpoint has to keep."""
        return self._epoch, self._cursor

    def _cut(self) -> npt.NDArray[np.int64]:
        rng = np.random.default_rng((self._seed, self._epoch))
        spare = len(self._token_ids) - self._window
        first = int(rng.integers(min(spare, self._window - 1) + 1))
        return rng.permutation(np.arange(first, spare + 1, self._window))

    def next(self, count: int) -> Tensor:
        """[count, window] int64."""
        rows: list[npt.NDArray[np.int64]] = []
        while len(rows) < count:
            if self._cursor >= len(self._starts):
                self._epoch, self._cursor = self._epoch + 1, 0
                self._starts = self._cut()
            start = self._starts[self._cursor]
            rows.append(self._token_ids[start : start + self._window])
            self._cursor += 1
        return torch.from_numpy(np.stack(rows))
