"""The prompts: pieces of a text, the embedded code's by default."""

from __future__ import annotations

from pathlib import Path
from random import Random

from twostroke.errors import InvalidParameter
from twostroke.measure.spec.measure import PromptIds, prompts
from twostroke.tokenizer.tokenizer import Tokenizer


def pieces(
    data: Path | None, count: int, length: int, tokenizer: Tokenizer, vocab_size: int, seed: int
) -> list[PromptIds]:
    """So many prompts of so many token ids each, from places that the seed draws.

    Raises:
        InvalidParameter: the text cannot be read, or no text is as long as a prompt.
    """
    if data is None:
        return prompts("code", count, length, tokenizer, vocab_size, seed, "context_tokens")
    ids = tokenizer.encode(_read(data), add_special_tokens=False)
    if len(ids) < length:
        limit = f"has {len(ids)} tokens; a prompt has {length}"
        raise InvalidParameter("data", str(data), limit, "Give a longer text, or a smaller --context-tokens.")
    dice = Random(seed)
    begins = [dice.randrange(len(ids) - length + 1) for _ in range(count)]
    return [tuple(ids[begin : begin + length]) for begin in begins]


def _read(data: Path) -> str:
    try:
        return data.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InvalidParameter("data", str(data), f"cannot be read ({reason})", "Give a UTF-8 text.") from error
