"""Eviction in vLLM's own /metrics: the scheduler's reports turned into Prometheus metrics."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.config import VllmConfig

from vllm_evict.config import CONFIG_KEY
from vllm_evict.engine.configure import config_of

_SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_current: EvictionMetrics | None = None


class EvictionMetrics:
    """All metrics of one front end, labelled ``model_name`` and ``engine`` as vLLM's are."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        global _current
        _current = self
        self._model_name = vllm_config.model_config.served_model_name
        labels = ["model_name", "engine"]

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(f"vllm:kv_eviction_{name}", text, [*labels, *more])

        def gauge(name: str, text: str) -> Gauge:
            # With several API servers the newest report counts, whichever of them got it.
            return Gauge(f"vllm:kv_eviction_{name}", text, labels, multiprocess_mode="mostrecent")

        self.evicted_pages = counter("evicted_pages", "Pages taken from requests.", "policy", "reason")
        self.freed_pages = counter("freed_pages", "Evicted pages that went back to the pool (nobody shared them).")
        self.preemptions_saved = counter("preemptions_saved", "Times that pages over the floor spared a preemption.")
        self.rebases = counter("rebases", "Times that the positions of a request's pages were moved down.")
        self.score_seconds = counter("score_seconds", "Seconds that workers spent on measuring pages.")
        self.refused = counter("refused_requests", "Requests refused: wishes not allowed, or never to be held.")
        self.resident = gauge("resident_tokens", "Tokens' worth of pages that running requests hold.")
        self.logical = gauge("logical_tokens", "Tokens' worth of pages that they would hold without eviction.")
        self.mass_share = Histogram(
            "vllm:kv_eviction_evicted_mass_share",
            "Share of a request's attention mass on the pages that one decision took.",
            labels,
            buckets=_SHARES,
        )
        self.refused.labels(self._model_name, "0")

    def record(self, report: dict[str, Any], engine: int) -> None:
        """Add one report of the scheduler (``EvictionStats.take_report``)."""
        labels = (self._model_name, str(engine))
        for policy, reason, num_pages in report["evicted_pages"]:
            self.evicted_pages.labels(*labels, policy, reason).inc(num_pages)
        for share in report["evicted_mass_shares"]:
            self.mass_share.labels(*labels).observe(share)
        self.resident.labels(*labels).set(report["resident_tokens"])
        self.logical.labels(*labels).set(report["logical_tokens"])
        self.freed_pages.labels(*labels).inc(report.get("freed", 0))
        self.preemptions_saved.labels(*labels).inc(report.get("preemptions_saved", 0))
        self.rebases.labels(*labels).inc(report.get("rebases", 0))
        self.score_seconds.labels(*labels).inc(report.get("score_seconds", 0))

    def refuse(self) -> None:
        """A request was refused in this front end."""
        self.refused.labels(self._model_name, "0").inc()


def metrics_of(vllm_config: VllmConfig) -> EvictionMetrics | None:
    """The metrics of a new front end; None if its engine does not evict."""
    return EvictionMetrics(vllm_config) if config_of(vllm_config).enabled else None


def count_refused_request() -> None:
    """Count in whatever metrics this process has; none if it keeps no statistics."""
    if _current is not None:
        _current.refuse()


def take_report(scheduler_stats: Any) -> dict[str, Any] | None:
    """Our report out of a ``SchedulerStats``, which is then as if no one had put it there."""
    stats = scheduler_stats.kv_connector_stats if scheduler_stats is not None else None
    if not stats or CONFIG_KEY not in stats:
        return None
    scheduler_stats.kv_connector_stats = None
    return stats[CONFIG_KEY]
