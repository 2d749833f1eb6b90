"""Prometheus instruments built from the table in ``telemetry.names``.

One ``MetricSet`` per process part, with its own registry, so that tests and two programs in one
process never collide. Invariant: only label values of the closed sets are ever exported.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from telemetry.names import MetricKind, MetricSpec

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of ``MetricSet.render``. Source: Prometheus text exposition format 0.0.4."""


class TelemetryError(ValueError):
    """Root of the telemetry room's errors."""


class UnknownLabelValue(TelemetryError):
    """A label value outside its closed set, or the wrong number of them."""

    def __init__(self, spec: MetricSpec, values: tuple[str, ...], detail: str) -> None:
        super().__init__(f"metric {spec.name} does not take labels {values!r}: {detail}")
        self.spec = spec
        self.values = values


class MetricSet:
    """The instruments of one program."""

    def __init__(self, specs: Iterable[MetricSpec], *, slo_s: float | None = None) -> None:
        """Create all instruments.

        Args:
            specs: the metrics, such as ``names.WORKER_METRICS``.
            slo_s: the deadline, added as a bucket to histograms that ask for it. Unit: seconds.
        """
        self.registry = CollectorRegistry(auto_describe=True)
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for spec in specs:
            labels = tuple(label.label for label in spec.labels)
            if spec.kind is MetricKind.COUNTER:
                self._counters[spec.name] = Counter(
                    spec.name, spec.help, labels, registry=self.registry
                )
            elif spec.kind is MetricKind.GAUGE:
                self._gauges[spec.name] = Gauge(
                    spec.name, spec.help, labels, registry=self.registry
                )
            else:
                extra = {slo_s} if spec.has_slo_bucket and slo_s is not None else set()
                self._histograms[spec.name] = Histogram(
                    spec.name,
                    spec.help,
                    labels,
                    registry=self.registry,
                    buckets=sorted({*spec.buckets, *extra}),
                )

    def add(self, spec: MetricSpec, amount: float = 1.0, *values: str) -> None:
        """Increase a counter.

        Args:
            spec: a counter.
            amount: what to add, not negative, in the unit of the name.
            values: one value per label of the metric, in order.

        Raises:
            UnknownLabelValue: a value outside the label's closed set.
        """
        counter = self._counters[spec.name]
        (counter.labels(*_checked(spec, values)) if spec.labels else counter).inc(amount)

    def set(self, spec: MetricSpec, value: float, *values: str) -> None:
        """Set a gauge; arguments and errors as for ``add``."""
        gauge = self._gauges[spec.name]
        (gauge.labels(*_checked(spec, values)) if spec.labels else gauge).set(value)

    def observe(self, spec: MetricSpec, value: float, *values: str) -> None:
        """Put one value into a histogram; arguments and errors as for ``add``."""
        histogram = self._histograms[spec.name]
        (histogram.labels(*_checked(spec, values)) if spec.labels else histogram).observe(value)

    def render(self) -> bytes:
        """Return all metrics in the Prometheus text format, to be served as ``CONTENT_TYPE``."""
        return generate_latest(self.registry)


def _checked(spec: MetricSpec, values: tuple[str, ...]) -> tuple[str, ...]:
    if len(values) != len(spec.labels):
        raise UnknownLabelValue(spec, values, f"takes {len(spec.labels)} of them")
    for label, value in zip(spec.labels, values, strict=True):
        if value not in label.allowed:
            raise UnknownLabelValue(spec, values, f"{label.label}={value!r} is not in its set")
    return values
