"""Drivers of engines other than llama.cpp for `benchmarks compare`, including ours: one class each.

`driver_loop.py` imports this file in the engine's environment. So it may use the standard library and the engine, but
nothing of twostroke, which the environment lacks (except `Twostroke`, which drives twostroke).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from twostroke.config.load import ActivationQuantization, Quantization
    from twostroke.measure.model_engine import ModelEngine
    from twostroke.measure.peers.drivers.driver_loop import LoadCommand, TokenTime


class Twostroke:
    """Driver of twostroke, with its defaults, but without the prefix cache, which is off for all engines.

    It is driven like any other engine: its own process, the same requests, the same clock.

    Times include the engine's whole step: scheduling, the model, sampling and bookkeeping; no text is made. Weights of
    8 and 4 bits are quantized from the folder while loading; a GGUF file's weights are used as they are. KV is
    bfloat16.
    """

    def __init__(self, order: LoadCommand) -> None:
        """Load the folder or file."""
        import twostroke
        from twostroke.config.cache import CacheConfig
        from twostroke.config.load import LoadConfig
        from twostroke.config.scheduler import SchedulerConfig
        from twostroke.measure.model_engine import model_engine

        quantizations: dict[str, Quantization | None] = {"bf16": None, "gguf": None, "int8": "int8", "int4": "int4"}
        self._engine: ModelEngine = model_engine(
            LoadConfig(
                model=order.model,
                dtype="auto" if order.precision == "gguf" else "bfloat16",
                quantization=quantizations[order.precision],
                activation_quantization=cast("ActivationQuantization | None", order.activation_quantization),
                threads=order.threads,
                max_model_len=order.max_model_len,
            ),
            SchedulerConfig(max_num_seqs=order.max_num_seqs),
            CacheConfig(enable_prefix_caching=False),
        )
        self.about = {"version": twostroke.__version__, "startup": "; ".join(self._engine.startup_lines)}

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[TokenTime]:
        """Run the prompts, which all arrive at once; return the times of their tokens."""
        from twostroke.measure.workload import Workload, WorkloadRequest

        requests = tuple(WorkloadRequest(tuple(prompt), max_tokens) for prompt in prompts)
        run = self._engine.run(Workload(requests))
        return [(time_s, index) for index, served in enumerate(run.requests) for time_s in served.times.token_times_s]


class OpenVINO:
    """Driver of OpenVINO GenAI: its continuous-batching pipeline on the CPU, from a GGUF file.

    Times include the pipeline's whole step: scheduling, the model, sampling and bookkeeping; no text is requested. Its
    prefix cache is off; everything else is its default, including an 8-bit KV cache. OpenVINO converts the types of a
    GGUF file to layouts that its kernels have. It does not read BF16 and gets F16.
    """

    def __init__(self, order: LoadCommand) -> None:
        """Load and compile the model."""
        genai: Any = import_module("openvino_genai")
        openvino: Any = import_module("openvino")
        numpy: Any = import_module("numpy")
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 2  # GiB
        scheduler.max_num_seqs = order.max_num_seqs
        scheduler.enable_prefix_caching = False
        self._pipeline = genai.ContinuousBatchingPipeline(
            order.model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": order.threads}
        )
        self._genai, self._openvino, self._numpy = genai, openvino, numpy
        self._num_requests = 0
        self.about = {"version": str(genai.__version__), "kv_cache": "its default on a CPU, 8 bits"}

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[TokenTime]:
        """Run the prompts, which are all added before the first step; return the times of their tokens."""
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


class VLLM:
    """Driver of vLLM's CPU build: its engine with its defaults, in this process, bfloat16 weights and KV.

    Times include the engine's whole step: scheduling, the model, sampling and bookkeeping; no text is made. Its prefix
    cache is off. Loading includes compilation; a second load finds the result in its cache.
    """

    def __init__(self, order: LoadCommand) -> None:
        """Load the folder; refuse quantized weights, for which it would need other checkpoints."""
        if order.precision != "bf16":
            raise NotImplementedError(f"compared in bf16 only, not in {order.precision}: that needs another checkpoint")
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
        """Run the prompts, which are all added before the first step; return the times of their tokens."""
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


class Transformers:
    """Driver of `transformers.generate`: one static batch, its default attention (sdpa), bfloat16 weights and KV.

    Times include tensor preparation and the whole generate loop. A stopping criterion that never stops observes every
    step and records the times of its tokens. Prompts are equally long, so nothing is padded.
    """

    def __init__(self, order: LoadCommand) -> None:
        """Load the folder; refuse quantized weights, for which it has no fast CPU path."""
        if order.precision != "bf16":
            why = f"compared in bf16 only, not in {order.precision}: it has no own CPU kernels for that"
            raise NotImplementedError(why)
        torch: Any = import_module("torch")
        transformers: Any = import_module("transformers")
        torch.set_num_threads(order.threads)
        transformers.utils.logging.set_verbosity_error()
        self._torch, self._transformers = torch, transformers
        self._model = transformers.AutoModelForCausalLM.from_pretrained(order.model, dtype=torch.bfloat16).eval()
        self.about = {
            "version": f"{transformers.__version__} (torch {torch.__version__})",
            "attention": str(self._model.config._attn_implementation),
        }

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[TokenTime]:
        """Run the prompts as one static batch; return the times of their tokens."""
        torch = self._torch
        times: list[TokenTime] = []
        never = torch.zeros(len(prompts), dtype=torch.bool)

        def note(input_ids: Any, scores: Any, **_: Any) -> Any:
            del input_ids, scores
            now_s = time.perf_counter() - begin_s
            times.extend((now_s, index) for index in range(len(prompts)))
            return never

        begin_s = time.perf_counter()
        with torch.inference_mode():
            input_ids = torch.tensor(prompts)
            self._model.generate(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=self._transformers.StoppingCriteriaList([note]),
            )
        return times
