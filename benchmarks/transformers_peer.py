"""`transformers.generate` as a peer: the same folder, prompts, element type and threads, its best plain settings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from twostroke.errors import SetupError

Attention = Literal["eager", "sdpa"]


class TransformersPeer:
    """A model loaded by transformers.

    Args:
        folder: model folder.
        dtype: name of the element type.
        attention: its attention implementation.

    Raises:
        SetupError: transformers is not installed.
    """

    def __init__(self, folder: Path, dtype: str, attention: Attention) -> None:
        try:
            import transformers
        except ImportError as error:
            raise SetupError(
                "the comparison needs transformers, which is not installed (pip install 'twostroke[dev]')."
            ) from error
        transformers.utils.logging.set_verbosity_error()
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation=attention
        )
        self._model = model.eval()
        self.attention = attention

    def run_static(self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], batch_size: int) -> float:
        """Static batches in order: each runs until its longest output is there. Returns seconds.

        Greedy, left-padded, with its KV cache. The end of the text is ignored, by asking for as many tokens at least as
        at most; what a shorter request generates beyond its length is the price of a static batch.
        """
        begin_s = time.perf_counter()
        for begin in range(0, len(prompts), batch_size):
            self._batch(prompts[begin : begin + batch_size], max(max_tokens[begin : begin + batch_size]))
        return time.perf_counter() - begin_s

    @torch.inference_mode()
    def _batch(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        longest = max(len(prompt) for prompt in prompts)
        padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        masks = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        output = self._model.generate(
            input_ids=torch.tensor(padded),
            attention_mask=torch.tensor(masks),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        assert output.shape == (len(prompts), longest + num_tokens), f"{tuple(output.shape)}"


def fastest_peer(
    folder: Path, dtype: str, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], batch_size: int
) -> tuple[TransformersPeer, dict[str, float]]:
    """Tries its attention implementations on a sample; returns the faster one, and the seconds of each."""
    peers = {name: TransformersPeer(folder, dtype, name) for name in ("eager", "sdpa")}
    for peer in peers.values():
        peer.run_static(prompts[:1], [4], 1)  # whatever it sets up on first use
    seconds = {name: peer.run_static(prompts, max_tokens, batch_size) for name, peer in peers.items()}
    return min(peers.values(), key=lambda peer: seconds[peer.attention]), seconds
