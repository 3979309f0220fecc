"""Metric of the KV memory that each tenant holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from twostroke.metrics import families
from twostroke.metrics.exposition import PREFIX
from twostroke.metrics.families import OTHERS
from twostroke.metrics.instruments import Number, exposed

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

    def seen_by(self, viewer: str) -> Collector:
        """Return the gauge as a tenant may see it: its own name, and "(others)" for all other tenants.

        Args:
            viewer: the tenant that scrapes; "" sees every name (the administrator, or a server without keys).
        """
        if viewer:
            return _Seen(self._holds, {viewer: None}, lambda tenant: tenant if tenant == viewer else OTHERS)
        return _Seen(self._holds, self._seen, self._name)

    def _name(self, tenant: str) -> str:
        if tenant not in self._seen and len(self._seen) < MAX_TENANTS:
            self._seen[tenant] = None
        return tenant if tenant in self._seen else OTHERS


class _Seen(Collector):
    def __init__(self, holds: HoldsKV, known: Iterable[str], name_of: NameOf) -> None:
        self._holds = holds
        self._known = known
        self._name_of = name_of

    def collect(self) -> Iterator[Metric]:
        """Yield the one family, with the samples of every engine."""
        family = families.KV_CACHE_USAGE_BY_TENANT
        metric = Metric(f"{PREFIX}:{family.name}", family.help, family.kind)
        for labels, shares in self._holds.kv_shares(self._name_of):
            number = Number(family)
            for name in dict.fromkeys((*self._known, *shares)):
                number.set(shares.get(name, 0.0), name)
            metric.samples.extend(exposed(number, metric.name, dict(labels)).samples)
        yield metric
