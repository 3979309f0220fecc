"""Flags that several commands share. They are fields of the config dataclasses, so each flag is defined once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, cast

from cyclopts import Group, Parameter, Token

from twostroke.cli.numbers import preset_help
from twostroke.config.cache import CacheConfig
from twostroke.config.engine import EngineConfig
from twostroke.config.load import ActivationQuantization, Device, DType, Kernels, LoadConfig, LoadFormat, Quantization
from twostroke.config.presets import Preset
from twostroke.config.scheduler import Batching, Mixing, Policy, SchedulerConfig
from twostroke.config.speculation import SpeculativeConfig
from twostroke.errors import InvalidParameter
from twostroke.sampling_params import SamplingParams, StructuredOutputs

_GROUPS = (
    "Workload",
    "Trace",
    "Calibration",
    "Plan",
    "Model",
    "Server",
    "Sampling",
    "KV cache",
    "Scheduler",
    "Speculation",
    "Pools",
    "Search",
    "Output",
)
"""Groups of flags, in the order of `--help`."""


def group(name: str) -> Group:
    """Return the group of flags with a name, sorted as in `_GROUPS`."""
    return Group(name, sort_key=_GROUPS.index(name))


CacheFlags = Annotated[CacheConfig, Parameter(name="*", group=group("KV cache"))]
SchedulerFlags = Annotated[SchedulerConfig, Parameter(name="*", group=group("Scheduler"))]

ModelFlag = Annotated[str | None, Parameter(name="--model", group=group("Model"))]
ModelNames = Annotated[tuple[str, ...], Parameter(consume_multiple=(1, None))]
"""Values of --served-model-name: all words up to the next flag."""

# cyclopts evaluates the annotations that the classes below inherit, in this module
__all__ = [
    "ActivationQuantization",
    "Batching",
    "DType",
    "Device",
    "Kernels",
    "LoadFormat",
    "Mapping",
    "Mixing",
    "Path",
    "Quantization",
]


def _read_bias(_: type, tokens: Sequence[Token]) -> dict[int, float]:
    """Return the map of a --logit-bias value: 42:-5,7:2 gives {42: -5.0, 7: 2.0}."""
    text = ",".join(token.value for token in tokens)
    try:
        return {int(token_id): float(bias) for token_id, bias in (pair.split(":") for pair in text.split(","))}
    except ValueError:
        raise InvalidParameter("logit_bias", text, "must be ID:BIAS pairs with commas between them") from None


def _read_structure(_: type, tokens: Sequence[Token]) -> StructuredOutputs:
    """Parse the JSON of --structured-outputs: {"regex": "[0-9]+"} gives StructuredOutputs(regex="[0-9]+")."""
    text = tokens[0].value
    given = _parse_json("structured_outputs", text, """Quote it: '{"regex": "[0-9]+"}'.""")
    params = SamplingParams(structured_outputs=given)
    if params.structured_outputs is None:
        raise InvalidParameter("structured_outputs", text, 'must be an object such as {"regex": "[0-9]+"}')
    return params.structured_outputs


def _parse_json(name: str, text: str, remedy: str) -> Any:
    """Parse the JSON value of a flag."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(name, text, f"must be JSON ({error})", remedy) from error


def _json_object(name: str, text: str, remedy: str) -> dict[str, Any]:
    given = _parse_json(name, text, remedy)
    if not isinstance(given, dict):
        raise InvalidParameter(name, text, "must be an object", remedy)
    return cast(dict[str, Any], given)


_SINGLE_WORD_VALUE: dict[str, Any] = {"accepts_keys": False, "n_tokens": 1, "consume_multiple": False}
"""Arguments for a cyclopts parameter whose value is one word, although its type has several fields or entries."""


