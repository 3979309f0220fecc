"""Facts about an engine that the text side needs, wherever the engine runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Properties that are fixed once the model is loaded and memory is divided."""

    model: str
    """Name of the model's folder or file."""
    tokenizer_path: str
    """Folder or GGUF file of the tokenizer."""
    max_model_len: int
    max_logprobs: int
    vocab_size: int
    hidden_size: int
    eos_token_ids: tuple[int, ...]
    max_num_seqs: int
    num_blocks: int
    block_size: int
    """Tokens per hashed unit of a prefix: the tokens of a page, see KVLayout."""
    prefix_tokens: int
    """Granularity in tokens at which prefixes can be found and handed over."""
    uses_priority: bool
    serves_background: bool
    """Whether it can run background work beside other work."""
    is_fair: bool
    """Whether the scheduler shares slots among tenants."""
    dtype: str
    """Element type of weights and activations, resolved: "bfloat16", never "auto"."""
    kv_cache_dtype: str
    """Format of the KV cache, resolved: "bf16", never "auto"."""
    kernels: str
    """Name of the kernels in use, with their instruction set."""
    num_threads: int
    """Threads of each rank on a CPU."""
    kv_bytes_per_token: int
    """KV bytes per token, summed over all ranks."""
    num_layers: int
    architecture: str
    """Name of the model's class, such as Qwen3ForCausalLM."""
    num_parameters: int
    quantization: str | None
    """Format of quantized weights; None if they are not."""
    weight_bytes: int
    """Bytes of weights in memory, of the rank that has most."""
    startup_lines: tuple[str, ...] = field(compare=False)
    """Lines for people: what was loaded, how long it took, how memory was divided."""


NOTE = "note"
"""Prefix of a start-up line that users should see early; such a line is logged as a warning."""


def printed_lines(startup_lines: Iterable[str]) -> list[str]:
    """Return the start-up lines that a command prints: all except the notes, which are logged as warnings.

    >>> printed_lines(["model    Llama", "note     a short context"])
    ['model    Llama']
    """
    return [line for line in startup_lines if not line.startswith(NOTE)]
