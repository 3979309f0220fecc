"""transformers, for comparison.

`generate`             same folder, prompts, element type and threads; its fastest settings without extras
continuous batching    same shape, prompts, lengths, element type and slots
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from twostroke.errors import EngineError, SetupError
from twostroke.log import get_logger
from twostroke.plain_words import reason_of

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
        """Run static batches in order, each until its longest output is complete; return the seconds.

        Greedy, left-padded, with its KV cache. End-of-text tokens do not end a sequence, because the minimum number of
        tokens equals the maximum. Tokens that a shorter request generates beyond its length are the cost of a static
        batch.
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
    """Try its attention implementations on a sample; return the faster one, and the seconds of each."""
    peers = {name: TransformersPeer(folder, dtype, name) for name in ("eager", "sdpa")}
    for peer in peers.values():
        peer.run_static(prompts[:1], [4], 1)  # one-time set-up
    seconds = {name: peer.run_static(prompts, max_tokens, batch_size) for name, peer in peers.items()}
    return min(peers.values(), key=lambda peer: seconds[peer.attention]), seconds


log = get_logger(__name__)

_LONGEST_S, _ENOUGH_S = 100.0, 50.0
"""Longest time of a round, and total time after which no other one begins, in seconds: a peer that hangs, or is slow,
must not prevent the other figures."""
_WARM_UP_TOKENS = 8
"""Output tokens of each request of the warm-up. It has one request per slot. A whole round took too long on an H200."""


@contextmanager
def without_cudnn_attention() -> Generator[None]:
    """Keep torch's attention from calling cuDNN, in all threads: on an H200 (torch 2.11) cuDNN failed on the masks of
    transformers' continuous batching, with `mha_graph.execute(...).is_good()`."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


class TransformersBatching:
    """A model with transformers' continuous batching.

    Args:
        folder: model folder; with config.json alone its weights are random.
        dtype: name of the element type.
        device: device to run on.
        memory: settings of its KV cache, if it cannot choose them itself.

    Raises:
        SetupError: transformers is not installed, or too old for continuous batching.
    """

    def __init__(self, folder: Path, dtype: str, device: str, memory: dict[str, int] | None = None) -> None:
        try:
            import transformers
            from transformers.generation.continuous_batching.utils import WorkloadHints
        except ImportError as error:
            raise SetupError("the comparison needs transformers with continuous batching (5.0 or newer).") from error
        transformers.utils.logging.set_verbosity_error()
        auto: Any = transformers.AutoModelForCausalLM
        kind: Any = getattr(torch, dtype)
        if any(folder.glob("*.safetensors")):
            model = auto.from_pretrained(folder, dtype=kind, attn_implementation="sdpa").to(device)
        else:
            config: Any = transformers.AutoConfig.from_pretrained(folder)
            with torch.device(device):
                model = auto.from_config(config, dtype=kind, attn_implementation="sdpa")
        self._model = model.eval()
        self._transformers: Any = transformers
        self._hints: Any = WorkloadHints
        self._memory = memory or {}
        self.version: str = transformers.__version__
        self.attention = ""
        """Attention implementation that it chose, once it has run."""

    def best_s(self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], num_slots: int, rounds: int) -> float:
        """Return the seconds from the first request to the last answer; all requests are submitted at once.

        The fastest of several rounds counts, after a short warm-up. There are fewer rounds if they take long.

        Args:
            prompts: token ids.
            max_tokens: output tokens of each; the end of the text is ignored.
            num_slots: requests in a batch at most.
            rounds: measured rounds at most.

        Raises:
            EngineError: it ended, hung, or gave other numbers of tokens.
        """
        with without_cudnn_attention():
            try:
                return self._best_s(prompts, max_tokens, num_slots, rounds)
            except EngineError:
                raise
            except Exception as error:  # its flash attention may need a download
                log.warning(
                    "transformers failed with its default attention (%s); trying without flash", reason_of(error)
                )
                return self._best_s(prompts, max_tokens, num_slots, rounds, auto_switch_to_flash=False)

    def _best_s(
        self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], num_slots: int, rounds: int, **choices: Any
    ) -> float:
        make: Any = self._transformers.ContinuousBatchingConfig
        greedy: Any = self._transformers.GenerationConfig(
            do_sample=False, eos_token_id=-1, max_new_tokens=max(max_tokens)
        )
        # as for ours: no prompt is cached from the previous round
        settings: Any = make(max_requests_per_batch=num_slots, allow_block_sharing=False, **self._memory, **choices)
        # the hints that its `generate_batch` gives, so that it can size its fast path
        hints = self._hints(
            max_prompt_length=max(map(len, prompts)),
            max_generated_length=max(max_tokens),
            num_requests=min(num_slots, len(prompts)),
        )
        with self._model.continuous_batching_context_manager(
            generation_config=greedy, continuous_batching_config=settings, workload_hints=hints
        ) as manager:
            self.attention = str(self._model.config._attn_implementation)
            self._run(manager, prompts[:num_slots], [min(most, _WARM_UP_TOKENS) for most in max_tokens[:num_slots]])
            seconds: list[float] = []
            while len(seconds) < rounds and sum(seconds) < _ENOUGH_S:
                seconds.append(self._run(manager, prompts, max_tokens))
            return min(seconds)

    @staticmethod
    def _run(manager: Any, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]) -> float:
        begin_s = time.perf_counter()
        wanted = {
            manager.add_request(list(prompt), max_new_tokens=most): most
            for prompt, most in zip(prompts, max_tokens, strict=True)
        }
        while wanted:
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running() or time.perf_counter() - begin_s > _LONGEST_S:
                    raise EngineError(f"transformers' continuous batching stopped with {len(wanted)} requests open.")
            elif result.is_finished():
                most = wanted.pop(result.request_id)
                if result.error is not None or len(result.generated_tokens) != most:
                    said = result.error or f"{len(result.generated_tokens)} tokens of {most}"
                    raise EngineError(f"transformers' continuous batching: {said}.")
        return time.perf_counter() - begin_s

    def close(self) -> None:
        """Release the model's memory."""
        del self._model
