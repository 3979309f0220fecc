"""Log-probabilities in the formats of the completions and chat APIs."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

import msgspec

from twostroke.outputs import Logprob, LogprobsAtPosition, RequestOutput
from twostroke.tokenizer.tokenizer import Tokenizer

MAX_ON_EVENT_LOOP = 64
"""Positions whose log-probabilities are encoded on the event loop; with 20 each that takes some milliseconds."""


class CompletionLogprobs:
    """Writer of a completion's four parallel lists, for one choice; `text_offset` continues across chunks.

    Args:
        tokenizer: tokenizer of the model.
        as_token_ids: whether tokens are written as token_id:42.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_token_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_token_ids = as_token_ids
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        """Decoder of characters that span several tokens."""

    def of(
        self, token_ids: Sequence[int], entries: Sequence[LogprobsAtPosition | None], num_top: int
    ) -> dict[str, Any]:
        """Return the lists for these tokens; the first token of a prompt has no entry.

        The token itself is always among its top ones, with the identical number. Evaluation harnesses compare the two
        to see whether the token was the most likely one.
        """
        tokens: list[str] = []
        offsets: list[int] = []
        for token_id in token_ids:
            text = self._tokenizer.decoded_token(token_id)
            tokens.append(self._name(token_id, text))
            offsets.append(self._offset)
            self._offset += self._num_characters(token_id, text)
        return {
            "tokens": tokens,
            "token_logprobs": [
                None if entry is None else entry[token_id].logprob
                for token_id, entry in zip(token_ids, entries, strict=True)
            ],
            "top_logprobs": [
                None if entry is None else self._top(token_id, entry, num_top)
                for token_id, entry in zip(token_ids, entries, strict=True)
            ],
            "text_offset": offsets,
        }

    def _num_characters(self, token_id: int, text: str) -> int:
        """Return the number of characters that end with this token."""
        if "\N{REPLACEMENT CHARACTER}" in text:
            return len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        unfinished = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return len(unfinished) + len(text)

    def _top(self, token_id: int, entry: LogprobsAtPosition, num_top: int) -> dict[str, float]:
        likely = sorted((i for i in entry if entry[i].rank <= num_top), key=lambda i: entry[i].rank)
        top = {self._name(i, entry[i].decoded_token): entry[i].logprob for i in likely if i != token_id}
        # last: if two tokens have the same text, the sampled token's number must win
        top[self._name(token_id, entry[token_id].decoded_token)] = entry[token_id].logprob
        return top

    def _name(self, token_id: int, text: str) -> str:
        return f"token_id:{token_id}" if self._as_token_ids else text


def chat_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[LogprobsAtPosition],
    num_top: int,
    tokenizer: Tokenizer,
    *,
    as_token_ids: bool,
) -> dict[str, Any]:
    """Return the logprobs object of a chat choice."""

    def written(token_id: int, logprob: Logprob) -> dict[str, Any]:
        token = f"token_id:{token_id}" if as_token_ids else logprob.decoded_token
        return {"token": token, "logprob": logprob.logprob, "bytes": list(tokenizer.token_bytes(token_id))}

    content: list[dict[str, Any]] = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        likely = sorted((i for i in entry if entry[i].rank <= num_top), key=lambda i: entry[i].rank)
        top = [written(i, entry[i]) for i in likely]
        content.append({**written(token_id, entry[token_id]), "top_logprobs": top})
    return {"content": content, "refusal": None}


def prompt_logprobs(entries: Sequence[LogprobsAtPosition | None] | None) -> list[msgspec.Raw | None] | None:
    """Return log-probabilities of a prompt's tokens by token id, in vLLM's format.

    Each position is encoded by itself, so that the entries of a long prompt are never all in memory.
    """
    return None if entries is None else [None if entry is None else _written(entry) for entry in entries]


def _written(entry: LogprobsAtPosition) -> msgspec.Raw:
    named = {
        str(token_id): {"logprob": of.logprob, "rank": of.rank, "decoded_token": of.decoded_token}
        for token_id, of in entry.items()
    }
    return msgspec.Raw(msgspec.json.encode(named))


def takes_long(output: RequestOutput) -> bool:
    """Return whether encoding its log-probabilities would block the event loop for long."""
    longest = max((len(part.logprobs or ()) for part in output.outputs), default=0)
    return max(longest, len(output.prompt_logprobs or ())) > MAX_ON_EVENT_LOOP


def as_written(logprobs: dict[str, Any] | None, num_positions: int) -> dict[str, Any] | msgspec.Raw | None:
    """Return log-probabilities as encoded JSON if they are many, so that the response encoder has no work with them."""
    return msgspec.Raw(msgspec.json.encode(logprobs)) if num_positions > MAX_ON_EVENT_LOOP else logprobs
