"""vLLM's CPU build: its engine with its defaults, in this process, bfloat16 weights and KV.

Times include the engine's whole step: scheduling, the model, sampling and bookkeeping; no text is made. Its prefix
cache is off. Loading includes what it compiles; a second load finds that in its cache.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from .driver_loop import LoadOrder, TokenTime, Unsupported, serve


class VLLM:
    """A model folder loaded by vLLM."""

    def __init__(self, order: LoadOrder) -> None:
        """Loads the folder; refuses quantized weights, which it would need other checkpoints for."""
        if order.precision != "bf16":
            raise Unsupported(f"compared in bf16 only, not in {order.precision}: that needs another checkpoint")
        settings = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB; more than these workloads need
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{order.threads - 1}",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "OMP_NUM_THREADS": str(order.threads),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        os.environ.update(settings)  # noqa: TID251 (vLLM takes these in no other way)
        vllm: Any = import_module("vllm")
        self._params: Any = vllm.SamplingParams
        self._engine: Any = vllm.LLM(
            model=order.model,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=order.max_model_len,
            max_num_seqs=order.max_num_seqs,
            enable_prefix_caching=False,
        ).llm_engine
        self._num_runs = 0
        self.about = {"version": str(vllm.__version__)}

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[TokenTime]:
        """All of them are added before the first step."""
        self._num_runs += 1
        params = self._params(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        times: list[TokenTime] = []
        made = [0] * len(prompts)
        begin_s = time.perf_counter()
        for index, prompt in enumerate(prompts):
            self._engine.add_request(f"{self._num_runs}-{index}", {"prompt_token_ids": list(prompt)}, params)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now_s = time.perf_counter() - begin_s
            for output in outputs:
                index = int(output.request_id.split("-")[1])
                count = len(output.outputs[0].token_ids)  # all so far
                times += [(now_s, index)] * (count - made[index])
                made[index] = count
        return times


def main() -> None:
    """Serves."""
    serve(VLLM)
