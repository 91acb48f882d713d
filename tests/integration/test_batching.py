"""Requests share steps without knowing of each other, and leave nothing behind."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from engines import ScriptedProposer, engine, outputs, run
from tiny_model import random_prompts, tiny_checkpoint

from tllm_wmtp.config import KvCacheConfig, MtpConfig
from tllm_wmtp.errors import RequestError
from tllm_wmtp.executor.draft import MtpProposer
from tllm_wmtp.executor.engine import Engine
from tllm_wmtp.executor.request import Request
from tllm_wmtp.sampling import SamplingParams

VOCAB = 7
PROMPTS = random_prompts([3, 40, 17, 90, 1, 64], VOCAB, seed=2)
WINDOWED = MtpConfig(depth=5, window=8, n_sink=2)
ARMS = pytest.mark.parametrize(
    "speculation", [None, WINDOWED, MtpConfig.native(depth=5)], ids=["dense", "windowed", "native"]
)


@pytest.fixture(scope="module", params=["linear_attention", "full_attention"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid, and a model without recurrent states."""
    return tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"),
        seed=31,
        vocab_size=VOCAB,
        num_hidden_layers=2,
        layer_types=[request.param, "full_attention"],
    )


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(
        tmp_path_factory.mktemp("hybrid"),
        seed=31,
        vocab_size=VOCAB,
        moe=False,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
    )


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


def assert_everything_is_back(machine: Engine) -> None:
    assert machine.kv.free_pages == machine.kv.pages
    assert machine.recurrent.free_slots == machine.recurrent.slots
    assert machine.proposer.lanes_used == 0
    assert (machine.tables.table == -1).all()


@pytest.mark.parametrize("point", [0, 1, 3, 5, 7, 9])
def test_a_request_cancelled_at_any_point_leaves_nothing_and_disturbs_nobody(
    checkpoint: Path, alone: list[list[int]], point: int
) -> None:
    """While it waits, between chunks of its prefill, and while it decodes."""
    machine = engine(checkpoint, WINDOWED, max_batch_size=3, prefill_chunk=16)
    order = [3, 1, 5, 0]  # 90 tokens: six chunks; the last one waits for a place
    requests = [machine.submit(PROMPTS[i], SamplingParams(max_tokens=24)) for i in order]
    for _ in range(point):
        machine.step()
    machine.abort(requests[0])
    machine.abort(requests[3])
    while machine.step():
        pass
    assert [r.finish_reason for r in requests] == ["abort", "length", "length", "abort"]
    assert outputs(requests[1:3]) == [alone[1], alone[5]]
    assert_everything_is_back(machine)


SETTINGS = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=24, temperature=1.0, seed=3),
    SamplingParams(max_tokens=24, temperature=0.7, top_k=3, seed=4),
    SamplingParams(max_tokens=24, repetition_penalty=1.5),
    SamplingParams(max_tokens=24, temperature=1.3, top_p=0.8, frequency_penalty=0.3, seed=5),
    SamplingParams(max_tokens=24, temperature=1.0, min_p=0.1, seed=6),
]


@ARMS
def test_requests_of_different_settings_join_and_leave_as_if_each_were_alone(
    checkpoint: Path, speculation: MtpConfig | None
) -> None:
    single = engine(checkpoint, speculation, max_batch_size=1)
    expected = run(single, PROMPTS, SETTINGS)
    machine = engine(checkpoint, speculation, max_batch_size=4)
    requests = []
    for prompt, params in zip(PROMPTS, SETTINGS, strict=True):
        requests.append(machine.submit(prompt, params))
        machine.step()
    while machine.step():
        pass
    assert outputs(requests) == outputs(expected)
    assert len({tuple(tokens) for tokens in outputs(requests)}) == len(PROMPTS)
    for one, other in zip(requests, expected, strict=True):
        assert one.metrics.accepted_histogram == other.metrics.accepted_histogram


@ARMS
def test_one_long_and_four_short_requests_equal_each_alone(
    checkpoint: Path, speculation: MtpConfig | None
) -> None:
    prompts = random_prompts([400, 5, 9, 2, 14], VOCAB, seed=8)
    params = [SamplingParams(max_tokens=60), *[SamplingParams(max_tokens=10)] * 4]
    single = engine(checkpoint, speculation, max_batch_size=1)
    expected = outputs(run(single, prompts, params))
    assert outputs(run(engine(checkpoint, speculation), prompts, params)) == expected


