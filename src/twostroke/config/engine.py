"""EngineConfig: everything a user may set, the frozen sum of the smaller configs."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from twostroke.config.cache import CacheConfig
from twostroke.config.load import LoadConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.errors import UnknownParameter


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine: a model, and how its memory and its steps are managed.

    The fields of the parts are the keyword arguments of `LLM` and the flags of the CLI; no name occurs twice.
    """

    load: LoadConfig = field(default_factory=LoadConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    @classmethod
    def from_keywords(cls, **given: Any) -> EngineConfig:
        """Builds the config from flat keywords; each goes to the part that has a field of that name.

        >>> EngineConfig.from_keywords(model="some-folder", block_size=32).cache.block_size
        32

        Raises:
            UnknownParameter: no part has such a field; the nearest names are offered.
            InvalidParameter: a value out of its range.
        """
        parts: dict[str, type] = {"load": LoadConfig, "cache": CacheConfig, "scheduler": SchedulerConfig}
        owner = {f.name: part for part, kind in parts.items() for f in fields(kind)}
        chosen: dict[str, dict[str, Any]] = {part: {} for part in parts}
        for name, value in given.items():
            if name not in owner:
                raise UnknownParameter(name, owner, "the engine")
            chosen[owner[name]][name] = value
        return cls(**{part: kind(**chosen[part]) for part, kind in parts.items()})
