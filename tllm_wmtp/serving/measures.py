"""What a server's metrics endpoint shows of an engine, whichever server it is."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tllm_wmtp.metrics import (
    EngineUsage,
    RequestMetrics,
    acceptance_length,
    conditional_acceptance,
)

#: Gauges of acceptance and time pool so many requests, the last ones to finish.
LATEST = 256
GAUGES = {
    "wmtp_requests_running": "requests that hold a slot of the batch",
    "wmtp_requests_waiting": "requests that wait for one",
    "wmtp_lanes_used": "draft rings that a request owns",
    "wmtp_kv_pages_used": "pages of the KV pool that requests hold",
    "wmtp_kv_pages": "pages of the KV pool",
    "wmtp_acceptance_length": f"tokens per step, of the last {LATEST} finished requests",
    "wmtp_tpot_seconds": f"median time per output token of the last {LATEST} finished requests",
    "wmtp_ttft_seconds": f"median time to the first token of the last {LATEST} finished requests",
}
ALPHA = "wmtp_conditional_acceptance"
ALPHA_MEANING = (
    f"share of the steps that reached a draft and accepted it, of the last {LATEST} finished "
    "requests"
)
COUNTERS = {
    "wmtp_requests_total": "requests that ended",
    "wmtp_steps_total": "steps of ended requests",
    "wmtp_prompt_tokens_total": "prompt tokens of ended requests",
    "wmtp_output_tokens_total": "output tokens of ended requests",
}
#: A family's own label: the draft's position from 1, how a request ended, accepted drafts.
CASES = {ALPHA: "position", "wmtp_requests_total": "finish_reason", "wmtp_steps_total": "accepted"}
FINISH_REASONS = ("stop", "length", "abort", "error")


@dataclass(frozen=True)
class _Ended:
    """What the gauges need of one request."""

    accepted_histogram: list[int]
    draft_trials: list[int]
    tpot_s: float | None
    ttft_s: float | None


class Prometheus:
    """The instance's custom metrics. Used from one thread at a time.

    Args:
        backend: Triton's ``triton_python_backend_utils``.
        labels: on every metric.

    Raises:
        what a server raises that was built without metrics.
    """

    def __init__(self, backend: Any, labels: Mapping[str, str]):
        family = backend.MetricFamily
        self._labels = dict(labels)
        self._families = {
            **{name: family(name, text, family.GAUGE) for name, text in GAUGES.items()},
            ALPHA: family(ALPHA, ALPHA_MEANING, family.GAUGE),
            **{name: family(name, text, family.COUNTER) for name, text in COUNTERS.items()},
        }
        self._metrics: dict[tuple[str, str | None], Any] = {}
        self._latest: deque[_Ended] = deque(maxlen=LATEST)
        self._shown = True
        for reason in FINISH_REASONS:
            self._add("wmtp_requests_total", 0, reason)

    def show_usage(self, usage: EngineUsage) -> None:
        self._set("wmtp_requests_running", usage.running)
        self._set("wmtp_requests_waiting", usage.waiting)
        self._set("wmtp_lanes_used", usage.lanes_used)
        self._set("wmtp_kv_pages_used", usage.kv_pages_used)
        self._set("wmtp_kv_pages", usage.kv_pages)

    def count(self, finish_reason: str, metrics: RequestMetrics | None) -> None:
        """One request has ended; ``metrics`` is None if it never reached the engine."""
        self._add("wmtp_requests_total", 1, finish_reason)
        if metrics is None:
            return
        self._add("wmtp_prompt_tokens_total", metrics.prompt_tokens)
        self._add("wmtp_output_tokens_total", metrics.output_tokens)
        for accepted, steps in enumerate(metrics.accepted_histogram):
            self._add("wmtp_steps_total", steps, str(accepted))
        self._latest.append(
            _Ended(metrics.accepted_histogram, metrics.draft_trials, metrics.tpot_s, metrics.ttft_s)
        )
        self._shown = False

    def show_acceptance(self) -> None:
        """Acceptance and times of the latest requests; what has no value yet is not shown."""
        if self._shown:
            return
        self._shown = True
        histogram = _sums(ended.accepted_histogram for ended in self._latest)
        trials = _sums(ended.draft_trials for ended in self._latest)
        if any(histogram):
            self._set("wmtp_acceptance_length", acceptance_length(histogram))
        for position, alpha in enumerate(conditional_acceptance(histogram, trials), start=1):
            if alpha.trials:
                self._set(ALPHA, alpha.value, str(position))
        tpot_s = [ended.tpot_s for ended in self._latest if ended.tpot_s is not None]
        ttft_s = [ended.ttft_s for ended in self._latest if ended.ttft_s is not None]
        if tpot_s:
            self._set("wmtp_tpot_seconds", statistics.median(tpot_s))
        if ttft_s:
            self._set("wmtp_ttft_seconds", statistics.median(ttft_s))

    def _set(self, name: str, value: float, case: str | None = None) -> None:
        self._metric(name, case).set(value)

    def _add(self, name: str, amount: float, case: str | None = None) -> None:
        self._metric(name, case).increment(amount)

    def _metric(self, name: str, case: str | None) -> Any:
        """The family's member for this value of its own label."""
        if (name, case) not in self._metrics:
            labels = self._labels if case is None else self._labels | {CASES[name]: case}
            self._metrics[name, case] = self._families[name].Metric(labels=labels)
        return self._metrics[name, case]


def _sums(columns: Iterable[list[int]]) -> list[int]:
    """Position by position; the requests of one instance have equally many."""
    return [sum(column) for column in zip(*columns, strict=True)]