def test_a_batch_that_shrinks_from_32_to_12_keeps_every_lane_in_place(hybrid: Path) -> None:
    """Every third request stays, and so does the one in the pool's last lane."""
    prompts = random_prompts([3 + i for i in range(32)], VOCAB, seed=9)
    stays = [*range(0, 31, 3), 31]
    lengths = [40 if i in stays else 8 + i % 3 for i in range(32)]
    params = [SamplingParams(max_tokens=n) for n in lengths]
    single = engine(hybrid, WINDOWED, max_batch_size=1, max_seq_len=64)
    expected = outputs(run(single, prompts, params))
    machine = engine(hybrid, WINDOWED, max_batch_size=32, max_seq_len=64)
    requests = [machine.submit(p, s) for p, s in zip(prompts, params, strict=True)]
    sizes, last_lane = [], False
    while machine.step():
        sizes.append(len(machine.scheduler.running))
        lane = requests[31].lane
        last_lane = last_lane or (lane is not None and lane.index == 31)
    assert outputs(requests) == expected
    assert last_lane
    assert max(sizes) == 32
    assert 12 in sizes
    assert_everything_is_back(machine)


def poison_what_is_released(machine: Engine) -> None:
    """NaN into every page that loses its last owner, every lane and every slot, at once."""
    assert isinstance(machine.proposer, MtpProposer)
    attend, kv, recurrent = machine.proposer.attend, machine.kv, machine.recurrent
    give_back_lane, give_back_pages = machine.proposer.release, kv.release
    give_back_slot = recurrent.release

    def release_lane(request: Request) -> None:
        if request.lane is not None:
            attend.ring_k[request.lane.index] = attend.ring_v[request.lane.index] = float("nan")
        give_back_lane(request)

    def release_pages(pages: list[int]) -> None:
        freed = [page for page in pages if kv.owners(page) == 1]
        give_back_pages(pages)
        for pool in (*kv.k_pages, *kv.v_pages):
            pool[freed] = float("nan")

    def release_slot(slot: int) -> None:
        recurrent.conv[:, slot] = recurrent.state[:, slot] = float("nan")
        give_back_slot(slot)

    machine.proposer.release = release_lane  # type: ignore[method-assign]
    kv.release = release_pages  # type: ignore[method-assign, assignment]
    recurrent.release = release_slot  # type: ignore[method-assign]


@pytest.mark.parametrize("reuse", [False, True])
def test_memory_that_is_poisoned_on_release_is_read_by_nobody(
    checkpoint: Path, alone: list[list[int]], reuse: bool
) -> None:
    """Traffic through a small pool: lanes, slots and pages change hands, requests are put back."""
    kv = KvCacheConfig(max_tokens=144, tokens_per_page=8, enable_block_reuse=reuse)
    machine = engine(checkpoint, WINDOWED, kv_cache=kv, max_batch_size=3)
    poison_what_is_released(machine)
    requests = [machine.submit(p, SamplingParams(max_tokens=24)) for p in PROMPTS * 3]
    while machine.step():
        pass
    assert outputs(requests) == alone * 3
    assert sum(request.metrics.preemptions for request in requests) > 0
    assert any(request.metrics.prefix_hit_tokens for request in requests) == reuse


def live_tensor_bytes() -> int:
    gc.collect()
    everything = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
    return sum(tensor.nbytes for tensor in everything)


@ARMS
def test_ten_windows_of_output_take_no_memory(hybrid: Path, speculation: MtpConfig | None) -> None:
    """All that lives as tensors, pools included, is as much after 100 tokens as after 320."""
    machine = engine(hybrid, speculation, max_batch_size=1)
    request = machine.submit(PROMPTS[2], SamplingParams(max_tokens=330))
    seen = {}
    for tokens in (100, 200, 320):
        while len(request.output_ids) < tokens:
            machine.step()
        machine._states.clear()  # made anew by the next step
        request.draft_hidden = request.draft_hidden.clone()  # type: ignore[union-attr]
        seen[tokens] = live_tensor_bytes() - request.draft_hidden.nbytes
    assert len(set(seen.values())) == 1, seen
    if speculation is WINDOWED:
        ring = WINDOWED.n_sink + 8 + WINDOWED.depth
        assert request.metrics.draft_kv_bytes == ring * 2 * 2 * 32 * 4


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
