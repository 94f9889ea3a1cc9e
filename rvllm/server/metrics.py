"""Prometheus metrics under vLLM's names, with the prefix rvllm: instead of vllm:."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from rvllm.async_engine import AsyncEngine

# Seconds, vLLM's buckets.
_FIRST_TOKEN = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
)
_INTER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """What /metrics shows. The engine thread calls the on_... methods (EngineObserver)."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name}

        def histogram(name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(
                f"rvllm:{name}", documentation, ["model_name"], registry=self.registry, buckets=buckets
            )
            return metric.labels(model_name)

        self._first_token = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN
        )
        self._inter_token = histogram("inter_token_latency_seconds", "Between two tokens.", _INTER_TOKEN)
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST)
        self._prompt_tokens = histogram("request_prompt_tokens", "Tokens of the prompt.", _TOKENS)
        self._generation_tokens = histogram("request_generation_tokens", "Tokens of the answer.", _TOKENS)
        self._finished = self._counter(
            "request_success", "Requests that ended, by reason.", "finished_reason"
        )
        self._rejected = self._counter(
            "admission_rejections", "Requests that were refused, by reason.", "reason"
        )
        self._prompt_total = self._counter("prompt_tokens", "Prompt tokens of requests that ended.")
        self._generation_total = self._counter("generation_tokens", "Tokens generated.")
        for reason in ("stop", "length", "abort", "timeout", "error"):
            self._finished.labels(model_name, reason)
        for counter in (self._prompt_total, self._generation_total):
            counter.labels(model_name)  # shown as 0 from the start, so that a rate sees the first request

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(f"rvllm:{name}", documentation, ["model_name", *labels], registry=self.registry)

    def observe_engine(self, engine: AsyncEngine) -> None:
        """Shows the engine's own counters and gauges as well, as they are at each scrape."""
        self.registry.register(_EngineCollector(engine, self._labels))

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def on_rejected(self, reason: str) -> None:
        self._rejected.labels(**self._labels, reason=reason).inc()

    def on_first_token(self, seconds: float, n: int) -> None:
        self._first_token.observe(seconds)
        self._generation_total.labels(**self._labels).inc(n)

    def on_tokens(self, itl_seconds: float, n: int) -> None:
        for _ in range(n):
            self._inter_token.observe(itl_seconds)
        self._generation_total.labels(**self._labels).inc(n)

    def on_finished(
        self, reason: str, e2e_seconds: float, prompt_tokens: int, generation_tokens: int
    ) -> None:
        self._finished.labels(**self._labels, finished_reason=reason).inc()
        self._e2e.observe(e2e_seconds)
        self._prompt_tokens.observe(prompt_tokens)
        self._generation_tokens.observe(generation_tokens)
        self._prompt_total.labels(**self._labels).inc(prompt_tokens)


class _EngineCollector(Collector):
    def __init__(self, engine: AsyncEngine, labels: dict[str, str]) -> None:
        self._engine = engine
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        stats = self._engine.stats()
        gauges = {
            "num_requests_running": ("Requests that run.", self._engine.num_running),
            "num_requests_waiting": ("Requests that wait to run.", self._engine.num_waiting),
            "kv_cache_usage_perc": ("Share of the KV cache in use, 1 is all of it.", stats.kv_cache_usage),
        }
        counters = {
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
            "prefix_cache_hits": ("Prompt tokens found there.", stats.prefix_hits),
            "num_preemptions": ("Requests that had to give up their blocks.", stats.preemptions),
            "engine_steps": ("Steps computed.", stats.steps),
        }
        for name, (documentation, value) in gauges.items():
            yield self._add(
                GaugeMetricFamily(f"rvllm:{name}", documentation, labels=list(self._labels)), value
            )
        for name, (documentation, count) in counters.items():
            yield self._add(
                CounterMetricFamily(f"rvllm:{name}", documentation, labels=list(self._labels)), count
            )

    def _add(self, family: GaugeMetricFamily | CounterMetricFamily, value: float) -> Metric:
        family.add_metric(list(self._labels.values()), value)
        return family
