"""Text of /metrics: our names, and on request those of vLLM and SGLang for existing dashboards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from twostroke.explain.names import GATEWAY
from twostroke.metrics import families
from twostroke.metrics.engine_metrics import EngineMetrics
from twostroke.metrics.families import OTHER_LABEL
from twostroke.metrics.instruments import Instrument, Number, to_metric

PREFIX = "twostroke"
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_SGLANG_LABELS = {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}


class Compat(StrEnum):
    """Servers whose metric names can be added to ours (`--metrics-compat`)."""

    VLLM = "vllm"
    SGLANG = "sglang"


class EngineCollector(Collector):
    """Metrics of engines for a CollectorRegistry, read when they are scraped.

    Args:
        engines: the metrics of each engine, with its labels.
        compat: servers under whose names the same numbers appear as well.
    """

    def __init__(self, *engines: EngineMetrics, compat: Collection[Compat] = ()) -> None:
        self._engines = list(engines)
        self._compat = frozenset(compat)

    def add(self, engine: EngineMetrics) -> None:
        """Add an engine's metrics."""
        self._engines.append(engine)

    def collect(self) -> Iterator[Metric]:
        """Yield each family with the samples of all engines."""
        yield from self._families(PREFIX, {})
        if Compat.VLLM in self._compat:
            yield from self._families(str(Compat.VLLM), {})
        if Compat.SGLANG in self._compat:
            yield from self._families(str(Compat.SGLANG), _SGLANG_LABELS)

    def _families(self, prefix: str, labels: dict[str, str]) -> Iterator[Metric]:
        for family in families.FAMILIES:
            name = _name_in(prefix, family)
            if name is None:
                continue
            parts = [
                to_metric(engine.instruments[family], f"{prefix}:{name}", engine.labels | labels)
                for engine in self._engines
                if family.counted_by is families.CountedBy.ENGINE
            ]
            if parts:
                yield _joined(parts)
        if prefix == Compat.SGLANG:
            yield from self._sglang_only(labels)

    def _sglang_only(self, labels: dict[str, str]) -> Iterator[Metric]:
        """Yield the metrics that only SGLang has: sums or label values of other metrics."""
        for engine in self._engines:
            every = engine.labels | labels
            ended = dict(_by_label(engine.instruments[families.REQUEST_SUCCESS]))
            yield _single("sglang:num_requests", "counter", "Sequences that ended.", every, sum(ended.values()))
            yield _single("sglang:num_aborted_requests", "counter", "Aborted sequences.", every, ended["abort"])
            for described in engine.instruments[families.CACHE_CONFIG_INFO].samples():
                info = described[1]
                yield _single("sglang:page_size", "gauge", "block_size.", every, float(info["block_size"]))
                yield _single("sglang:num_pages", "gauge", "KV blocks.", every, float(info["num_gpu_blocks"]))


def exposition(*collectors: Collector) -> bytes:
    """Return the text that Prometheus reads (CONTENT_TYPE)."""
    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)
    return generate_latest(registry)


def _name_in(prefix: str, family: families.Family) -> str | None:
    match prefix:
        case Compat.VLLM:
            return family.name if family.in_vllm else None
        case Compat.SGLANG:
            return family.sglang
        case _:
            return family.name


def _joined(parts: list[Metric]) -> Metric:
    """Merge the parts into one family, since a name may be described only once."""
    first, *others = parts
    for other in others:
        first.samples.extend(other.samples)
    return first


def _by_label(instrument: Instrument) -> Iterator[tuple[str, float]]:
    assert isinstance(instrument, Number)
    for _, labels, value in instrument.samples():
        yield next(iter(labels.values())), value


def _single(name: str, kind: str, help_text: str, labels: dict[str, str], value: float) -> Metric:
    metric = Metric(name, help_text, kind)
    metric.add_sample(name + ("_total" if kind == "counter" else ""), labels, value)
    return metric


# ---------------------------------------------------------------------- the gateway of pools


class ResumeCounters(Protocol):
    """Source of the counters of resumed sequences (cluster/dispatcher.py)."""

    num_resumed: int
    num_late_updates: int


class GatewayMetrics(Collector):
    """Counters of the gateway of pools, read when they are scraped; empty without a gateway.

    Args:
        model_name: the model's name as clients know it.
    """

    def __init__(self, model_name: str) -> None:
        self._labels = {"model_name": model_name, "engine": GATEWAY}
        self._followed: ResumeCounters | None = None

    def follow(self, dispatcher: ResumeCounters) -> None:
        """Use this dispatcher's counters from now on."""
        self._followed = dispatcher

    def collect(self) -> Iterator[Metric]:
        if self._followed is None:
            return
        for family, value in (
            (families.SEQUENCES_RESUMED, self._followed.num_resumed),
            (families.UPDATES_FENCED, self._followed.num_late_updates),
        ):
            number = Number(family)
            number.set(value)
            yield to_metric(number, f"{PREFIX}:{family.name}", self._labels)


# ---------------------------------------------------------------------- KV memory of each tenant


MAX_TENANTS = 100
"""Most tenants with a series of their own; the others share one."""

NameOf = Callable[[str], str]


class HoldsKV(Protocol):
    """Source of the KV blocks that every running request holds (live/state.py)."""

    def kv_shares(self, name_of: NameOf) -> Iterable[tuple[Mapping[str, str], Mapping[str, float]]]:
        """Return, for each engine, its labels and the share of its KV blocks by `name_of(tenant)`."""
        ...


class TenantKV:
    """The tenants that held KV, kept so that a series falls to 0 instead of ending.

    Args:
        holds: source of the present blocks.
    """

    def __init__(self, holds: HoldsKV) -> None:
        self._holds = holds
        self._seen: dict[str, None] = {}

    def collector_for(self, viewer: str) -> Collector:
        """Return the gauge as a tenant may see it: its own name, and "(others)" for all other tenants.

        Args:
            viewer: the tenant that scrapes; "" sees every name (the administrator, or a server without keys).
        """
        if viewer:
            return _TenantKVCollector(
                self._holds, {viewer: None}, lambda tenant: tenant if tenant == viewer else OTHER_LABEL
            )
        return _TenantKVCollector(self._holds, self._seen, self._name)

    def _name(self, tenant: str) -> str:
        if tenant not in self._seen and len(self._seen) < MAX_TENANTS:
            self._seen[tenant] = None
        return tenant if tenant in self._seen else OTHER_LABEL


class _TenantKVCollector(Collector):
    def __init__(self, holds: HoldsKV, known: Iterable[str], name_of: NameOf) -> None:
        self._holds = holds
        self._known = known
        self._name_of = name_of

    def collect(self) -> Iterator[Metric]:
        family = families.KV_CACHE_USAGE_BY_TENANT
        metric = Metric(f"{PREFIX}:{family.name}", family.help, family.kind)
        for labels, shares in self._holds.kv_shares(self._name_of):
            number = Number(family)
            for name in dict.fromkeys((*self._known, *shares)):
                number.set(shares.get(name, 0.0), name)
            metric.samples.extend(to_metric(number, metric.name, dict(labels)).samples)
        yield metric
