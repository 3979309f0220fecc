"""What the server's own metrics say about a run: the difference between two readings of /metrics (Prometheus text)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True)
class MetricsReading:
    """Sums over all labels, by sample name."""

    counters: Mapping[str, float]
    histograms: Mapping[str, tuple[float, float]]
    """Sum and count, by family name."""

    @classmethod
    def parse(cls, text: str) -> MetricsReading:
        """Reads the text of /metrics.

        Raises:
            ValueError: it is no such text.
        """
        counters: dict[str, float] = defaultdict(float)
        sums: dict[str, float] = defaultdict(float)
        counts: dict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if family.type == "counter" and sample.name.endswith("_total"):
                    counters[sample.name] += sample.value
                elif family.type in ("histogram", "summary") and sample.name == f"{family.name}_sum":
                    sums[family.name] += sample.value
                elif family.type in ("histogram", "summary") and sample.name == f"{family.name}_count":
                    counts[family.name] += sample.value
        return cls(dict(counters), {name: (sums[name], count) for name, count in counts.items()})

    def since(self, before: MetricsReading) -> dict[str, dict[str, float]]:
        """What was counted and observed between the two; what did not move is left out.

        >>> earlier = MetricsReading({"tokens_total": 5.0}, {"ttft_seconds": (1.0, 2.0)})
        >>> MetricsReading({"tokens_total": 9.0}, {"ttft_seconds": (4.0, 4.0)}).since(earlier)
        {'counted': {'tokens_total': 4.0}, 'means': {'ttft_seconds': 1.5}}
        """
        counted = {name: value - before.counters.get(name, 0.0) for name, value in self.counters.items()}
        means: dict[str, float] = {}
        for name, (total, count) in self.histograms.items():
            old_total, old_count = before.histograms.get(name, (0.0, 0.0))
            if count > old_count:
                means[name] = (total - old_total) / (count - old_count)
        return {"counted": {name: value for name, value in counted.items() if value}, "means": means}
