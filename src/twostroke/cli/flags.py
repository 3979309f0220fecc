"""The flags that several commands share: the config dataclasses themselves, so that no flag exists twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from twostroke.config.cache import CacheConfig
from twostroke.config.load import LoadConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.sampling_params import SamplingParams

LoadFlags = Annotated[LoadConfig, Parameter(name="*", group="Model")]
CacheFlags = Annotated[CacheConfig, Parameter(name="*", group="KV cache")]
SchedulerFlags = Annotated[SchedulerConfig, Parameter(name="*", group="Scheduler")]

__all__ = ["Mapping"]  # cyclopts evaluates the annotations that the classes below inherit, in this module


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionSampling(SamplingParams):
    """Sampling as `generate` wants it: greedy, and more than a line."""

    temperature: float = 0.0
    """0 is greedy; below 0 is refused."""
    max_tokens: int | None = 128
    """Most tokens to generate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSampling(SamplingParams):
    """Sampling as `chat` wants it: lively, and room for an answer."""

    temperature: float = 0.7
    """0 is greedy; below 0 is refused."""
    top_p: float = 0.95
    """Keep the smallest set of most likely tokens whose probability reaches this; in (0, 1]."""
    max_tokens: int | None = 256
    """Most tokens to generate."""


CompletionSamplingFlags = Annotated[CompletionSampling, Parameter(name="*", group="Sampling")]
ChatSamplingFlags = Annotated[ChatSampling, Parameter(name="*", group="Sampling")]
JsonFlag = Annotated[bool, Parameter(name="--json", negative="", group="Output")]
QuietFlag = Annotated[bool, Parameter(name="--quiet", negative="", group="Output")]
