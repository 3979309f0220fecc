"""Twostroke, driven like any other engine: a process of its own, the same orders, the same clock.

Times include the engine's whole step: scheduling, the model, sampling and bookkeeping; no text is made. Weights of 8
and 4 bits are quantized from the folder while loading; those of a GGUF file are what they are. KV is bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from .driver_loop import LoadOrder, TokenTime, serve

if TYPE_CHECKING:
    from twostroke.config.load import ActivationQuantization, Quantization
    from twostroke.measure.model_engine import ModelEngine


class Twostroke:
    """The engine with its defaults, but for the prefix cache, which is off for everybody."""

    def __init__(self, order: LoadOrder) -> None:
        """Load the folder or file."""
        import twostroke
        from twostroke.config.cache import CacheConfig
        from twostroke.config.load import LoadConfig
        from twostroke.config.scheduler import SchedulerConfig
        from twostroke.measure.model_engine import model_engine

        quantizations: dict[str, Quantization | None] = {
            "bf16": None,
            "gguf": None,
            "int8": "int8",
            "int4": "int4",
        }
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
        """All of them arrive at once."""
        from twostroke.measure.workload import Workload, WorkloadRequest

        requests = tuple(WorkloadRequest(tuple(prompt), max_tokens) for prompt in prompts)
        run = self._engine.run(Workload(requests))
        return [(time_s, index) for index, served in enumerate(run.requests) for time_s in served.times.token_times_s]


def main() -> None:
    """Serves."""
    serve(Twostroke)
