"""What is wrong with a parameter, told by the name that the client knows it by."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping

from twostroke.errors import InvalidParameter

Words = Mapping[str, str]
"""Names of a chat's parameters to those of another API."""


@contextlib.contextmanager
def in_words(words: Words) -> Generator[None]:
    """Raise what is wrong with a parameter as said of the client's own.

    Args:
        words: names that differ.

    Raises:
        InvalidParameter: as the block does, by the client's name.
    """
    try:
        yield
    except InvalidParameter as error:
        if error.name not in words:
            raise
        raise InvalidParameter(words[error.name], error.value, error.limit, error.remedy) from error
