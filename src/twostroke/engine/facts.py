"""What the side that speaks text has to know of an engine, wherever that runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Settled when the model is loaded and memory is divided; the same for as long as the engine lives."""

    model: str
    """The name of its folder or file."""
    tokenizer_path: str
    """The folder or GGUF file that the tokenizer comes from."""
    max_model_len: int
    max_logprobs: int
    vocab_size: int
    hidden_size: int
    eos_token_ids: tuple[int, ...]
    max_num_seqs: int
    num_blocks: int
    block_size: int
    """Tokens by which prefixes are named: of a page, see KVLayout."""
    prefix_tokens: int
    """Prefixes of a multiple of so many tokens can be found, and handed over."""
    uses_priority: bool
    serves_background: bool
    """Whether it can put work beside other work, a little at a time."""
    is_fair: bool
    """Whether the scheduler tells tenants apart."""
    dtype: str
    """Element type of weights and activations, resolved: "bfloat16", never "auto"."""
    kv_cache_dtype: str
    """Format of the KV cache, resolved: "bf16", never "auto"."""
    kernels: str
    """Name of the operators in use, with their instruction level."""
    num_threads: int
    """Threads of each rank, on a CPU."""
    kv_bytes_per_token: int
    """Of all ranks."""
    num_layers: int
    startup_lines: tuple[str, ...] = field(compare=False)
    """What was loaded, how long that took and how memory was divided, for people."""


NOTE = "note"
"""How a start-up line begins that nobody should find out from a refused prompt; such a line is logged as a warning."""


def lines_to_print(startup_lines: Iterable[str]) -> list[str]:
    """Return the start-up lines that a command prints: all but the notes, which the log has said as warnings.

    >>> lines_to_print(["model    Llama", "note     a short context"])
    ['model    Llama']
    """
    return [line for line in startup_lines if not line.startswith(NOTE)]
