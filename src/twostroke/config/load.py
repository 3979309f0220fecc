"""Which model, where it runs, and its outer limits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from twostroke.errors import InvalidParameter


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """What is loaded and where."""

    model: str = "embedded"
    """A Hugging Face model folder, a hub id, or 'embedded' for the model that ships with the package."""
    tokenizer: str | None = None
    """Folder of another tokenizer; default: the model's own."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Type of weights, activations and KV; 'auto' keeps the checkpoint's."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the model runs."""
    threads: int | None = None
    """Threads of the model's operators; default: the processors this process may use."""
    max_model_len: int | None = None
    """Longest prompt plus output; default: the model's context, shortened to what the KV memory holds."""
    max_logprobs: int = 20
    """Most log-probabilities a request may ask for per token."""
    event_log: Path | None = None
    """File to write the event log to: one JSON object a line, no text of prompts or outputs."""

    def __post_init__(self) -> None:
        """Checks what needs no model."""
        if self.threads is not None and self.threads < 1:
            raise InvalidParameter("threads", self.threads, "must be at least 1")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise InvalidParameter("max_model_len", self.max_model_len, "must be at least 2 (one in, one out)")
        if self.max_logprobs < 0:
            raise InvalidParameter("max_logprobs", self.max_logprobs, "must be at least 0")
