"""The metrics of Triton's instances (same names, same meanings) for Prometheus' own client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

from tllm_wmtp.metrics import EngineUsage, RequestMetrics
from tllm_wmtp.serving.measures import Prometheus


class Member:
    """One member of a family: the value under one set of labels."""

    def __init__(self, labels: Mapping[str, str]):
        self.labels, self.value = dict(labels), 0.0

    def set(self, value: float) -> None:
        self.value = value

    def increment(self, amount: float) -> None:
        self.value += amount


class Family:
    """A metric with all its members, made as Triton's backend makes them."""

    GAUGE, COUNTER = "gauge", "counter"

    def __init__(self, name: str, meaning: str, kind: str):
        self.name, self.meaning, self.kind = name, meaning, kind
        self.members: list[Member] = []

    def Metric(self, labels: Mapping[str, str]) -> Member:
        self.members.append(Member(labels))
        return self.members[-1]


class ServerMetrics(Collector):
    """What ``/metrics`` shows. Used from one thread."""

    def __init__(self, model: str):
        families = self._families = list[Family]()

        class Listed(Family):
            def __init__(self, name: str, meaning: str, kind: str):
                super().__init__(name, meaning, kind)
                families.append(self)

        self._metrics = Prometheus(SimpleNamespace(MetricFamily=Listed), {"model": model})
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def count(self, finish_reason: str, metrics: RequestMetrics | None) -> None:
        """One completion has ended; ``metrics`` is None if it never reached the engine."""
        self._metrics.count(finish_reason, metrics)

    def exposition(self, usage: EngineUsage) -> bytes:
        """All metrics in Prometheus' text format."""
        self._metrics.show_usage(usage)
        self._metrics.show_acceptance()
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name.removesuffix("_total"), family.meaning, family.kind)
            for member in family.members:
                metric.add_sample(family.name, member.labels, member.value)
            yield metric
