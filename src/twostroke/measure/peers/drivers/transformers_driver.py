"""`transformers.generate`: one static batch, its default attention (sdpa), bfloat16 weights and KV.

Times include tensor preparation and the whole generate loop; a stopping criterion that never stops sees every step, and
is where a step's tokens are counted as there. Prompts are equally long, so nothing is padded.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from .driver_loop import LoadOrder, TokenTime, Unsupported, serve


class Transformers:
    """A model folder loaded by transformers."""

    def __init__(self, order: LoadOrder) -> None:
        """Loads the folder; refuses quantized weights, which it has no fast CPU path for."""
        if order.precision != "bf16":
            raise Unsupported(f"compared in bf16 only, not in {order.precision}: it has no own CPU kernels for that")
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
        """One static batch."""
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


def main() -> None:
    """Serves."""
    serve(Transformers)
