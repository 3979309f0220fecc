"""EngineConfig: all settings of an engine, composed of the smaller configs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

from twostroke.config.cache import CacheConfig
from twostroke.config.load import LoadConfig
from twostroke.config.presets import settings_of
from twostroke.config.scheduler import SchedulerConfig
from twostroke.config.speculation import SpeculativeConfig
from twostroke.errors import InvalidParameter, UnknownParameter
from twostroke.plain_words import kind_of


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine: the model, its memory and its scheduling.

    The fields of the parts are the keyword arguments of `LLM` and the flags of the CLI; no name occurs twice.
    """

    load: LoadConfig = field(default_factory=LoadConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculative_config: SpeculativeConfig | None = None
    """None: no speculative decoding."""

    def __post_init__(self) -> None:
        """Check settings that depend on each other across parts."""
        if self.speculative_config is not None and not self.cache.enable_kv_cache:
            limit, remedy = "needs the KV cache", "Leave it out, or leave the KV cache on."
            raise InvalidParameter("speculative_config.method", self.speculative_config.method, limit, remedy)
        self._check_async_scheduling()
        if self.cache.kv_check_rate and not self.load.batch_invariant:
            limit = "needs batch_invariant, since it compares bits"
            raise InvalidParameter("kv_check_rate", self.cache.kv_check_rate, limit, "Leave one of them out.")
        utilization = self.cache.gpu_memory_utilization
        if utilization is not None and self.load.device != "cuda":
            limit = f"applies to GPUs, and the model runs on device={self.load.device}"
            remedy = "Use --kv-cache-memory, or --device cuda."
            raise InvalidParameter("gpu_memory_utilization", utilization, limit, remedy)

    @property
    def schedules_ahead(self) -> bool:
        """Whether a step is scheduled and launched before the host knows the tokens of the previous step."""
        if self.scheduler.async_scheduling is not None:
            return self.scheduler.async_scheduling
        return self.load.device == "cuda" and self.speculative_config is None and self.load.tensor_parallel_size == 1

    def _check_async_scheduling(self) -> None:
        if not self.scheduler.async_scheduling:
            return
        limit = ""
        if self.speculative_config is not None:
            limit = "drafting needs the tokens of the previous step"
        elif self.load.tensor_parallel_size > 1:
            limit = f"tensor_parallel_size={self.load.tensor_parallel_size}: ranks compute one step after the other"
        if limit:
            raise InvalidParameter("async_scheduling", True, limit, "Leave one of them out.")

    @classmethod
    def from_keywords(cls, **given: Any) -> EngineConfig:
        """Build the config from flat keywords.

        Each keyword goes to the part that has a field of that name; `preset` sets the values that are not given.

        >>> EngineConfig.from_keywords(model="some-folder", block_size=32).cache.block_size
        32
        >>> EngineConfig.from_keywords(preset="batch").scheduler.max_num_seqs
        256

        Raises:
            UnknownParameter: no part has such a field; the message offers the nearest names.
            InvalidParameter: a value is out of its range.
        """
        parts: dict[str, type] = {"load": LoadConfig, "cache": CacheConfig, "scheduler": SchedulerConfig}
        owner = {f.name: part for part, kind in parts.items() for f in fields(kind)}
        chosen: dict[str, dict[str, Any]] = {part: {} for part in parts}
        speculation = _speculation(given.pop("speculative_config", None))
        given = {**settings_of(given.pop("preset", None)), **given}
        for name, value in given.items():
            if name not in owner:
                raise UnknownParameter(name, [*owner, "speculative_config", "preset"], "the engine")
            chosen[owner[name]][name] = value
        return cls(**{part: kind(**chosen[part]) for part, kind in parts.items()}, speculative_config=speculation)


def _speculation(given: Any) -> SpeculativeConfig | None:
    if given is None or isinstance(given, SpeculativeConfig):
        return given
    if not isinstance(given, Mapping):
        raise InvalidParameter("speculative_config", given, f"must be an object, not {kind_of(given)}")
    return SpeculativeConfig.read(cast(Mapping[str, Any], given))
