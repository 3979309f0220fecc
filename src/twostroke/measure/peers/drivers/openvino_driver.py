"""OpenVINO GenAI: its continuous-batching pipeline on the CPU, from a GGUF file.

Times include the pipeline's whole step: scheduling, the model, sampling and bookkeeping; no text is asked for. Its
prefix cache is off; everything else is its default, the KV cache of 8 bits included. What OpenVINO makes of a GGUF
file's types is its own affair: it converts them to layouts that its kernels have. It reads no BF16 and gets F16.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from .driver_loop import LoadOrder, TokenTime, serve

_KV_CACHE_GIB = 2


class OpenVINO:
    """A GGUF file loaded by OpenVINO GenAI."""

    def __init__(self, order: LoadOrder) -> None:
        """Loads and compiles."""
        genai: Any = import_module("openvino_genai")
        openvino: Any = import_module("openvino")
        numpy: Any = import_module("numpy")
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = _KV_CACHE_GIB
        scheduler.max_num_seqs = order.max_num_seqs
        scheduler.enable_prefix_caching = False
        self._pipeline = genai.ContinuousBatchingPipeline(
            order.model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": order.threads}
        )
        self._genai, self._openvino, self._numpy = genai, openvino, numpy
        self._num_requests = 0
        self.about = {"version": str(genai.__version__), "kv_cache": "its default on a CPU, 8 bits"}

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[TokenTime]:
        """All of them are added before the first step."""
        config = self._genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.min_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        times: list[TokenTime] = []
        begin_s = time.perf_counter()
        handles: list[Any] = []
        for prompt in prompts:
            self._num_requests += 1
            input_ids = self._openvino.Tensor(self._numpy.array([prompt], dtype=self._numpy.int64))
            handles.append(self._pipeline.add_request(self._num_requests, input_ids, config))
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now_s = time.perf_counter() - begin_s
            for index, handle in enumerate(handles):
                while handle.can_read():
                    (output,) = handle.read().values()
                    times += [(now_s, index)] * len(output.generated_ids)
        return times


def main() -> None:
    """Serves."""
    serve(OpenVINO)
