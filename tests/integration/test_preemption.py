"""Requests that run out of pages, or whose step fails, lose time and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from engines import engine, outputs, run
from tiny_model import add_byte_tokenizer, random_prompts, tiny_checkpoint

from tllm_wmtp.config import KvCacheConfig, MtpConfig
from tllm_wmtp.executor.engine import Engine
from tllm_wmtp.executor.request import Phase, Request, Update
from tllm_wmtp.sampling import SamplingParams

VOCAB = 7
PROMPTS = random_prompts([40, 3, 90, 17, 64], VOCAB, seed=2)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
DRAWN = SamplingParams(max_tokens=24, temperature=0.9, top_k=4, seed=5)
WINDOWED = MtpConfig(depth=5, window=8, n_sink=2)
ARMS = pytest.mark.parametrize(
    "speculation", [None, WINDOWED, MtpConfig.native(depth=5)], ids=["dense", "windowed", "native"]
)
TIGHT = KvCacheConfig(max_tokens=128, tokens_per_page=8, enable_block_reuse=False)


@pytest.fixture(scope="module", params=["hybrid", "attention only"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kinds = {"hybrid": ["linear_attention", "full_attention"], "attention only": []}[request.param]
    layer_types = kinds or ["full_attention", "full_attention"]
    return tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"),
        seed=31,
        vocab_size=VOCAB,
        moe=False,
        num_hidden_layers=2,
        layer_types=layer_types,
    )


def finish(machine: Engine) -> None:
    while machine.step():
        pass


def assert_same(ours: Sequence[Request], undisturbed: Sequence[Request]) -> None:
    assert outputs(ours) == outputs(undisturbed)
    for one, other in zip(ours, undisturbed, strict=True):
        assert one.error is None
        assert one.metrics.accepted_histogram == other.metrics.accepted_histogram
        assert one.metrics.draft_kv_bytes == other.metrics.draft_kv_bytes


def assert_all_given_back(machine: Engine) -> None:
    assert machine.kv.free_pages == machine.kv.pages
    assert machine.recurrent.free_slots == machine.recurrent.slots
    assert machine.proposer.can_acquire()


@ARMS
def test_a_pool_that_is_too_small_for_all_changes_no_token(
    checkpoint: Path, speculation: MtpConfig | None
) -> None:
    undisturbed = run(engine(checkpoint, speculation), PROMPTS, GREEDY)
    machine = engine(checkpoint, speculation, kv_cache=TIGHT)
    requests = run(machine, PROMPTS, GREEDY)
    assert_same(requests, undisturbed)
    assert sum(request.metrics.preemptions for request in requests) > 0
    assert requests[0].metrics.preemptions == 0  # the oldest is never put back
    assert_all_given_back(machine)


@pytest.mark.parametrize(
    "speculation",
    [
        MtpConfig(depth=3, window=8, n_sink=2, tree_width=2),
        MtpConfig(depth=5, window=8, n_sink=2, adaptive_depth=True),
    ],
    ids=["tree", "adaptive"],
)
def test_steps_of_any_number_of_rows_grow_and_return(
    checkpoint: Path, speculation: MtpConfig
) -> None:
    undisturbed = run(engine(checkpoint), PROMPTS, GREEDY)
    machine = engine(checkpoint, speculation, kv_cache=TIGHT)
    requests = run(machine, PROMPTS, GREEDY)
    assert outputs(requests) == outputs(undisturbed)
    assert sum(request.metrics.preemptions for request in requests) > 0
    assert_all_given_back(machine)


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_request_put_back_at_any_point_goes_on_as_if_it_had_not_been(
    checkpoint: Path, params: SamplingParams
) -> None:
    """The prefill restores pages, states, ring and pending token; drawn tokens use up the same
    random numbers."""
    prompts = [PROMPTS[0], PROMPTS[3]]
    undisturbed = run(engine(checkpoint, WINDOWED, prefill_chunk=16), prompts, params)
    for point in (1, 2, 3, 6, 9):
        machine = engine(checkpoint, WINDOWED, prefill_chunk=16)
        requests = [machine.submit(prompt, params) for prompt in prompts]
        for _ in range(point):
            machine.step()
        machine.scheduler.preempt(requests[1] if point % 2 else requests[0])
        finish(machine)
        assert_same(requests, undisturbed)
        assert_all_given_back(machine)


def test_a_request_put_back_again_and_again_still_ends(checkpoint: Path) -> None:
    undisturbed = run(engine(checkpoint, WINDOWED), PROMPTS[:1], GREEDY)
    machine = engine(checkpoint, WINDOWED)
    request = machine.submit(PROMPTS[0], GREEDY)
    while machine.step():
        if request.phase is Phase.DECODE:
            machine.scheduler.preempt(request)
    assert_same([request], undisturbed)
    assert request.metrics.preemptions > 3


def test_what_was_told_is_not_told_again(tmp_path: Path) -> None:
    """Tokens, text, stop strings and the time to the first token go through a preemption."""
    checkpoint = tiny_checkpoint(tmp_path, seed=3, vocab_size=257, moe=False)
    add_byte_tokenizer(checkpoint, ascii_only=True)
    prompt = random_prompts([30], 257, seed=1)[0]

    def told(params: SamplingParams, put_back_after: int | None) -> tuple[Request, list[Update]]:
        machine = engine(checkpoint, WINDOWED)
        updates: list[Update] = []
        request = machine.submit(prompt, params, updates.append)
        first_token_s = None
        while machine.step():
            first_token_s = first_token_s or request.metrics.ttft_s
            if put_back_after is not None and len(request.output_ids) >= put_back_after:
                machine.scheduler.preempt(request)
                put_back_after = None
        assert request.metrics.ttft_s == first_token_s
        assert [i for update in updates for i in update.token_ids] == request.output_ids
        return request, updates

    free, updates = told(SamplingParams(max_tokens=30), None)
    text = "".join(update.text for update in updates)
    assert len(free.output_ids) == 30
    stop = text[12:15]  # begins before the point of preemption or after it, whatever the spelling
    for params in (SamplingParams(max_tokens=30), SamplingParams(max_tokens=30, stop=(stop,))):
        undisturbed, expected = told(params, None)
        for put_back_after in (1, 5, 9, 13):
            request, updates = told(params, put_back_after)
            assert request.output_ids == undisturbed.output_ids
            assert request.finish_reason == undisturbed.finish_reason
            assert "".join(u.text for u in updates) == "".join(u.text for u in expected)


def test_requests_return_in_the_order_they_came(checkpoint: Path) -> None:
    machine = engine(checkpoint, WINDOWED, kv_cache=TIGHT)
    requests = [machine.submit(prompt, GREEDY) for prompt in PROMPTS]
    order = {request.request_id: at for at, request in enumerate(requests)}
    while machine.step():
        for group in (machine.scheduler.running, machine.scheduler.waiting):
            ranks = [order[request.request_id] for request in group]
            assert ranks == sorted(ranks)
        ranks = [order[r.request_id] for r in machine.scheduler.running]
        waiting = [order[r.request_id] for r in machine.scheduler.waiting]
        assert not ranks or not waiting or max(ranks) < min(waiting)


def test_a_request_holds_the_pages_of_its_rows_and_no_more(checkpoint: Path) -> None:
    kv = KvCacheConfig(tokens_per_page=4, enable_block_reuse=False)
    machine = engine(checkpoint, WINDOWED, kv_cache=kv)
    request = machine.submit(PROMPTS[0], GREEDY)
    machine.step()
    while not request.finished:
        before, version = request.kv_length, machine.tables.version
        held = len(request.pages)
        machine.step()
        if request.finished:
            break
        assert len(request.pages) == max(held, -(-(before + WINDOWED.depth) // 4))
        assert (machine.tables.version != version) == (len(request.pages) > held)
    assert_all_given_back(machine)


def test_a_page_is_left_for_every_running_request(checkpoint: Path) -> None:
    """Or the one that is let in would be put back before it has prefilled."""
    kv = KvCacheConfig(max_tokens=80, tokens_per_page=8)
    machine = engine(checkpoint, None, kv_cache=kv)
    machine.submit([1] * 31, GREEDY)  # 4 pages of 10
    machine.submit([1] * 47, GREEDY)  # 6 pages
    machine.step()
    assert len(machine.scheduler.running) == 1
    assert machine.kv.free_pages == 6


def failing(
    machine: Engine, fails: Callable[[Sequence[Request]], bool], after_the_draft: bool = True
) -> None:
    """Steps whose requests ``fails`` picks raise, between draft and verify or in the verify."""
    speculated = machine.proposer.propose
    logits = machine.model.target.logits
    armed = [False]

    def propose(requests: Sequence[Request], *rest: object) -> object:
        drafts = speculated(requests, *rest)  # type: ignore[arg-type]
        armed[0] = fails(requests)
        if armed[0] and after_the_draft:
            raise RuntimeError("between draft and verify")
        return drafts

    def failing_logits(hidden: torch.Tensor) -> torch.Tensor:
        if armed[0] and hidden.dim() == 3:  # a verify: keys are written, nothing is committed
            raise RuntimeError("after the forward")
        return logits(hidden)

    machine.proposer.propose = propose  # type: ignore[method-assign, assignment]
    machine.model.target.logits = failing_logits  # type: ignore[method-assign]


@ARMS
@pytest.mark.parametrize("after_the_draft", [True, False], ids=["draft", "verify"])
def test_a_step_that_fails_once_is_repeated_as_if_it_had_not(
    checkpoint: Path, speculation: MtpConfig | None, after_the_draft: bool
) -> None:
    prompts, params = PROMPTS[:3], [GREEDY, DRAWN, GREEDY]
    undisturbed = run(engine(checkpoint, speculation), prompts, params)
    machine = engine(checkpoint, speculation)
    calls = [0]

    def every_third_batch(requests: Sequence[Request]) -> bool:
        if len(requests) == 1:
            return False
        calls[0] += 1
        return calls[0] % 3 == 0

    failing(machine, every_third_batch, after_the_draft)
    requests = run(machine, prompts, params)
    assert calls[0] >= 3
    assert_same(requests, undisturbed)
    assert_all_given_back(machine)


@ARMS
def test_only_the_request_that_makes_steps_fail_ends(
    checkpoint: Path, speculation: MtpConfig | None
) -> None:
    undisturbed = run(engine(checkpoint, speculation), PROMPTS[:3], GREEDY)
    machine = engine(checkpoint, speculation)
    requests = [machine.submit(prompt, GREEDY) for prompt in PROMPTS[:3]]
    culprit = requests[1]
    failing(machine, lambda batch: culprit in batch and len(culprit.output_ids) > 5)
    finish(machine)
    assert culprit.finish_reason == "error"
    assert "between draft and verify" in str(culprit.error)
    assert 5 < len(culprit.output_ids) < 24
    assert culprit.output_ids == undisturbed[1].output_ids[: len(culprit.output_ids)]
    assert_same([requests[0], requests[2]], [undisturbed[0], undisturbed[2]])
    assert_all_given_back(machine)
