"""Driver for llama.cpp through llama-cpp-python's C API, from a GGUF file: one context, one batch for all sequences.

Times include filling the batch, `llama_decode`, and picking the largest logit of each row with numpy, which is
faster than llama.cpp's own greedy sampler. Only a prompt's last token gets logits. Flash attention is left to
llama.cpp ("auto"), KV is its default, 16 bits, unified over the sequences. Prompts are cut into batches of 2,048
tokens, computed 512 at a time (its defaults); a batch of decodes holds one token of every sequence.

For `bench quality` it reads a text in batches of 64 tokens, all of which get logits. llama.cpp keeps the logits of a
whole batch: 2,048 rows of a vocabulary of 150,000 would take more than a gigabyte.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twostroke.measure.peers.drivers.driver_loop import LoadCommand, TokenTime

_BATCH = 2048
_SCORED_BATCH = 64


class LlamaCpp:
    """GGUF file loaded by llama.cpp, or by a fork that overrides the methods where its C API differs."""

    binding = "llama_cpp"
    """Module of its C API."""
    engine = "llama.cpp"
    """Name of the engine in errors."""

    def __init__(self, order: LoadCommand) -> None:
        """Load the file, and create a context for all sequences at full length."""
        self._c: Any = import_module(self.binding)
        self._numpy: Any = import_module("numpy")
        c = self._c
        c.llama_backend_init()
        self._model: Any = c.llama_model_load_from_file(order.model.encode(), self._model_params())
        if not self._model:
            raise RuntimeError(f"{self.engine} cannot load {order.model}")
        params = c.llama_context_default_params()
        params.n_ctx = order.max_model_len * order.max_num_seqs
        params.n_batch = _BATCH
        params.n_seq_max = order.max_num_seqs
        params.n_threads = params.n_threads_batch = order.threads
        self._share_kv_cache(params)
        if order.kv_cache_dtype is not None:
            params.type_k = params.type_v = getattr(c, f"GGML_TYPE_{order.kv_cache_dtype.upper()}")
        self._context: Any = c.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"{self.engine} cannot create a context of {params.n_ctx} tokens")
        self._vocab_size: int = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self._model))
        self._batch: Any = c.llama_batch_init(_BATCH, 0, 1)
        self.about = self._about()

    def _model_params(self) -> Any:
        params = self._c.llama_model_default_params()
        params.n_gpu_layers = 0
        return params

    def _share_kv_cache(self, params: Any) -> None:
        """Set the options that let all sequences share one KV cache."""
        params.kv_unified = True

    def _clear_kv(self) -> None:
        """Clear the KV cache."""
        self._c.llama_memory_clear(self._c.llama_get_memory(self._context), False)

    def _about(self) -> dict[str, str]:
        return {"version": str(self._c.__version__), "system": self._c.llama_print_system_info().decode()}

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[TokenTime]:
        """Compute the prompts in as few batches as possible, then one batch per step."""
        begin_s = time.perf_counter()
        self._clear_kv()
        times: list[TokenTime] = []
        last: dict[int, int] = {}
        work = [
            (token, position, index, position == len(prompt) - 1)
            for index, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        for begin in range(0, len(work), _BATCH):
            found = self._decode(work[begin : begin + _BATCH])
            last |= found
            now_s = time.perf_counter() - begin_s
            times += [(now_s, index) for index in found]
        for step in range(max_tokens - 1):
            last = self._decode([(token, len(prompts[index]) + step, index, True) for index, token in last.items()])
            now_s = time.perf_counter() - begin_s
            times += [(now_s, index) for index in last]
        return times

    def score(self, token_ids: Sequence[int], first: int, path: str) -> int:
        self._clear_kv()
        work = [(token, place, 0, place + 1 >= first) for place, token in enumerate(token_ids[:-1])]
        num_rows = 0
        with open(path, "wb") as file:
            for begin in range(0, len(work), _SCORED_BATCH):
                some = work[begin : begin + _SCORED_BATCH]
                self._compute(some)
                for i, (_, _, _, wants_logits) in enumerate(some):
                    if wants_logits:
                        file.write(self._logits(i).tobytes())
                        num_rows += 1
        return num_rows

    def _decode(self, work: Sequence[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Compute one batch of (token, position, sequence, wants logits); return the next token of each that wants
        logits."""
        self._compute(work)
        wanting = ((i, sequence) for i, (_, _, sequence, wants_logits) in enumerate(work) if wants_logits)
        return {sequence: int(self._logits(i).argmax()) for i, sequence in wanting}

    def _compute(self, work: Sequence[tuple[int, int, int, bool]]) -> None:
        c, batch = self._c, self._batch
        batch.n_tokens = len(work)
        for i, (token, position, sequence, wants_logits) in enumerate(work):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = wants_logits
        code = c.llama_decode(self._context, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode of {len(work)} tokens returned {code}")

    def _logits(self, i: int) -> Any:
        """Return the logits of the last batch's i-th token: float32 [vocab_size], valid until the next batch."""
        logits = self._c.llama_get_logits_ith(self._context, i)
        return self._numpy.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self._vocab_size,))


class IkLlamaCpp(LlamaCpp):
    """GGUF file loaded by ik_llama.cpp through ik-llama-cpp-python's C API, with weights repacked on load.

    Users on a CPU run repacked weights (`-rtr`); the file is then read rather than mapped, as ik_llama.cpp itself
    does. Its KV cache is always shared by all sequences. Flash attention is off: it ends the process if a batch
    holds several sequences ("S > 0 failed", version 0.1.5), and was no faster for one.
    """

    binding = "ik_llama_cpp._ctypes_api"
    engine = "ik_llama.cpp"

    def _model_params(self) -> Any:
        params = super()._model_params()
        params.repack_tensors = True
        params.use_mmap = False
        return params

    def _share_kv_cache(self, params: Any) -> None:
        params.flash_attn = False

    def _clear_kv(self) -> None:
        self._c.llama_kv_cache_clear(self._context)

    def _about(self) -> dict[str, str]:
        return {"version": version("ik-llama-cpp-python")}
