"""The Prometheus series: own registry, every one at zero from the start. API process only.

Names are `namespace:name`, as vLLM spells them, so that `--metrics-namespace vllm` feeds its dashboards and routers.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, cast

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.metrics.stats import SequenceStats
from server.protocol import EngineStats, FinishReason, Ready, StepOutput

CONTENT_TYPE = CONTENT_TYPE_LATEST
ENGINE = "0"

TTFT_BUCKETS = (
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
)  # fmt: skip
ITL_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
E2E_BUCKETS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
COUNT_BUCKETS = (1, 2, 5, 10, 20, 50, 100)

END_REASONS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR, FinishReason.TIMEOUT)
REJECT_REASONS = ("invalid", "unauthorized", "not_found", "too_large", "queue_full", "not_ready")


class EngineView(Protocol):
    """The part of frontend.client.EngineState that gauges are read from, at each scrape."""

    ready: Ready | None
    stats: EngineStats
    last_step_time: float | None
    num_restarts: int
    num_resumed: int

    @property
    def num_waiting(self) -> int: ...


class SequenceObserver:
    """One sequence's life, told to the series as it happens. end() counts once, however often it is called."""

    def __init__(self, metrics: "Metrics", stats: SequenceStats, *, counts_prompt: bool) -> None:
        self._metrics = metrics
        self._stats = stats
        self._counts_prompt = counts_prompt
        self.started = False
        """Something has come from the engine."""
        self._ended = False

    def on_tokens(
        self, num_tokens: int, *, scheduled_time: float | None = None, num_cached_tokens: int | None = None
    ) -> None:
        stats = self._stats
        if not self.started:
            self.started = True
            if self._counts_prompt:
                self._metrics.prompt_tokens.inc(stats.num_prompt_tokens)
        if scheduled_time is not None:
            stats.scheduled_time = scheduled_time
        if num_cached_tokens:
            self._metrics.prompt_tokens_cached.inc(num_cached_tokens)
        if num_tokens == 0:
            return
        now = time.monotonic()
        if stats.last_token_time is None:
            stats.first_token_time = now
            self._metrics.time_to_first_token.observe(now - stats.arrival_time)
        else:
            gap = (now - stats.last_token_time) / num_tokens
            for _ in range(num_tokens):
                self._metrics.inter_token_latency.observe(gap)
        stats.last_token_time = now
        stats.num_output_tokens += num_tokens
        self._metrics.generation_tokens.inc(num_tokens)

    def end(self, reason: FinishReason) -> None:
        if self._ended:
            return
        self._ended = True
        self._metrics.observe_end(self._stats, reason)


