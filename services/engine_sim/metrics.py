"""Prometheus text of one simulated server, with vLLM's names, labels and buckets.

Source: vllm/v1/metrics/loggers.py. Times are real seconds, as a scraper of a server this fast would see them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from common.sim.engine import STEP_TOKEN_BUCKETS, EngineModel

TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0),
    *(480.0, 960.0, 1920.0, 7680.0),
)
FINISH_REASONS = ("stop", "length", "abort", "error")
CACHE_BLOCK_TOKENS = 16  # vLLM's block_size
PROCESS_PAGE = (
    b"# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.\n"
    b"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds %.2f\n"
)
CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """Counts by bucket; `observe` takes several equal values at once."""

    __slots__ = ("buckets", "counts", "sum")

    def __init__(self, buckets: Sequence[float]) -> None:
        self.buckets = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add `count` observations of `value`. O(log buckets)."""
        self.counts[bisect_left(self.buckets, value)] += count
        self.sum += value * count


class Metrics:
    """What the engine model does not count itself."""

    __slots__ = ("e2e", "finished", "inter_token", "ttft")

    def __init__(self) -> None:
        self.ttft = Histogram(TTFT_BUCKETS_S)
        self.inter_token = Histogram(TOKEN_BUCKETS_S)
        self.e2e = Histogram(REQUEST_BUCKETS_S)
        self.finished = dict.fromkeys(FINISH_REASONS, 0)

    def render(self, model: EngineModel, model_name: str, started_wall_s: float) -> bytes:
        """The whole page. `started_wall_s`: when the process began, Unix seconds."""
        page = _Page(f'engine="0",model_name="{model_name}"')
        page.value("gauge", "num_requests_running", "Number of requests in model execution batches.", model.running)
        page.value("gauge", "num_requests_waiting", "Number of requests waiting to be processed.", model.waiting)
        page.value("gauge", "kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", model.kv_utilization)
        page.value(
            "counter", "prefix_cache_queries_total", "Prefix cache queries, in queried tokens.", model.prefix_queries
        )
        page.value("counter", "prefix_cache_hits_total", "Prefix cache hits, in cached tokens.", model.prefix_hits)
        page.value("counter", "num_preemptions_total", "Preemptions by the engine.", model.preemptions)
        page.value("counter", "prompt_tokens_total", "Number of prefill tokens processed.", model.prompt_tokens)
        page.value(
            "counter", "generation_tokens_total", "Number of generation tokens processed.", model.generated_tokens
        )
        page.family("counter", "request_success_total", "Count of successfully processed requests.")
        for reason, count in self.finished.items():
            page.sample("request_success_total", count, f'finished_reason="{reason}"')
        page.histogram(
            "iteration_tokens_total",
            "Histogram of number of tokens per engine_step.",
            STEP_TOKEN_BUCKETS,
            model.step_tokens,
            model.step_tokens_sum,
        )
        for name, what, histogram in (
            ("time_to_first_token_seconds", "Histogram of time to first token in seconds.", self.ttft),
            ("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", self.inter_token),
            ("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", self.e2e),
        ):
            page.histogram(name, what, histogram.buckets, histogram.counts, histogram.sum)
        page.family("gauge", "cache_config_info", "Information of the LLMEngine CacheConfig")
        blocks = model.kv_capacity // CACHE_BLOCK_TOKENS
        page.sample("cache_config_info", 1, f'block_size="{CACHE_BLOCK_TOKENS}",num_gpu_blocks="{blocks}"')
        return page.text() + PROCESS_PAGE % started_wall_s


class _Page:
    def __init__(self, labels: str) -> None:
        self._labels = labels
        self._lines: list[str] = []

    def family(self, kind: str, name: str, what: str) -> None:
        self._lines += (f"# HELP vllm:{name} {what}", f"# TYPE vllm:{name} {kind}")

    def sample(self, name: str, value: float, more: str = "") -> None:
        labels = f"{self._labels},{more}" if more else self._labels
        self._lines.append(f"vllm:{name}{{{labels}}} {float(value)!r}")

    def value(self, kind: str, name: str, what: str, value: float) -> None:
        self.family(kind, name, what)
        self.sample(name, value)

    def histogram(self, name: str, what: str, buckets: Iterable[float], counts: Sequence[int], total: float) -> None:
        self.family("histogram", name, what)
        seen = 0
        for least, count in zip(buckets, counts, strict=False):  # the last count is beyond all buckets
            seen += count
            self.sample(f"{name}_bucket", seen, f'le="{float(least)!r}"')
        everything = sum(counts)
        self.sample(f"{name}_bucket", everything, 'le="+Inf"')
        self.sample(f"{name}_count", everything)
        self.sample(f"{name}_sum", total)

    def text(self) -> bytes:
        return "\n".join((*self._lines, "")).encode()
