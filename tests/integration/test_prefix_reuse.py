"""A prompt that begins as an earlier one did goes on from there, and nobody can tell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import ScriptedProposer, engine, outputs, run
from tiny_model import add_byte_tokenizer, random_prompts, tiny_checkpoint

import tllm_wmtp.executor.prefix as prefix_module
from tllm_wmtp.config import KvCacheConfig, MtpConfig
from tllm_wmtp.errors import ConfigError
from tllm_wmtp.executor.engine import Engine
from tllm_wmtp.executor.request import Request
from tllm_wmtp.sampling import SamplingParams

VOCAB = 7
PAGE = 8
WINDOWED = MtpConfig(depth=5, window=12, n_sink=3)
TREE = MtpConfig(depth=3, window=12, n_sink=3, tree_width=2)
ARMS = pytest.mark.parametrize(
    "speculation",
    [None, WINDOWED, MtpConfig.native(depth=5), TREE],
    ids=["dense", "windowed", "native", "tree"],
)


@pytest.fixture(scope="module", params=["hybrid", "attention only"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    first = {"hybrid": "linear_attention", "attention only": "full_attention"}[request.param]
    return tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"),
        seed=31,
        vocab_size=VOCAB,
        moe=False,
        num_hidden_layers=2,
        layer_types=[first, "full_attention"],
    )


def reusing(checkpoint: Path, speculation: MtpConfig | None, **limits: Any) -> Engine:
    pool = {name: limits.pop(name) for name in ("max_tokens", "reuse_bytes") if name in limits}
    kv = KvCacheConfig(tokens_per_page=PAGE, **pool)
    return engine(checkpoint, speculation, kv_cache=kv, **limits)


def cold(checkpoint: Path, speculation: MtpConfig | None, **limits: Any) -> Engine:
    kv = KvCacheConfig(tokens_per_page=PAGE, enable_block_reuse=False)
    return engine(checkpoint, speculation, kv_cache=kv, **limits)


def greedy(tokens: int = 16, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, **more)


def rows_fed(machine: Engine) -> list[int]:
    """Rows of every later forward of the target that prefills, one by one."""
    fed: list[int] = []

    def count(module: object, arguments: tuple[Any, ...]) -> None:
        if type(arguments[2]).__name__ == "PrefillStates":
            fed.append(arguments[0].numel())

    machine.model.target.register_forward_pre_hook(count)
    return fed


def assert_same(warm: Request, cold: Request) -> None:
    assert warm.error is None
    assert warm.output_ids == cold.output_ids
    assert warm.metrics.accepted_histogram == cold.metrics.accepted_histogram


@ARMS
def test_every_turn_of_a_talk_equals_a_cold_run_and_computes_only_what_is_new(
    checkpoint: Path, speculation: MtpConfig | None
) -> None:
    machine = reusing(checkpoint, speculation)
    fed = rows_fed(machine)
    said: list[int] = []
    for turn, news in enumerate(random_prompts([37, 5, 1, 40, 16, 2], VOCAB, seed=4)):
        prompt = said + news
        (warm,) = run(machine, [prompt], greedy())
        (reference,) = run(cold(checkpoint, speculation), [prompt], greedy())
        assert_same(warm, reference)
        # All rows of the turn before are there, except that its last token was never fed.
        known = max(len(said) - 1, 0)
        assert warm.metrics.prefix_hit_tokens == known
        assert sum(fed) == len(prompt) - known
        fed.clear()
        said = prompt + warm.output_ids
        assert turn == 0 or known > 37
    machine.prefixes.clear()
    assert machine.kv.free_pages == machine.kv.pages


@ARMS
def test_a_prompt_seen_before_needs_no_forward_at_all(
    checkpoint: Path, speculation: MtpConfig | None
) -> None:
    machine = reusing(checkpoint, speculation)
    fed = rows_fed(machine)
    for length in (1, 2, 7, 8, 9, 50):  # within a page, whole pages, past the window
        prompt = random_prompts([length], VOCAB, seed=length)[0]
        (first,) = run(machine, [prompt], greedy())
        fed.clear()
        (second,) = run(machine, [prompt], greedy())
        assert second.metrics.prefix_hit_tokens == length
        assert fed == []
        assert_same(second, first)


def test_steps_without_drafts_leave_a_whole_ring_behind(checkpoint: Path) -> None:
    """Their rows wait for a step that drafts; a snapshot at the end stores them all the same."""

    def with_pattern(machine: Engine) -> Engine:
        def draft_len(requests: list[Request]) -> int:
            return 4 if len(requests[0].output_ids) % 12 < 4 else 0

        machine._draft_len = draft_len  # type: ignore[method-assign]
        return machine

    machine = with_pattern(reusing(checkpoint, WINDOWED))
    said: list[int] = []
    for news in random_prompts([30, 3, 3, 3], VOCAB, seed=18):
        prompt = said + news
        (warm,) = run(machine, [prompt], greedy(19))
        (reference,) = run(with_pattern(cold(checkpoint, WINDOWED)), [prompt], greedy(19))
        assert_same(warm, reference)
        assert warm.metrics.prefix_hit_tokens == max(len(said) - 1, 0)
        said = prompt + warm.output_ids


def test_two_requests_go_on_from_one_prefix_at_once(checkpoint: Path) -> None:
    """Both write after the rows that they share, each into a page of its own."""
    shared, *ends = random_prompts([29, 4, 4, 9], VOCAB, seed=6)
    machine = reusing(checkpoint, WINDOWED)
    run(machine, [shared], greedy(1))
    prompts = [shared + end for end in ends]
    warm = run(machine, prompts, greedy(24))
    assert [request.metrics.prefix_hit_tokens for request in warm] == [29] * 3
    reference = run(cold(checkpoint, WINDOWED), prompts, greedy(24))
    for one, other in zip(warm, reference, strict=True):
        assert_same(one, other)


def test_the_request_itself_goes_on_writing_beside_its_snapshot(checkpoint: Path) -> None:
    prompt, end = random_prompts([21, 6], VOCAB, seed=7)
    machine = reusing(checkpoint, WINDOWED)
    long = machine.submit(prompt, greedy(40))
    machine.step()
    later = machine.submit(prompt + end, greedy(40))
    while machine.step():
        pass
    assert later.metrics.prefix_hit_tokens == 21
    for request in (long, later):
        (reference,) = run(cold(checkpoint, WINDOWED), [request.prompt_ids], greedy(40))
        assert_same(request, reference)


def test_one_token_of_difference_is_no_hit(checkpoint: Path) -> None:
    prompt = random_prompts([30], VOCAB, seed=8)[0]
    machine = reusing(checkpoint, None)
    run(machine, [prompt], greedy(1))
    for at in (0, 12, 29):
        other = list(prompt)
        other[at] = (other[at] + 1) % VOCAB
        (request,) = run(machine, [[*other, 1, 2]], greedy(2))
        assert request.metrics.prefix_hit_tokens == 0


def test_checksums_that_collide_find_nothing_wrong(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_module.zlib, "crc32", lambda data, start=0: 0)
    machine = reusing(checkpoint, WINDOWED)
    prompts = random_prompts([20, 20, 20], VOCAB, seed=9)
    for prompt in (*prompts, *prompts):
        (warm,) = run(machine, [prompt], greedy(4))
        (reference,) = run(cold(checkpoint, WINDOWED), [prompt], greedy(4))
        assert_same(warm, reference)


def test_a_stop_in_the_middle_of_a_step_leaves_a_snapshot_up_to_it(checkpoint: Path) -> None:
    """Drafts that were accepted after the stop are not part of the talk."""
    prompt = random_prompts([33], VOCAB, seed=3)[0]
    for stop in range(VOCAB):
        machine = reusing(checkpoint, WINDOWED)
        params = greedy(60, stop_token_ids=(stop,))
        (first,) = run(machine, [prompt], params)
        following = prompt + first.output_ids + [1, 2, 3]
        (second,) = run(machine, [following], params)
        assert second.metrics.prefix_hit_tokens == len(following) - 4
        (reference,) = run(cold(checkpoint, WINDOWED), [following], params)
        assert_same(second, reference)


def test_a_stop_string_in_the_middle_of_a_step_leaves_no_snapshot_of_rows_beyond_it(
    tmp_path: Path,
) -> None:
    """Only the text shows it, after the rows of the whole step were committed."""
    checkpoint = tiny_checkpoint(tmp_path, seed=3, vocab_size=257, moe=False)
    add_byte_tokenizer(checkpoint, ascii_only=True)
    prompt, more = random_prompts([20, 5], 256, seed=1)
    truth = run(cold(checkpoint, None), [prompt], greedy(40))[0]
    assert truth.text is not None
    spelled, cut_off = truth.text.text, 0
    for begin in range(2, 14):
        machine = reusing(checkpoint, None, proposer=ScriptedProposer(5, scripted(truth)))
        (first,) = run(machine, [prompt], greedy(40, stop=(spelled[begin : begin + 2],)))
        assert first.finish_reason == "stop"
        known = prompt + first.output_ids
        cut_off += first.kv_length > len(known) - 1
        (warm,) = run(machine, [known + more], greedy())
        (reference,) = run(cold(checkpoint, None), [known + more], greedy())
        assert warm.output_ids == reference.output_ids
        held = len(prompt) if first.kv_length > len(known) - 1 else len(known) - 1
        assert warm.metrics.prefix_hit_tokens == held
    assert cut_off > 2


def scripted(truth: Request) -> Callable[[Request, int], list[int]]:
    """Right drafts for the first request, any for others."""

    def script(request: Request, draft_len: int) -> list[int]:
        done = len(request.output_ids)
        right = truth.output_ids[done : done + draft_len]
        return (right if request.prompt_ids == truth.prompt_ids else [0] * draft_len)[:draft_len]

    return script


def test_penalties_and_draws_see_the_whole_prompt_after_a_hit(checkpoint: Path) -> None:
    prompt, end = random_prompts([25, 3], VOCAB, seed=11)
    params = SamplingParams(
        max_tokens=20, temperature=1.1, seed=4, repetition_penalty=1.3, presence_penalty=0.4
    )
    machine = reusing(checkpoint, WINDOWED)
    run(machine, [prompt], params)
    for asked in (prompt, prompt + end):
        (warm,) = run(machine, [asked], params)
        assert warm.metrics.prefix_hit_tokens == 25
        (reference,) = run(cold(checkpoint, WINDOWED), [asked], params)
        assert_same(warm, reference)


def test_snapshots_give_way_to_running_requests_and_the_oldest_goes_first(
    checkpoint: Path,
) -> None:
    machine = reusing(checkpoint, WINDOWED, max_tokens=20 * PAGE)
    prompts = random_prompts([5 * PAGE] * 3, VOCAB, seed=12)
    for prompt in prompts:
        run(machine, [prompt], greedy(1))
    assert machine.kv.free_pages == 5
    run(machine, [prompts[0]], greedy(1))  # used last now
    (long,) = run(machine, [[1] * (9 * PAGE)], greedy(8))
    assert long.metrics.preemptions == 0
    found = [machine.prefixes.find(prompt) is not None for prompt in prompts]
    assert found == [True, False, True] or found == [True, False, False]


def test_a_snapshot_never_keeps_its_own_request_out(checkpoint: Path) -> None:
    """The prompt needs every page of the pool, and its snapshot holds a copy of the last."""
    machine = reusing(checkpoint, None, max_tokens=6 * PAGE)
    prompt = random_prompts([5 * PAGE + 3], VOCAB, seed=13)[0]
    reference = outputs(run(cold(checkpoint, None), [prompt], greedy(4)))
    for _ in range(3):
        assert outputs(run(machine, [prompt], greedy(4))) == reference


def test_a_request_put_back_returns_by_its_own_snapshot(checkpoint: Path) -> None:
    prompt = random_prompts([60], VOCAB, seed=14)[0]
    (reference,) = run(cold(checkpoint, WINDOWED), [prompt], greedy(24))
    machine = reusing(checkpoint, WINDOWED)
    fed = rows_fed(machine)
    request = machine.submit(prompt, greedy(24))
    while len(request.output_ids) < 8:
        machine.step()
    fed.clear()
    made = len(request.output_ids)
    machine.scheduler.preempt(request)
    while machine.step():
        pass
    assert_same(request, reference)
    assert fed == [made - 1]


def test_the_byte_budget_holds(checkpoint: Path) -> None:
    probe = reusing(checkpoint, WINDOWED)
    run(probe, random_prompts([40], VOCAB), greedy(1))
    (one,) = probe.prefixes._kept.values()
    machine = reusing(checkpoint, WINDOWED, reuse_bytes=3 * one.nbytes + 8)
    prompts = random_prompts([40] * 6, VOCAB, seed=15)
    for prompt in prompts:
        run(machine, [prompt], greedy(1))
        assert machine.prefixes.used_bytes <= 3 * one.nbytes + 8
    assert [machine.prefixes.find(p) is not None for p in prompts] == [False] * 3 + [True] * 3
    nothing = reusing(checkpoint, WINDOWED, reuse_bytes=0)
    run(nothing, prompts[:1], greedy(1))
    assert nothing.kv.free_pages == nothing.kv.pages
    with pytest.raises(ConfigError, match="reuse_bytes -1"):
        KvCacheConfig(reuse_bytes=-1)


def test_nothing_is_kept_of_failures_and_random_contexts(checkpoint: Path) -> None:
    machine = reusing(checkpoint, WINDOWED)
    request = machine.admit_synthetic(40, max_tokens=8)
    while machine.step():
        pass
    assert request.finish_reason == "length"
    aborted = machine.submit([1] * 90, greedy())
    machine.step()
    machine.abort(aborted)
    assert len(machine.prefixes) == 0
    assert machine.kv.free_pages == machine.kv.pages


def test_released_memory_full_of_garbage_changes_nothing(checkpoint: Path) -> None:
    """Pages that nobody owns, lanes and slots that are free: NaN, between all requests."""
    talk = random_prompts([37, 5, 20], VOCAB, seed=16)
    machine = reusing(checkpoint, WINDOWED, max_batch_size=2)
    said: list[int] = []
    for news in talk:
        with torch.inference_mode():
            free = [p for p in range(machine.kv.pages) if machine.kv.owners(p) == 0]
            for pool in (*machine.kv.k_pages, *machine.kv.v_pages):
                pool[free] = float("nan")
            attend = machine.proposer.attend  # type: ignore[attr-defined]
            for garbage in (attend.ring_k, attend.ring_v, machine.recurrent.conv):
                garbage.fill_(float("nan"))
            machine.recurrent.state.fill_(float("nan"))
            machine.tables.table.fill_(-1)
        prompt = said + news
        (warm,) = run(machine, [prompt], greedy())
        (reference,) = run(cold(checkpoint, WINDOWED), [prompt], greedy())
        assert_same(warm, reference)
        said = prompt + warm.output_ids


@ARMS
@pytest.mark.parametrize("interval", [8, 20, 33])
def test_prompts_that_only_begin_alike_share_what_an_interval_kept(
    checkpoint: Path, speculation: MtpConfig | None, interval: int
) -> None:
    """A common system prompt: no earlier request ended where this one departs."""
    system, one, other = random_prompts([70, 30, 25], VOCAB, seed=17)
    kv = KvCacheConfig(tokens_per_page=PAGE, snapshot_interval=interval)
    machine = engine(checkpoint, speculation, kv_cache=kv)
    (first,) = run(machine, [system + one], greedy())
    (reference,) = run(cold(checkpoint, speculation), [system + one], greedy())
    assert_same(first, reference)
    fed = rows_fed(machine)
    (second,) = run(machine, [system + other], greedy())
    shared = 70 // interval * interval
    assert second.metrics.prefix_hit_tokens == shared
    assert sum(fed) == 95 - shared
    (reference,) = run(cold(checkpoint, speculation), [system + other], greedy())
    assert_same(second, reference)


def test_an_interval_computes_the_rows_that_its_rings_hold_and_no_others(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, seed=1, vocab_size=VOCAB, moe=False)
    window, depth, n_sink, length, interval = 6, 3, 2, 100, 40
    kv = KvCacheConfig(tokens_per_page=PAGE, snapshot_interval=interval)
    machine = engine(checkpoint, MtpConfig(depth, window, n_sink), kv_cache=kv)
    (request,) = run(machine, random_prompts([length], VOCAB), greedy(1))
    read = {
        position
        for end in (40, 80, length)
        for position in range(end)
        if position < n_sink or position >= end - 1 - window - depth
    }
    assert request.metrics.prefill_last_layer_rows == len(read)
    with pytest.raises(ConfigError, match="snapshot_interval 0"):
        KvCacheConfig(snapshot_interval=0)