class Metrics:
    """Every series of the server. Written by: the output path (requests), the engine client (on_step), nobody else."""

    def __init__(self, *, model_name: str, namespace: str = "pageturner", max_model_len: int = 1 << 17) -> None:
        cast(Callable[[], None], disable_created_metrics)()
        self.registry = CollectorRegistry()
        self._namespace = namespace
        self._labels = {"model_name": model_name, "engine": ENGINE}
        ProcessCollector(registry=self.registry)
        self._make_counters()
        self._make_histograms(_one_two_five(max_model_len))
        self._engine_collector = _EngineCollector(namespace, self._labels)
        self.registry.register(self._engine_collector)

    def bind(self, view: EngineView) -> None:
        """From now on gauges come from here. Before that they read zero."""
        self._engine_collector.view = view

    def observe_request(self, *, num_choices: int, max_tokens: int) -> None:
        self._request_params_n.observe(num_choices)
        self._request_params_max_tokens.observe(max_tokens)

    def begin_sequence(self, *, arrival_time: float, num_prompt_tokens: int, counts_prompt: bool) -> SequenceObserver:
        """counts_prompt: False for the second and later choices of one prompt, which is read once."""
        return SequenceObserver(self, SequenceStats(arrival_time, num_prompt_tokens), counts_prompt=counts_prompt)

    def reject(self, reason: str) -> None:
        """A request that never became a sequence. reason: one of REJECT_REASONS."""
        self._rejected[reason].inc()

    def on_step(self, output: StepOutput) -> None:
        """Counters that grow with the engine's steps; call it once for each StepOutput."""
        stats = output.stats
        if output.step_id >= 0:
            self._iteration_tokens.observe(stats.step_num_tokens)
        self._prefix_cache_queries.inc(stats.prefix_cache_queries)
        self._prefix_cache_hits.inc(stats.prefix_cache_hits)
        self._num_preemptions.inc(stats.num_preemptions)
        self._preemption_recomputed_tokens.inc(stats.preemption_recomputed_tokens)

    def observe_end(self, stats: SequenceStats, reason: FinishReason) -> None:
        self._ends[reason].inc()
        self._e2e_latency.observe(time.monotonic() - stats.arrival_time)
        self._request_prompt_tokens.observe(stats.num_prompt_tokens)
        self._request_generation_tokens.observe(stats.num_output_tokens)
        for histogram, value in (
            (self._queue_time, stats.queue_time_s),
            (self._inference_time, stats.inference_time_s),
            (self._prefill_time, stats.prefill_time_s),
            (self._decode_time, stats.decode_time_s),
            (self._time_per_output_token, stats.time_per_output_token_s),
        ):
            if value is not None:
                histogram.observe(value)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _make_counters(self) -> None:
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens read.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens written.")
        self.prompt_tokens_cached = self._counter("prompt_tokens_cached", "Prompt tokens taken from the prefix cache.")
        self._prefix_cache_queries = self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self._prefix_cache_hits = self._counter("prefix_cache_hits", "Tokens found in the prefix cache.")
        self._num_preemptions = self._counter("num_preemptions", "Requests that lost their blocks to others.")
        self._preemption_recomputed_tokens = self._counter(
            "preemption_recomputed_tokens", "Tokens computed again after a preemption."
        )
        ends = Counter(
            f"{self._namespace}:request_success", "Ended sequences by reason.",
            ["model_name", "engine", "finished_reason"], registry=self.registry,
        )  # fmt: skip
        self._ends = {r: ends.labels(**self._labels, finished_reason=r.value) for r in END_REASONS}
        rejected = Counter(
            f"{self._namespace}:requests_rejected", "Requests turned away by reason.",
            ["model_name", "engine", "reason"], registry=self.registry,
        )  # fmt: skip
        self._rejected = {r: rejected.labels(**self._labels, reason=r) for r in REJECT_REASONS}

    def _make_histograms(self, length_buckets: Sequence[float]) -> None:
        seconds, lengths = self._histogram, length_buckets
        self.time_to_first_token = seconds("time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS)
        self.inter_token_latency = seconds("inter_token_latency_seconds", "Between two tokens.", ITL_BUCKETS)
        self._time_per_output_token = seconds(
            "request_time_per_output_token_seconds", "Mean over a request's tokens after the first.", ITL_BUCKETS
        )
        self._e2e_latency = seconds("e2e_request_latency_seconds", "Arrival to end.", E2E_BUCKETS)
        self._queue_time = seconds("request_queue_time_seconds", "Arrival to first step.", E2E_BUCKETS)
        self._inference_time = seconds("request_inference_time_seconds", "First step to last token.", E2E_BUCKETS)
        self._prefill_time = seconds("request_prefill_time_seconds", "First step to first token.", E2E_BUCKETS)
        self._decode_time = seconds("request_decode_time_seconds", "First token to last token.", E2E_BUCKETS)
        self._request_prompt_tokens = seconds("request_prompt_tokens", "Prompt length.", lengths)
        self._request_generation_tokens = seconds("request_generation_tokens", "Output length.", lengths)
        self._request_params_max_tokens = seconds("request_params_max_tokens", "max_tokens asked for.", lengths)
        self._request_params_n = seconds("request_params_n", "Choices asked for.", COUNT_BUCKETS)
        self._iteration_tokens = seconds("iteration_tokens_total", "Tokens computed in a step.", lengths)

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(f"{self._namespace}:{name}", text, list(self._labels), registry=self.registry)
        return counter.labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(
            f"{self._namespace}:{name}", text, list(self._labels), registry=self.registry, buckets=buckets
        )
        return histogram.labels(**self._labels)


class _EngineCollector(Collector):
    """Reads the engine's state when scraped: nothing to keep in step, nothing to go stale."""

    def __init__(self, namespace: str, labels: dict[str, str]) -> None:
        self._namespace = namespace
        self._labels = labels
        self.view: EngineView | None = None

    def collect(self) -> Iterator[Metric]:
        view = self.view
        stats = EngineStats() if view is None else view.stats
        ready = None if view is None else view.ready
        block_size = 0 if ready is None else ready.block_size
        num_blocks = stats.blocks_used + stats.blocks_cached + stats.blocks_free
        num_waiting = 0 if view is None else view.num_waiting
        age = 0.0
        if view is not None and view.last_step_time is not None:
            age = max(0.0, time.monotonic() - view.last_step_time)
        yield self._gauge("num_requests_running", "Requests in the batch.", [({}, stats.num_running)])
        yield self._gauge("num_requests_waiting", "Requests in the queue.", [({}, num_waiting)])
        usage = stats.blocks_used / num_blocks if num_blocks else 0.0
        yield self._gauge("kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.", [({}, usage)])
        config = {"block_size": str(block_size), "num_gpu_blocks": str(0 if ready is None else ready.num_blocks)}
        yield self._gauge("cache_config_info", "Shape of the KV cache.", [(config, 1)])
        tokens = {"used": stats.blocks_used, "cached": stats.blocks_cached, "free": stats.blocks_free}
        yield self._gauge(
            "kv_tokens", "KV slots by state.", [({"state": k}, v * block_size) for k, v in tokens.items()]
        )
        ledger = None if ready is None else ready.ledger
        memory = {
            "weights": 0 if ledger is None else ledger.weights,
            "kv": 0 if ledger is None else ledger.kv_cache,
            "activations": 0 if ledger is None else ledger.activations,
            "free": 0 if ledger is None else ledger.free,
        }
        yield self._gauge("memory_bytes", "Memory by use.", [({"part": k}, v) for k, v in memory.items()])
        yield self._gauge("engine_step_age_seconds", "Since the newest step ended.", [({}, age)])
        yield self._total("engine_restarts", "Engine processes replaced.", 0 if view is None else view.num_restarts)
        yield self._total(
            "requests_resumed", "Requests carried over a restart.", 0 if view is None else view.num_resumed
        )

    def _gauge(self, name: str, text: str, samples: Iterable[tuple[dict[str, str], float]]) -> Metric:
        family: GaugeMetricFamily | None = None
        for extra, value in samples:
            labels = {**self._labels, **extra}
            if family is None:
                family = GaugeMetricFamily(f"{self._namespace}:{name}", text, labels=list(labels))
            family.add_metric(list(labels.values()), value)
        assert family is not None
        return family

    def _total(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"{self._namespace}:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family


def _one_two_five(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, ... up to the first that is not below `most`."""
    buckets: list[float] = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            buckets.append(step * scale)
            if step * scale >= most:
                return tuple(buckets)
        scale *= 10
