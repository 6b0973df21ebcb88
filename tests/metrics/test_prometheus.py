"""The series that dashboards, routers and autoscalers read."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.metrics.prometheus import END_REASONS, REJECT_REASONS, Metrics
from server.protocol import EngineStats, FinishReason, StepOutput
from tests.api.fakes import READY, FakeState

COUNTERS = ("prompt_tokens", "generation_tokens", "prompt_tokens_cached", "prefix_cache_queries", "prefix_cache_hits",
            "num_preemptions", "preemption_recomputed_tokens", "request_success", "requests_rejected",
            "engine_restarts", "requests_resumed")  # fmt: skip
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info", "kv_tokens",
          "memory_bytes", "engine_step_age_seconds")  # fmt: skip
HISTOGRAMS = ("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
              "e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds",
              "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
              "request_generation_tokens", "request_params_max_tokens", "request_params_n",
              "iteration_tokens_total")  # fmt: skip


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (s.name, frozenset(s.labels.items()) - {("model_name", "m"), ("engine", "0")}): s.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for s in family.samples
    }


@pytest.mark.parametrize("namespace", ["pageturner", "vllm"])
def test_every_series_is_there_at_zero(namespace: str) -> None:
    """Guards rate() and alerts: a series that first appears with its first event loses that event."""
    metrics = Metrics(model_name="m", namespace=namespace)
    values = samples(metrics)
    names = {name for name, _ in values}
    for name in COUNTERS:
        assert f"{namespace}:{name}_total" in names
    for name in GAUGES:
        assert f"{namespace}:{name}" in names
    for name in HISTOGRAMS:
        assert values[f"{namespace}:{name}_count", frozenset()] == 0
    for reason in END_REASONS:
        assert values[f"{namespace}:request_success_total", frozenset({("finished_reason", reason.value)})] == 0
    for reject in REJECT_REASONS:
        assert values[f"{namespace}:requests_rejected_total", frozenset({("reason", reject)})] == 0
    mine = [
        v for (name, labels), v in values.items() if name.startswith(namespace) and "block_size" not in dict(labels)
    ]
    assert set(mine) == {0.0}


def test_gauges_are_read_when_scraped() -> None:
    """Guards against stale gauges: what the engine says now is what a scrape shows, idle or not."""
    metrics, state = (
        Metrics(model_name="m"),
        FakeState(last_step_time=0.0, num_waiting=4, num_restarts=2, num_resumed=5),
    )
    metrics.bind(state)
    state.stats = EngineStats(num_running=3, blocks_used=64, blocks_cached=32, blocks_free=160)
    values = samples(metrics)
    assert values["pageturner:num_requests_running", frozenset()] == 3
    assert values["pageturner:num_requests_waiting", frozenset()] == 4
    assert values["pageturner:kv_cache_usage_perc", frozenset()] == 0.25
    assert values["pageturner:kv_tokens", frozenset({("state", "cached")})] == 512
    assert values["pageturner:memory_bytes", frozenset({("part", "kv")})] == READY.ledger.kv_cache
    config = frozenset({("block_size", "16"), ("num_gpu_blocks", "256")})
    assert values["pageturner:cache_config_info", config] == 1
    assert values["pageturner:engine_restarts_total", frozenset()] == 2
    assert values["pageturner:requests_resumed_total", frozenset()] == 5
    assert values["pageturner:engine_step_age_seconds", frozenset()] > 0
    state.stats = EngineStats()
    assert samples(metrics)["pageturner:num_requests_running", frozenset()] == 0


def test_steps_add_up() -> None:
    """Guards counters that come as growth, and that a message without a step is no step."""
    metrics = Metrics(model_name="m")
    stats = EngineStats(step_num_tokens=7, prefix_cache_queries=10, prefix_cache_hits=4, num_preemptions=1)
    metrics.on_step(StepOutput(1, [], stats, 0.0))
    metrics.on_step(StepOutput(2, [], stats, 0.0))
    metrics.on_step(StepOutput(-1, [], EngineStats(num_preemptions=1), 0.0))
    values = samples(metrics)
    assert values["pageturner:iteration_tokens_total_count", frozenset()] == 2
    assert values["pageturner:iteration_tokens_total_sum", frozenset()] == 14
    assert values["pageturner:prefix_cache_hits_total", frozenset()] == 8
    assert values["pageturner:num_preemptions_total", frozenset()] == 3


def test_a_sequence_counts_once() -> None:
    """Guards TTFT (one observation), token counts, and the end, whoever reports it twice."""
    metrics = Metrics(model_name="m")
    observer = metrics.begin_sequence(arrival_time=0.0, num_prompt_tokens=9, counts_prompt=True)
    observer.on_tokens(0, scheduled_time=1.0, num_cached_tokens=4)
    observer.on_tokens(1)
    observer.on_tokens(3)
    observer.end(FinishReason.STOP)
    observer.end(FinishReason.ABORT)
    values = samples(metrics)
    assert values["pageturner:prompt_tokens_total", frozenset()] == 9
    assert values["pageturner:prompt_tokens_cached_total", frozenset()] == 4
    assert values["pageturner:generation_tokens_total", frozenset()] == 4
    assert values["pageturner:time_to_first_token_seconds_count", frozenset()] == 1
    assert values["pageturner:inter_token_latency_seconds_count", frozenset()] == 3
    ends = {
        r.value: values["pageturner:request_success_total", frozenset({("finished_reason", r.value)})]
        for r in END_REASONS
    }
    assert ends == {"stop": 1, "length": 0, "abort": 0, "error": 0, "timeout": 0}
    for name in ("queue_time", "prefill_time", "decode_time", "inference_time"):
        assert values[f"pageturner:request_{name}_seconds_count", frozenset()] == 1
    assert values["pageturner:request_generation_tokens_sum", frozenset()] == 4


def test_a_sequence_that_never_ran() -> None:
    """Guards times that do not exist from being observed as zero."""
    metrics = Metrics(model_name="m")
    metrics.begin_sequence(arrival_time=0.0, num_prompt_tokens=9, counts_prompt=False).end(FinishReason.ABORT)
    values = samples(metrics)
    assert values["pageturner:prompt_tokens_total", frozenset()] == 0
    assert values["pageturner:request_queue_time_seconds_count", frozenset()] == 0
    assert values["pageturner:e2e_request_latency_seconds_count", frozenset()] == 1


def test_length_buckets_reach_the_limit() -> None:
    """Guards quantiles of long prompts: the last finite bucket is not below the model's limit."""
    metrics = Metrics(model_name="m", max_model_len=8192)
    bounds = [
        float(dict(labels)["le"])
        for name, labels in samples(metrics)
        if name == "pageturner:request_prompt_tokens_bucket"
    ]
    assert sorted(bounds)[-2:] == [10000.0, float("inf")]
    assert 200.0 in bounds
