"""The runtime's own timers of a step's phases: which forward lies in which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from engines import ScriptedProposer, engine, run
from tiny_model import random_prompts, tiny_checkpoint

import tllm_wmtp.executor.draft as draft
import tllm_wmtp.executor.speculation as speculation
from tllm_wmtp.config import MtpConfig
from tllm_wmtp.executor.engine import Engine
from tllm_wmtp.executor.request import Request
from tllm_wmtp.metrics import RequestMetrics, summarise
from tllm_wmtp.sampling import SamplingParams

PROMPT = random_prompts([9], 97, seed=6)[0]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still until someone moves it."""
    now = [0.0]
    for module in (draft, speculation):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    return now


def costing(
    clock: list[float], work: Callable[..., torch.Tensor], seconds: Sequence[float]
) -> Callable[..., torch.Tensor]:
    """``work``, whose calls take these seconds in turn."""
    calls = iter(range(1_000_000))

    def timed(*args: object, **options: object) -> torch.Tensor:
        clock[0] += seconds[next(calls) % len(seconds)]
        return work(*args, **options)

    return timed


def slowed(
    checkpoint: Path, clock: list[float], width: int, forwards: Sequence[float], logits: float
) -> Engine:
    """Head forwards of these seconds, the target's verify 10 s, each lm_head ``logits``."""
    machine = engine(checkpoint, MtpConfig(4, 16, 2, tree_width=width), max_batch_size=2)
    head, target = machine.model.head, machine.model.target
    assert head is not None
    head.forward = costing(clock, head.forward, forwards)  # type: ignore[method-assign]
    target.logits = costing(clock, target.logits, [logits])  # type: ignore[method-assign]
    return machine


@pytest.mark.parametrize("width", [1, 2])
def test_extend_is_the_forward_that_feeds_the_accepted_rows_and_its_logits(
    checkpoint: Path, clock: list[float], width: int
) -> None:
    machine = slowed(checkpoint, clock, width, forwards=[5.0, 0.5, 0.25], logits=0.125)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    for request in run(machine, [PROMPT, PROMPT[:4]], params):
        metrics = request.metrics
        assert len(metrics.extend_s) == metrics.steps > 1
        assert metrics.extend_s == pytest.approx([5.125] * metrics.steps)
        assert metrics.draft_s == pytest.approx([5.75 + 3 * 0.125] * metrics.steps)
        assert metrics.verify_s == pytest.approx([0.125] * metrics.steps)


@pytest.mark.parametrize("width", [1, 2])
def test_one_draft_is_all_extend(checkpoint: Path, clock: list[float], width: int) -> None:
    machine = engine(checkpoint, MtpConfig(2, 16, 2, tree_width=width))
    assert machine.model.head is not None
    head = machine.model.head
    head.forward = costing(clock, head.forward, [3.0])  # type: ignore[method-assign]
    metrics = run(machine, [PROMPT], SamplingParams(max_tokens=6, ignore_eos=True))[0].metrics
    assert metrics.extend_s == metrics.draft_s == [3.0] * metrics.steps


def test_where_nothing_is_drafted_nothing_is_extended(checkpoint: Path) -> None:
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    metrics = run(engine(checkpoint), [PROMPT], params)[0].metrics
    assert metrics.extend_s == [0.0] * 4


def test_a_proposer_without_a_timer_has_no_extend(checkpoint: Path) -> None:
    def script(request: Request, draft_len: int) -> list[int]:
        return [1] * draft_len

    machine = engine(checkpoint, proposer=ScriptedProposer(3, script))
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    metrics = run(machine, [PROMPT], params)[0].metrics
    assert metrics.extend_s == [0.0] * metrics.steps


def test_extend_is_recorded_and_pooled_per_step() -> None:
    first = RequestMetrics("windowed", 5, [0] * 4)
    first.record_step(0, 0.004, 0.006, 0.010, extend_s=0.002)
    first.record_step(0, 0.0, 0.006, 0.006, drafted=0)
    second = RequestMetrics("windowed", 5, [0] * 4)
    second.record_step(1, 0.003, 0.006, 0.009, 2, 0.001)
    assert first.extend_s == [0.002, 0.0]
    assert summarise([first, second]).extend_s == pytest.approx(0.003)
    assert summarise([]).extend_s == 0


def test_on_cuda_events_are_recorded_and_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Event:
        """Records at the queue's times 7.5 and 9 ms."""

        def __init__(self, enable_timing: bool):
            assert enable_timing
            calls.append("made")
            self.at = 0.0

        def record(self) -> None:
            calls.append("recorded")
            self.at = {3: 7.5, 4: 9.0}[len(calls)]

        def elapsed_time(self, other: Event) -> float:
            calls.append("read")
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: calls.append("waited"))
    timer = draft.ExtendTimer(torch.device("cuda"))
    timer.begin()
    timer.end()
    assert calls == ["made", "made", "recorded", "recorded"]
    assert timer.seconds() == pytest.approx(0.0015)
    assert "waited" not in calls
