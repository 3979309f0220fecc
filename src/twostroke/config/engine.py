"""EngineConfig: everything a user may set, the frozen sum of the smaller configs."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.errors import InvalidParameter, UnknownParameter


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine: a model, where it runs, and how its memory and its steps are managed.

    These fields and those of the nested configs are the keyword arguments of `LLM` and the flags of the CLI.
    """

    model: str = "embedded"
    """A Hugging Face model folder, a hub id, or 'embedded' for the model that ships with the package."""
    tokenizer: str | None = None
    """Folder of another tokenizer; default: the model's own."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Type of weights and activations; 'auto' keeps the checkpoint's."""
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
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        """Checks what needs no model."""
        if self.threads is not None and self.threads < 1:
            raise InvalidParameter("threads", self.threads, "must be at least 1")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise InvalidParameter("max_model_len", self.max_model_len, "must be at least 2 (one in, one out)")

    @classmethod
    def from_keywords(cls, **given: Any) -> EngineConfig:
        """Builds the config from flat keywords; each goes to the part that has a field of that name.

        Raises:
            UnknownParameter: no part has such a field; the nearest names are offered.
        """
        parts: dict[str, type] = {"cache": CacheConfig, "scheduler": SchedulerConfig}
        owner = {f.name: part for part, kind in parts.items() for f in fields(kind)}
        own = {f.name for f in fields(cls)} - set(parts)
        nested: dict[str, dict[str, Any]] = {part: {} for part in parts}
        flat: dict[str, Any] = {}
        for name, value in given.items():
            if name in own:
                flat[name] = value
            elif name in owner:
                nested[owner[name]][name] = value
            else:
                raise UnknownParameter(name, own | set(owner), "the engine")
        return cls(**flat, **{part: kind(**nested[part]) for part, kind in parts.items()})
