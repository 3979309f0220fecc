"""Twostroke: an LLM inference engine. Names are loaded on first use, so that importing a part loads only that part."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from twostroke.version import __version__

if TYPE_CHECKING:
    from twostroke.client.async_engine import AsyncEngine
    from twostroke.config.engine import EngineConfig
    from twostroke.llm import LLM
    from twostroke.outputs import CompletionOutput, RequestOutput
    from twostroke.sampling_params import SamplingParams, StructuredOutputs

_HOME = {
    "LLM": "twostroke.llm",
    "AsyncEngine": "twostroke.client.async_engine",
    "EngineConfig": "twostroke.config.engine",
    "SamplingParams": "twostroke.sampling_params",
    "StructuredOutputs": "twostroke.sampling_params",
    "RequestOutput": "twostroke.outputs",
    "CompletionOutput": "twostroke.outputs",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'twostroke' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
