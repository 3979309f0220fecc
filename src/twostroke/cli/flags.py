"""The flags that several commands share: the config dataclasses themselves, so that no flag exists twice."""

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
    """Return the group of flags of a name, which has its place in `--help`."""
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
    """42:-5,7:2 to {42: -5.0, 7: 2.0}."""
    text = ",".join(token.value for token in tokens)
    try:
        return {int(token_id): float(bias) for token_id, bias in (pair.split(":") for pair in text.split(","))}
    except ValueError:
        raise InvalidParameter("logit_bias", text, "must be ID:BIAS pairs with commas between them") from None


def _read_structure(_: type, tokens: Sequence[Token]) -> StructuredOutputs:
    """{"regex": "[0-9]+"} to StructuredOutputs(regex="[0-9]+")."""
    text = tokens[0].value
    given = _from_json("structured_outputs", text, """Quote it: '{"regex": "[0-9]+"}'.""")
    params = SamplingParams(structured_outputs=given)
    if params.structured_outputs is None:
        raise InvalidParameter("structured_outputs", text, 'must be an object such as {"regex": "[0-9]+"}')
    return params.structured_outputs


def _from_json(name: str, text: str, remedy: str) -> Any:
    """Return the value of a flag that is JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(name, text, f"must be JSON ({error})", remedy) from error


def _object(name: str, text: str, remedy: str) -> dict[str, Any]:
    given = _from_json(name, text, remedy)
    if not isinstance(given, dict):
        raise InvalidParameter(name, text, "must be an object", remedy)
    return cast(dict[str, Any], given)


_ONE_WORD: dict[str, Any] = {"accepts_keys": False, "n_tokens": 1, "consume_multiple": False}
"""Settings of a parameter whose value is one word, though its type has several fields or entries."""


def json_object(name: str) -> Parameter:
    """Return the parameter of a flag whose value is a JSON object of settings."""

    def read(_: type, tokens: Sequence[Token]) -> dict[str, Any]:
        return _object(name, tokens[0].value, """Quote it: '{"kv_cache_dtype": "int8"}'.""")

    return Parameter(converter=read, **_ONE_WORD, metavar="JSON")


def _read_speculation(_: type, tokens: Sequence[Token]) -> SpeculativeConfig:
    """{"method": "ngram"} to SpeculativeConfig(method="ngram")."""
    remedy = """Quote it: '{"method": "ngram", "num_speculative_tokens": 4}'."""
    return SpeculativeConfig.read(_object("speculative_config", tokens[0].value, remedy))


SpeculationFlag = Annotated[
    SpeculativeConfig | None,
    Parameter(
        name="--speculative-config",
        group=group("Speculation"),
        converter=_read_speculation,
        **_ONE_WORD,
        metavar="JSON",
        help="Draft tokens and verify them, several in one pass; the output stays the same. For example "
        """'{"method": "ngram", "num_speculative_tokens": 4}'.""",
    ),
]
Structure = Annotated[StructuredOutputs | None, Parameter(converter=_read_structure, **_ONE_WORD, metavar="JSON")]
LogitBias = Annotated[Mapping[int, float] | None, Parameter(converter=_read_bias, **_ONE_WORD, metavar="ID:BIAS,...")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _SamplingByFlags(SamplingParams):
    """Sampling, with what a flag writes in its own way."""

    logit_bias: LogitBias = field(default=None, hash=False)
    """Added to the logits of token ids; --logit-bias 42:-5,7:2 makes 42 less and 7 more likely."""
    structured_outputs: Structure = None
    """The form that the output has to have, one of json (a schema), regex, choice, grammar and json_object; for example
    --structured-outputs '{"choice": ["yes", "no"]}'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionSampling(_SamplingByFlags):
    """Sampling as `generate` wants it: greedy, and more than a line."""

    temperature: float = 0.0
    """0 is greedy; below 0 is refused."""
    max_tokens: int | None = 128
    """Most tokens to generate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSampling(_SamplingByFlags):
    """Sampling as `chat` wants it: lively, and room for an answer."""

    temperature: float = 0.7
    """0 is greedy; below 0 is refused."""
    top_p: float = 0.95
    """Keep the smallest set of most likely tokens whose probability reaches this; in (0, 1]."""
    max_tokens: int | None = 256
    """Most tokens to generate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FairScheduler(SchedulerConfig):
    """Scheduling as `serve` wants it. (A default that is an instance would not do: of its fields nothing is left as
    soon as one flag of its class is given.)"""

    policy: Policy = "fair"
    """Order of the queue: first come first served, by priority (lower value first) with ageing, or fair among tenants:
    who was served least goes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadByFlags(LoadConfig):
    """What is loaded, with the short names that flags have."""

    tensor_parallel_size: Annotated[int, Parameter(alias="-tp")] = 1
    """Processes (ranks) that compute the model together, each with its share of every matrix's rows and of the KV
    heads; the output stays the same bit for bit. Sizes of KV memory are each rank's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBesideModel(LoadByFlags):
    """What is loaded, for commands that also take the model by its place: whether the flag was given has to show."""

    model: Annotated[str, Parameter(parse=False)] = "embedded"


