"""The flags that several commands share: the config dataclasses themselves, so that no flag exists twice."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from twostroke.config.cache import CacheConfig
from twostroke.config.load import LoadConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.sampling_params import SamplingParams

LoadFlags = Annotated[LoadConfig, Parameter(name="*", group="Model")]
CacheFlags = Annotated[CacheConfig, Parameter(name="*", group="KV cache")]
SchedulerFlags = Annotated[SchedulerConfig, Parameter(name="*", group="Scheduler")]
SamplingFlags = Annotated[SamplingParams, Parameter(name="*", group="Sampling")]
JsonFlag = Annotated[bool, Parameter(name="--json", negative="", group="Output")]
QuietFlag = Annotated[bool, Parameter(name="--quiet", negative="", group="Output")]
