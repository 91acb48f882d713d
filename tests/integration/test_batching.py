"""Requests share steps without knowing of each other, and leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import ScriptedProposer, engine, outputs, run
from tiny_model import random_prompts, tiny_checkpoint

from tllm_wmtp.config import KvCacheConfig, MtpConfig
from tllm_wmtp.errors import RequestError
from tllm_wmtp.executor.draft import MtpProposer
from tllm_wmtp.executor.request import Request
from tllm_wmtp.sampling import SamplingParams

VOCAB = 7
PROMPTS = random_prompts([3, 40, 17, 90, 1, 64], VOCAB, seed=2)
WINDOWED = MtpConfig(depth=5, window=8, n_sink=2)
ARMS = pytest.mark.parametrize(
    "speculation", [None, WINDOWED, MtpConfig.native(depth=5)], ids=["dense", "windowed", "native"]
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=31, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> list[list[int]]:
    machine = engine(checkpoint, max_batch_size=1)
    return [outputs(run(machine, [p], SamplingParams(max_tokens=24)))[0] for p in PROMPTS]


@ARMS
def test_a_batch_equals_runs_alone(
    checkpoint: Path, alone: list[list[int]], speculation: MtpConfig | None
) -> None:
    machine = engine(checkpoint, speculation)
    assert outputs(run(machine, PROMPTS, SamplingParams(max_tokens=24))) == alone


@ARMS
def test_requests_join_and_leave_between_steps(
    checkpoint: Path, alone: list[list[int]], speculation: MtpConfig | None
) -> None:
    machine = engine(checkpoint, speculation, max_batch_size=3)
    lengths = [24, 5, 24, 2, 24, 11]
    requests = []
    for prompt, length in zip(PROMPTS, lengths, strict=True):
        requests.append(machine.submit(prompt, SamplingParams(max_tokens=length)))
        machine.step()
        machine.step()
    while machine.step():
        pass
    assert outputs(requests) == [o[:n] for o, n in zip(alone, lengths, strict=True)]


@ARMS
def test_everything_is_given_back(checkpoint: Path, speculation: MtpConfig | None) -> None:
    machine = engine(checkpoint, speculation, max_batch_size=2)
    requests = [machine.submit(p, SamplingParams(max_tokens=50)) for p in PROMPTS]
    for _ in range(4):
        machine.step()
    for request in requests[:3]:
        machine.abort(request)
        machine.abort(request)  # twice is once
    while machine.step():
        pass
    assert [r.finish_reason for r in requests] == ["abort"] * 3 + ["length"] * 3
    assert machine.kv.free_pages == machine.kv.pages
    assert machine.recurrent.free_slots == 2
    if isinstance(machine.proposer, MtpProposer):
        assert machine.proposer.pool.n_free == 2


def test_a_new_request_reads_nothing_of_the_old_one(
    checkpoint: Path, alone: list[list[int]]
) -> None:
    """Whatever was left in rings, pages and states is poison; the next request must not see it."""
    machine = engine(checkpoint, WINDOWED, max_batch_size=2)
    assert isinstance(machine.proposer, MtpProposer)
    params = SamplingParams(max_tokens=24)
    clean = run(machine, PROMPTS[:2], params)
    for _ in range(2):
        attend = machine.proposer.attend
        poisoned = (attend.ring_k, attend.ring_v, *machine.kv.k_pages, *machine.kv.v_pages)
        for tensor in (*poisoned, machine.recurrent.conv, machine.recurrent.state):
            tensor.fill_(float("nan"))
        again = run(machine, PROMPTS[:2], params)
        assert outputs(again) == alone[:2]
        for first, second in zip(clean, again, strict=True):
            assert first.metrics.accepted_histogram == second.metrics.accepted_histogram


def test_a_request_waits_until_the_pool_has_room(checkpoint: Path, alone: list[list[int]]) -> None:
    kv = KvCacheConfig(max_tokens=160, tokens_per_page=16)
    machine = engine(checkpoint, WINDOWED, kv_cache=kv)
    requests = [machine.submit(p, SamplingParams(max_tokens=24)) for p in PROMPTS]
    most = 0
    while machine.step():
        most = max(most, len(machine.scheduler.running))
    assert outputs(requests) == alone
    assert 1 <= most < len(PROMPTS)


def test_a_request_that_can_never_fit_is_refused_and_others_go_on(
    checkpoint: Path, alone: list[list[int]]
) -> None:
    kv = KvCacheConfig(max_tokens=64, tokens_per_page=16)
    machine = engine(checkpoint, WINDOWED, kv_cache=kv)
    good = machine.submit(PROMPTS[0], SamplingParams(max_tokens=24))
    with pytest.raises(RequestError, match="KV pool holds 64"):
        machine.submit(PROMPTS[3], SamplingParams(max_tokens=24))
    while machine.step():
        pass
    assert good.output_ids == alone[0]


def test_a_failing_prefill_takes_no_neighbour_down(
    checkpoint: Path, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = engine(checkpoint, WINDOWED)
    prefill = machine._prefill

    def failing(request: Request) -> None:
        if request.prompt_ids == PROMPTS[1] and request.prefilled:
            raise RuntimeError("out of luck")
        prefill(request)

    monkeypatch.setattr(machine, "_prefill", failing)
    requests = [machine.submit(p, SamplingParams(max_tokens=24)) for p in PROMPTS[:3]]
    while machine.step():
        pass
    assert [r.finish_reason for r in requests] == ["length", "error", "length"]
    assert "out of luck" in str(requests[1].error)
    assert [requests[0].output_ids, requests[2].output_ids] == [alone[0], alone[2]]
    assert machine.kv.free_pages == machine.kv.pages


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(
    checkpoint: Path, alone: list[list[int]]
) -> None:
    broken = [True]

    def script(request: Request, draft_len: int) -> list[int]:
        if broken[0]:
            raise RuntimeError("no drafts today")
        return [0] * draft_len

    machine = engine(checkpoint, proposer=ScriptedProposer(3, script))
    request = machine.submit(PROMPTS[0], SamplingParams(max_tokens=24))
    while machine.step():
        pass
    assert request.finish_reason == "error"
    broken[0] = False
    assert outputs(run(machine, PROMPTS[:1], SamplingParams(max_tokens=24))) == alone[:1]


@pytest.mark.parametrize("context", [10, 100, 400])
@ARMS
def test_synthetic_requests_step_without_a_prefill(
    checkpoint: Path, speculation: MtpConfig | None, context: int
) -> None:
    machine = engine(checkpoint, speculation, max_batch_size=2)
    drafts = []
    for _ in range(2):
        request = machine.admit_synthetic(context, seed=5, max_tokens=20)
        for _ in range(3):
            machine.step()
        assert machine.last_step is not None
        assert machine.last_step.step_s > 0
        assert request.kv_length > context
        drafts.append(request.output_ids)
        machine.abort(request)
    assert drafts[0] == drafts[1]  # the same seed makes the same request
    assert machine.kv.free_pages == machine.kv.pages
    with pytest.raises(RequestError, match="512"):
        machine.admit_synthetic(512)


def test_bfloat16_cache_and_weights_run(checkpoint: Path) -> None:
    kv = KvCacheConfig(dtype="bfloat16", tokens_per_page=16)
    for machine in (
        engine(checkpoint, WINDOWED, kv_cache=kv),
        engine(checkpoint, WINDOWED, dtype="bfloat16"),
    ):
        assert machine.kv.k_pages[0].dtype is torch.bfloat16
        requests = run(machine, PROMPTS, SamplingParams(max_tokens=8))
        assert all(len(r.output_ids) == 8 for r in requests)