class GivenDevice(str):
    """A device that a flag names: unlike the default, it can contradict --device-name."""

    __slots__ = ()


def _read_device(_: type, tokens: Sequence[Token]) -> GivenDevice:
    return GivenDevice(tokens[0].value)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadToPlan(LoadBesideModel):
    """The model's parts for a plan, whose device need not be on this machine."""

    device: Annotated[Device, Parameter(converter=_read_device)] = "cpu"
    """Where the model runs: 'cpu', or 'cuda' for one NVIDIA GPU, several with tensor_parallel_size; --device-name is of
    GPUs."""


LoadFlags = Annotated[LoadByFlags, Parameter(name="*", group=group("Model"))]
PresetFlag = Annotated[Preset | None, Parameter(group=group("Scheduler"), help=preset_help())]
FairSchedulerFlags = Annotated[FairScheduler, Parameter(name="*", group=group("Scheduler"))]
LoadToPlanFlags = Annotated[LoadToPlan, Parameter(name="*", group=group("Model"))]
LoadBesideModelFlags = Annotated[LoadBesideModel, Parameter(name="*", group=group("Model"))]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """The settings of an engine without drafts."""

    load: LoadFlags = LoadByFlags()
    cache: CacheFlags = CacheConfig()
    scheduler: SchedulerFlags = SchedulerConfig()

    def config(self, load: LoadConfig) -> EngineConfig:
        """Return the settings, with the model put in."""
        return EngineConfig(load=load, cache=self.cache, scheduler=self.scheduler)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingEngineFlags(EngineFlags):
    """The settings of an engine, for commands that name the model by --model alone."""

    speculative_config: SpeculationFlag = None

    def config(self, load: LoadConfig) -> EngineConfig:
        return replace(EngineFlags.config(self, load), speculative_config=self.speculative_config)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBesideModelFlags(DraftingEngineFlags):
    """The settings of an engine, for commands that also take the model by its place."""

    load: LoadBesideModelFlags = LoadBesideModel()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEngineFlags(EngineBesideModelFlags):
    """The settings of the engine; tenants take turns."""

    scheduler: FairSchedulerFlags = FairScheduler()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineToPlanFlags(DraftingEngineFlags):
    """The settings of an engine whose device need not be on this machine."""

    load: LoadToPlanFlags = LoadToPlan()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOfTraceFlags(EngineFlags):
    """The settings of an engine for a trace; which drafts stand cannot be simulated."""

    load: LoadBesideModelFlags = LoadBesideModel()


def with_model(load: LoadConfig, *, by_place: str | None, by_flag: str | None) -> LoadConfig:
    """Puts the model in, however it was given.

    Raises:
        InvalidParameter: given in both ways, differently.
    """
    if by_place is not None and by_flag is not None and by_place != by_flag:
        limit = f"contradicts the word {by_place!r}, which names the model too"
        raise InvalidParameter("--model", by_flag, limit, "Give the model once, as MODEL or with --model.")
    given = by_flag if by_place is None else by_place
    return load if given is None else replace(load, model=given)


def check_model_names(names: Sequence[str]) -> None:
    """Refuse the last of several names where it can only be the model, which is not named elsewhere.

    Raises:
        InvalidParameter: it is the name of a file, a folder or a hub id.
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
