"""/metrics in Prometheus' format, made from the engine's own counters."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from holdover.engine.messages import Statistics

TIER_GAUGES = ("used_bytes", "budget_bytes", "max_copies", "opened")


class _Snapshot(Collector):
    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[Metric]:
        for name, value in self._statistics.counters.items():
            yield CounterMetricFamily(f"holdover_{name}", _help(name), value=value)
        for name, value in self._statistics.gauges.items():
            yield GaugeMetricFamily(f"holdover_{name}", _help(name), value=value)
        names = sorted({name for tier in self._statistics.by_tier.values() for name in tier})
        for name in names:
            family = GaugeMetricFamily if name in TIER_GAUGES else CounterMetricFamily
            metric = family(f"holdover_tier_{name}", f"{_help(name)}, by tier", labels=["tier"])
            for tier, values in self._statistics.by_tier.items():
                if name in values:
                    metric.add_metric([tier], values[name])
            yield metric


def _help(name: str) -> str:
    return name.replace("_", " ").capitalize()


def render(statistics: Statistics) -> bytes:
    """The text that Prometheus scrapes."""
    registry = CollectorRegistry()
    registry.register(_Snapshot(statistics))
    return generate_latest(registry)
