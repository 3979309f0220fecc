"""ik_llama.cpp through ik-llama-cpp-python's C API: as llama_cpp_driver.py, with weights repacked at load.

Repacked weights are what its users on a CPU run (`-rtr`); the file is then read rather than mapped, as it does itself.
Its KV cache is always one for all sequences. Its flash attention ends the process where a batch holds several of them
("S > 0 failed", version 0.1.5), and was no faster for one: it is off.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from .driver_loop import serve
from .llama_cpp_driver import LlamaCpp


class IkLlamaCpp(LlamaCpp):
    """A GGUF file loaded by ik_llama.cpp."""

    binding = "ik_llama_cpp._ctypes_api"
    engine = "ik_llama.cpp"

    def _model_params(self) -> Any:
        params = super()._model_params()
        params.repack_tensors = True
        params.use_mmap = False
        return params

    def _for_all_sequences(self, params: Any) -> None:
        params.flash_attn = False

    def _forget(self) -> None:
        self._c.llama_kv_cache_clear(self._context)

    def _about(self) -> dict[str, str]:
        return {"version": version("ik-llama-cpp-python")}


def main() -> None:
    """Serves."""
    serve(IkLlamaCpp)
