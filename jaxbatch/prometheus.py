"""Dispatchers' statistics for Prometheus; needs `jaxbatch[prometheus]`.

    from prometheus_client import REGISTRY
    from jaxbatch.prometheus import DispatcherCollector

    REGISTRY.register(DispatcherCollector({"embed": dispatcher}))

Nothing is counted here: each scrape reads `Dispatcher.statistics()`.
"""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from ._dispatch import Dispatcher
from ._waits import DispatcherStatistics

_COUNTERS = {
    "submitted": "requests that were accepted",
    "invalid": "examples that did not match the spec or were too large",
    "refused": "examples that were not accepted since the dispatcher was full",
    "batches": "batches that ran",
    "failed_batches": "batches that failed and were split",
    "rows": "rows of the batches that ran",
    "filled_rows": "rows that held an example",
    "valid_cells": "cells of examples that ran",
    "padded_cells": "cells of the batches that ran",
}
_GAUGES = {
    "pending": "requests that wait",
    "pending_cells": "padded cells of the requests that wait",
    "in_flight": "batches that run",
}
_TIMES = {
    "queued": "waiting for the device, for others before, or for a program",
    "waited": "waiting for mates while the device was free",
    "ran": "from the start of a request's batch to its result",
    "total": "from submit to the result",
}


class DispatcherCollector(Collector):
    """Reads the statistics of some dispatchers at each scrape.

    Args:
      dispatchers: by the name that the label `dispatcher` gets; the mapping may change later.
      prefix: what all names of metrics begin with.
    """

    def __init__(self, dispatchers: Mapping[str, Dispatcher], prefix: str = "jaxbatch_dispatcher"):
        self._dispatchers = dispatchers
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics: counters, gauges, sums of seconds, and gauges of their latest quantiles."""
        found = {name: each.statistics() for name, each in dict(self._dispatchers).items()}
        for field, text in _COUNTERS.items():
            yield self._values(CounterMetricFamily, field, text, found)
        outcomes = CounterMetricFamily(
            f"{self._prefix}_ended", "requests that ended, by outcome", labels=["dispatcher", "outcome"]
        )
        for name, statistics in found.items():
            for outcome, num in statistics.outcomes.items():
                outcomes.add_metric([name, outcome], num)
        yield outcomes
        for field, text in _GAUGES.items():
            yield self._values(GaugeMetricFamily, field, text, found)
        for field, text in _TIMES.items():
            yield from self._times(field, text, found)

    def _values(
        self, family: type, field: str, text: str, found: Mapping[str, DispatcherStatistics]
    ) -> Metric:
        metric = family(f"{self._prefix}_{field}", text, labels=["dispatcher"])
        for name, statistics in found.items():
            metric.add_metric([name], getattr(statistics, field))
        return metric

    def _times(self, field: str, text: str, found: Mapping[str, DispatcherStatistics]) -> Iterator[Metric]:
        name = f"{self._prefix}_{field}_seconds"
        summary = SummaryMetricFamily(name, text, labels=["dispatcher"])
        latest = GaugeMetricFamily(f"{name}_latest", f"{text}: quantiles", labels=["dispatcher", "quantile"])
        for dispatcher, statistics in found.items():
            times = getattr(statistics, field)
            summary.add_metric([dispatcher], times.count, times.sum)
            for quantile in (50, 90, 99):
                latest.add_metric([dispatcher, f"0.{quantile}"], getattr(times, f"p{quantile}"))
        yield summary
        yield latest