def json_object(name: str) -> Parameter:
    """Return the parameter of a flag whose value is a JSON object of settings."""

    def read(_: type, tokens: Sequence[Token]) -> dict[str, Any]:
        return _json_object(name, tokens[0].value, """Quote it: '{"kv_cache_dtype": "int8"}'.""")

    return Parameter(converter=read, **_SINGLE_WORD_VALUE, metavar="JSON")


def _read_speculation(_: type, tokens: Sequence[Token]) -> SpeculativeConfig:
    """Parse the JSON of --speculative-config: {"method": "ngram"} gives SpeculativeConfig(method="ngram")."""
    remedy = """Quote it: '{"method": "ngram", "num_speculative_tokens": 4}'."""
    return SpeculativeConfig.read(_json_object("speculative_config", tokens[0].value, remedy))


SpeculationFlag = Annotated[
    SpeculativeConfig | None,
    Parameter(
        name="--speculative-config",
        group=group("Speculation"),
        converter=_read_speculation,
        **_SINGLE_WORD_VALUE,
        metavar="JSON",
        help="Draft tokens and verify them, several in one pass; the output stays the same. For example "
        """'{"method": "ngram", "num_speculative_tokens": 4}'.""",
    ),
]
Structure = Annotated[
    StructuredOutputs | None, Parameter(converter=_read_structure, **_SINGLE_WORD_VALUE, metavar="JSON")
]
LogitBias = Annotated[
    Mapping[int, float] | None, Parameter(converter=_read_bias, **_SINGLE_WORD_VALUE, metavar="ID:BIAS,...")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _SamplingFlags(SamplingParams):
    """Sampling settings, with converters for flags that need their own syntax."""

    logit_bias: LogitBias = field(default=None, hash=False)
    """Numbers to add to the logits of token ids; --logit-bias 42:-5,7:2 makes 42 less and 7 more likely."""
    structured_outputs: Structure = None
    """Required form of the output, one of json (a schema), regex, choice, grammar and json_object; for example
    --structured-outputs '{"choice": ["yes", "no"]}'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionSampling(_SamplingFlags):
    """Sampling settings with the defaults of `generate`: greedy, at most 128 tokens."""

    temperature: float = 0.0
    """Sampling temperature; 0 is greedy, below 0 is refused."""
    max_tokens: int | None = 128
    """Most tokens to generate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSampling(_SamplingFlags):
    """Sampling settings with the defaults of `chat`: temperature 0.7, top_p 0.95, at most 256 tokens."""

    temperature: float = 0.7
    """Sampling temperature; 0 is greedy, below 0 is refused."""
    top_p: float = 0.95
    """Keep the smallest set of most likely tokens whose probability reaches this; in (0, 1]."""
    max_tokens: int | None = 256
    """Most tokens to generate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FairScheduler(SchedulerConfig):
    """Scheduler settings with the defaults of `serve`.

    They need a class of their own: cyclopts drops all fields of a default instance as soon as one flag of its class
    is given.
    """

    policy: Policy = "fair"
    """Order of the queue: first come first served, by priority (lower value first) with ageing, or fair among tenants,
    where the tenant served least goes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFromFlags(LoadConfig):
    """Load settings with short names of flags."""

    tensor_parallel_size: Annotated[int, Parameter(alias="-tp")] = 1
    """Processes (ranks) that compute the model together, each with its share of every matrix's rows and of the KV
    heads; the output stays the same bit for bit. Sizes of KV memory are per rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFromFlagsWithoutModel(LoadFromFlags):
    """Load settings for commands that also take the model as a positional argument.

    These commands parse --model themselves, to know whether it was given.
    """

    model: Annotated[str, Parameter(parse=False)] = "embedded"


class ExplicitDevice(str):
    """Device named by a flag. Unlike the default, it can contradict --device-name."""

    __slots__ = ()


def _read_device(_: type, tokens: Sequence[Token]) -> ExplicitDevice:
    return ExplicitDevice(tokens[0].value)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLoad(LoadFromFlagsWithoutModel):
    """Load settings for a plan; the device need not be on this machine."""

    device: Annotated[Device, Parameter(converter=_read_device)] = "cpu"
    """Device that the model runs on: 'cpu', or 'cuda' for one NVIDIA GPU, several with tensor_parallel_size;
    --device-name names the GPU."""


LoadFlags = Annotated[LoadFromFlags, Parameter(name="*", group=group("Model"))]
PresetFlag = Annotated[Preset | None, Parameter(group=group("Scheduler"), help=preset_help())]
FairSchedulerFlags = Annotated[FairScheduler, Parameter(name="*", group=group("Scheduler"))]
PlannedLoadFlags = Annotated[PlannedLoad, Parameter(name="*", group=group("Model"))]
LoadFlagsWithoutModel = Annotated[LoadFromFlagsWithoutModel, Parameter(name="*", group=group("Model"))]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """Settings of an engine without speculative decoding."""

    load: LoadFlags = LoadFromFlags()
    cache: CacheFlags = CacheConfig()
    scheduler: SchedulerFlags = SchedulerConfig()

    def config(self, load: LoadConfig) -> EngineConfig:
        """Return the engine's settings with these load settings."""
        return EngineConfig(load=load, cache=self.cache, scheduler=self.scheduler)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingEngineFlags(EngineFlags):
    """Settings of an engine, for commands that take the model only with --model."""

    speculative_config: SpeculationFlag = None

    def config(self, load: LoadConfig) -> EngineConfig:
        return replace(EngineFlags.config(self, load), speculative_config=self.speculative_config)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlagsWithoutModel(DraftingEngineFlags):
    """Settings of an engine, for commands that also take the model as a positional argument."""

    load: LoadFlagsWithoutModel = LoadFromFlagsWithoutModel()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEngineFlags(EngineFlagsWithoutModel):
    """Settings of a server's engine; its default policy is fair among tenants."""

    scheduler: FairSchedulerFlags = FairScheduler()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEngineFlags(DraftingEngineFlags):
    """Settings of an engine to plan; its device need not be on this machine."""

    load: PlannedLoadFlags = PlannedLoad()


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEngineFlags(EngineFlags):
    """Settings of an engine for a trace, without speculative decoding: acceptance cannot be simulated."""

    load: LoadFlagsWithoutModel = LoadFromFlagsWithoutModel()


def with_model(load: LoadConfig, *, positional: str | None, flag: str | None) -> LoadConfig:
    """Return the load settings with the model that was given, as a positional argument or with --model.

    Raises:
        InvalidParameter: both are given, and they differ.
    """
    if positional is not None and flag is not None and positional != flag:
        limit = f"contradicts MODEL, which is {positional!r}"
        raise InvalidParameter("--model", flag, limit, "Give the model once, as MODEL or with --model.")
    given = flag if positional is None else positional
    return load if given is None else replace(load, model=given)


def check_model_names(names: Sequence[str]) -> None:
    """Raise if the last of several served names looks like the model; call this when no model is given.

    Raises:
        InvalidParameter: the last name is a file, a folder or a hub id.
    """
    if len(names) < 2:
        return
    last = names[-1]
    if "/" in last or last.endswith(".gguf") or os.path.exists(last):
        limit = "looks like the model, and --served-model-name takes all words up to the next flag"
        remedy = "Name the model first: twostroke serve MODEL --served-model-name NAME NAME."
        raise InvalidParameter("served_model_name", last, limit, remedy)


CompletionSamplingFlags = Annotated[CompletionSampling, Parameter(name="*", group=group("Sampling"))]
ChatSamplingFlags = Annotated[ChatSampling, Parameter(name="*", group=group("Sampling"))]
JsonFlag = Annotated[bool, Parameter(name="--json", negative="", group=group("Output"))]
QuietFlag = Annotated[bool, Parameter(name="--quiet", negative="", group=group("Output"))]
