"""Prometheus metrics, on vLLM's own /metrics beside vLLM's.

Invariants: what is true at one moment (versions, state) is read from the state when it is scraped, so it is
never older than the scrape; what adds up is counted by the watcher, once for each apply or refusal. Label
values are closed sets. docs/operations.md lists all names.

vLLM serves prometheus_client's default registry from its one API process (vllm 0.32 and 0.33,
v1/metrics/prometheus.py). With PROMETHEUS_MULTIPROC_DIR set by hand it serves that directory's files in its
place: there what is read at the scrape is absent, rather than wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .refusals import RefusalKind
from .state import STATES, Applied, ServerState

PREFIX = "weightferry_"
APPLY_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600)
PUBLISH_BUCKETS_S = (0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800, 3600)


class Metrics:
    """One server's; making a second one on the same registry is a ValueError."""

    def __init__(
        self, state: ServerState, fetched_bytes: Callable[[], int], registry: CollectorRegistry = REGISTRY
    ) -> None:
        self._newest_served = 0
        registry.register(_Moment(state, fetched_bytes))
        self._apply_s = Histogram(
            f"{PREFIX}apply_seconds",
            "Seconds that a successful apply took: to stage (fetch and verify), paused, and in total",
            ["phase"],
            buckets=APPLY_BUCKETS_S,
            registry=registry,
        )
        self._publish_to_served_s = Histogram(
            f"{PREFIX}publish_to_served_seconds",
            "Seconds from a version's commit to its first answer, by the clocks of two hosts",
            buckets=PUBLISH_BUCKETS_S,
            registry=registry,
        )
        self._applies = Counter(f"{PREFIX}applies", "Versions made active", registry=registry)
        self._applied_bytes = Counter(
            f"{PREFIX}applied_bytes", "Bytes of tensors loaded into the engine", registry=registry
        )
        self._refusals = Counter(
            f"{PREFIX}refusals",
            "Tries to make a version active that failed, by kind",
            ["kind"],
            registry=registry,
        )
        for kind in RefusalKind:  # a counter that is there from the start shows its first increase
            self._refusals.labels(kind)

    def count_apply(self, applied: Applied) -> None:
        """A way back says nothing about how fast versions arrive: only newer ones count for that."""
        self._applies.inc()
        self._applied_bytes.inc(applied.bytes_applied)
        phases = {"stage": applied.stage_s, "pause": applied.pause_s, "total": applied.total_s}
        for phase, seconds in phases.items():
            self._apply_s.labels(phase).observe(seconds)
        if applied.number > self._newest_served:
            self._newest_served = applied.number
            self._publish_to_served_s.observe(max(applied.published_to_served_s, 0.0))

    def count_refusal(self, kind: RefusalKind) -> None:
        self._refusals.labels(kind).inc()


class _Moment(Collector):
    """What is so at the moment of the scrape."""

    def __init__(self, state: ServerState, fetched_bytes: Callable[[], int]) -> None:
        self._state, self._fetched_bytes = state, fetched_bytes

    def collect(self) -> Iterator[Metric]:
        state = self._state
        yield _gauge("active_version", "The version that answers; 0 is the base", state.active_version)
        yield _gauge("newest_version", "The newest version seen in the exchange", state.newest_version)
        yield _gauge("pinned_version", "The version that updates are held at, if any", state.pinned_version)
        yield _gauge("updates_paused", "1 while the operator has updates paused", state.are_updates_paused)
        yield _gauge("exchange_problem", "1 if the last look at the exchange failed", bool(state.problem))
        yield _gauge("leases_held", "Versions in the exchange that this server reads now", state.num_leases)
        yield _gauge(
            "healthy", "0 once the server is unhealthy and answers nothing", not state.unhealthy_reason
        )
        yield self._states()
        yield CounterMetricFamily(
            f"{PREFIX}fetched_bytes", "Bytes copied from the exchange", value=self._fetched_bytes()
        )

    def _states(self) -> Metric:
        family = GaugeMetricFamily(
            f"{PREFIX}state", "1 for the state that the server is in", labels=["state"]
        )
        for name in STATES:
            family.add_metric([name], float(name == self._state.state))
        return family


def _gauge(name: str, words: str, value: float | None) -> Metric:
    """A gauge without a value is named, and has no sample."""
    family = GaugeMetricFamily(f"{PREFIX}{name}", words)
    if value is not None:
        family.add_metric([], float(value))
    return family
