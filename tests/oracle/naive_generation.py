"""The article's loop: encode, forward with past_key_values, arg-max, append, test for the end, decode."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from twostroke.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class NaiveGeneration:
    """The loop's result, and the tokens that the model got in each pass."""

    token_ids: list[int]
    text: str
    tokens_per_pass: list[int]


@torch.no_grad()
def generate_naive(
    model: Any, tokenizer: Tokenizer, prompt: str, *, max_tokens: int, eos_token_ids: Collection[int] = ()
) -> NaiveGeneration:
    """Generate greedily with transformers' model and its KV cache; one prompt at a time.

    Two things differ from what the article prints. The end token is among the ids, as in the article, but not in the
    text. The next input is [[token]], which the article's `unsqueeze(0)` makes for a batch of one only.
    """
    input_ids = torch.tensor([tokenizer.encode(prompt)])
    past_key_values = None
    generated: list[int] = []
    tokens_per_pass: list[int] = []
    for _ in range(max_tokens):
        outputs = model(input_ids=input_ids, past_key_values=past_key_values, use_cache=True)
        tokens_per_pass.append(input_ids.shape[1])
        next_token = int(torch.argmax(outputs.logits[0, -1]))
        generated.append(next_token)
        past_key_values = outputs.past_key_values
        input_ids = torch.tensor([[next_token]])
        if next_token in eos_token_ids:
            return NaiveGeneration(generated, tokenizer.decode(generated[:-1]), tokens_per_pass)
    return NaiveGeneration(generated, tokenizer.decode(generated), tokens_per_pass)
