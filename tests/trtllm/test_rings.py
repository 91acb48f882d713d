"""Lanes, offsets and buffers of the rings, without any executor."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tllm_wmtp.errors import ConfigError
from tllm_wmtp.memory import LayerKv
from tllm_wmtp.ring import RingSpec
from tllm_wmtp.trtllm import kv
from tllm_wmtp.trtllm.kv import DraftRings, HeadShape, LaneTable, ring_bytes_per_rank

HEADS = HeadShape(num_heads=4, num_kv_heads=2, head_dim=32, scale=0.2)


def rings(spec: RingSpec | None = None, heads: HeadShape = HEADS, requests: int = 4) -> DraftRings:
    spec = spec or RingSpec.for_chain(4, 12, 4)
    return DraftRings(spec, heads, requests, torch.float32, torch.device("cpu"))


def rows(count: int, heads: HeadShape = HEADS, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    widths = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    return tuple(torch.randn(count, n * heads.head_dim, generator=generator) for n in widths)


def dense(history: dict[int, tuple[torch.Tensor, torch.Tensor]], q: torch.Tensor, at: int) -> Any:
    """Float64 attention of one query at ``at`` over a dict of positions: sinks 4, window 12."""
    seen = [p for p in sorted(history) if p <= at and (p < 4 or p > at - 12)]
    k = torch.stack([history[p][0] for p in seen]).double().view(len(seen), 2, 32)
    v = torch.stack([history[p][1] for p in seen]).double().view(len(seen), 2, 32)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = torch.einsum("hd,shd->hs", q.double().view(4, 32), k) * 0.2
    return torch.einsum("hs,shd->hd", scores.softmax(-1), v).flatten()


def test_answers_are_those_of_a_dictionary_of_positions() -> None:
    """Contexts of any size beside generations, rejections, and steps of one row."""
    table, luck = rings(), random.Random(1)
    histories: dict[int, dict[int, Any]] = {7: {}, 8: {}, 9: {}}
    lengths = dict.fromkeys(histories, 0)

    def call(order: list[int], counts: list[int], contexts: int) -> None:
        table.publish(order)
        starts = [lengths[one] for one in order]
        positions = torch.cat(
            [torch.arange(s, s + n, dtype=torch.int32) for s, n in zip(starts, counts, strict=True)]
        )
        q, k, v = rows(sum(counts), seed=luck.randrange(10_000))
        table.aim(positions[None], len(order), counts[:contexts])
        out = table.attend(q, k, v)
        row = 0
        for index, (one, start, count) in enumerate(zip(order, starts, counts, strict=True)):
            for step in range(count):
                histories[one][start + step] = k[row + step], v[row + step]
            for step in range(count):
                if index >= contexts or step == count - 1:
                    wanted = dense(histories[one], q[row + step], start + step)
                    torch.testing.assert_close(
                        out[row + step].double(), wanted, atol=2e-6, rtol=1e-5
                    )
                else:
                    assert not out[row + step].any()
            row += count

    call([7], [9], 1)
    lengths[7] = 9
    call([8, 9, 7], [40, 1, 4], 2)
    lengths |= {8: 40, 9: 1, 7: 10}
    for _ in range(30):
        order = luck.sample([7, 8, 9], 3)
        call(order, [4, 4, 4], 0)
        for one in order:
            lengths[one] += luck.randrange(1, 5)
        drafting = dict(lengths)
        for _ in range(2):
            call(order, [1, 1, 1], 0)
            for one in order:
                lengths[one] += 1
        lengths |= drafting


class Operators(TorchDispatchMode):
    """Names of everything that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("by_length", [False, True])
def test_a_captured_step_reads_nothing_back_and_allocates_nothing_but_its_answer(
    by_length: bool,
) -> None:
    table = rings()
    table.publish([1, 2, 3])
    qkv = torch.randn(12, 4 * 32 + 2 * 2 * 32)
    q, k, v = qkv.split([128, 64, 64], dim=-1)  # strided, as a fused projection gives them
    positions = torch.arange(12, dtype=torch.int32)
    lengths = positions.view(3, 4)[:, -1] + 1, torch.full((3,), 4, dtype=torch.int32)
    with Operators() as ran:
        table.aim(positions, 3, lengths=lengths if by_length else None)
        table.attend(q, k, v)
    makes = {"empty", "zeros", "new_zeros", "clone", "cat", "arange", "index_select", "_to_copy"}
    reads = {"_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero"}
    assert not (makes | reads) & set(ran.names), ran.names
    assert ran.names.count("windowed_draft_attention") == 1


def test_a_replay_sees_the_same_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph has captured must still be where it was when other requests come."""
    seen: list[list[int]] = []
    real = kv._windowed_draft_attention

    def spy(*args: Any) -> torch.Tensor:
        seen.append([one.data_ptr() for one in args if isinstance(one, torch.Tensor)])
        return real(*args)

    monkeypatch.setattr(kv, "_windowed_draft_attention", spy)
    table = rings()
    qkv, positions = torch.randn(8, 256), torch.zeros(8, dtype=torch.int32)
    for batch, start in (([1, 2], 0), ([5, 9], 30), ([2, 1], 7)):
        table.publish(batch)
        positions.copy_(torch.arange(start, start + 8))
        table.aim(positions, 2)
        table.attend(*qkv.split([128, 64, 64], dim=-1))
    assert seen[0] == seen[1] == seen[2]


def test_positions_may_change_after_the_host_has_spoken() -> None:
    """Under the overlap scheduler the host knows accepted counts a step late."""
    table = rings()
    table.publish([1])
    q, k, v = rows(1)
    positions = torch.tensor([3], dtype=torch.int32)
    positions += 2
    table.aim(positions, 1)
    table.attend(q, k, v)
    lane = table.table.acquire(1)
    assert table.ring_k[lane, 5].flatten().tolist() == k[0].tolist()
    assert not table.ring_k[lane, 3].any()


def test_lengths_count_tokens_where_positions_do_not() -> None:
    """An image's tokens share rotary positions; each still has a slot of its own."""
    told, counted = rings(), rings()
    luck = random.Random(8)
    lengths = torch.tensor([0, 0])
    for step, counts in enumerate([[20, 3], *[[4, 4], [1, 1]] * 6]):
        counts = torch.tensor(counts)
        lengths = lengths + counts
        positions = torch.cat(
            [torch.arange(a - n, a) for a, n in zip(lengths, counts, strict=True)]
        )
        nonsense = torch.tensor([luck.randrange(9) for _ in positions])
        q, k, v = rows(len(positions), seed=step)
        contexts = counts.tolist() if step == 0 else None
        for one in (told, counted):
            one.publish([5, 6])
        told.aim(positions, 2, contexts)
        counted.aim(nonsense, 2, contexts, (lengths.int(), counts.int()))
        assert torch.equal(told.attend(q, k, v), counted.attend(q, k, v))
    assert torch.equal(told.ring_k, counted.ring_k)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ranks_together_answer_what_one_does_over_a_whole_generation(tp: int) -> None:
    """Query heads are divided; KV heads too, or copied where there are more ranks than heads.

    A long prompt, then steps of four rows and of one until the rings have wrapped.
    """
    layer = LayerKv(1, kv_heads=2, head_dim=32)
    mine, copies = layer.heads_per_rank(tp), max(1, tp // 2)
    parts = [rings(heads=HeadShape(4 // tp, mine, 32, 0.2)) for _ in range(tp)]
    whole, spec = rings(), RingSpec.for_chain(4, 12, 4)
    lengths = {1: 0, 2: 0}
    for step, counts in enumerate([[30, 5], *[[4, 4], [1, 1]] * 9]):
        order = [1, 2] if step % 2 == 0 else [2, 1]
        positions = torch.cat(
            [torch.arange(lengths[r], lengths[r] + n) for r, n in zip(order, counts, strict=True)]
        )
        q, k, v = rows(sum(counts), seed=step)
        answers = []
        for rank, one in [(None, whole), *enumerate(parts)]:
            one.publish(order)
            one.aim(positions, 2, counts if step == 0 else None)
            if rank is None:
                answers.append(one.attend(q, k, v).view(-1, 4, 32))
                continue
            first = rank // copies * mine
            some = slice(first, first + mine)
            q_part = q.view(len(q), tp, -1)[:, rank]
            k_part, v_part = (t.view(len(t), 2, 32)[:, some].flatten(1) for t in (k, v))
            answers.append(one.attend(q_part, k_part, v_part).view(len(q), -1, 32))
        torch.testing.assert_close(torch.cat(answers[1:], 1), answers[0])
        for request, count in zip(order, counts, strict=True):
            lengths[request] += count
    assert max(lengths.values()) > 2 * spec.capacity
    for part in parts:
        assert part.nbytes == ring_bytes_per_rank(layer, spec, 4, element_bytes=4, tp=tp)


def test_ring_bytes_of_a_published_model_worked_by_hand() -> None:
    """2 KV heads x 256, bf16: 2 KiB per token and 4,103 slots; twice as many lanes as requests."""
    layer, spec = LayerKv(1, kv_heads=2, head_dim=256), RingSpec.for_chain(64, 4032, 7)
    assert ring_bytes_per_rank(layer, spec, max_requests=1) == 2 * 4103 * 2048
    assert ring_bytes_per_rank(layer, spec, max_requests=8, tp=2) == 16 * 4103 * 1024
    assert ring_bytes_per_rank(layer, spec, max_requests=8, tp=8) == 16 * 4103 * 1024
    assert ring_bytes_per_rank(layer, spec, 8, element_bytes=1) == 16 * 4103 * 1024
    with pytest.raises(ConfigError, match="tensor parallelism 3 over 2"):
        ring_bytes_per_rank(layer, spec, 8, tp=3)


def test_lanes_follow_requests_in_any_order_of_events() -> None:
    table, luck = LaneTable(8), random.Random(0)
    owners: dict[int, int] = {}
    for event in range(600):
        alive = list(owners)
        if alive and luck.random() < 0.3:
            gone = luck.choice(alive)
            table.release(gone)
            del owners[gone]
        batch = luck.sample(alive, min(len(alive), luck.randrange(4)))
        batch = [one for one in batch if one in owners]
        if len(owners) < 4:
            batch.append(1000 + event)
        padded = batch + batch[:1] * luck.randrange(3)
        lanes = table.rows(padded)
        assert len(set(lanes)) == len(lanes)
        for request, lane in zip(batch, lanes, strict=False):
            assert owners.setdefault(request, lane) == lane
        held = set(owners.values())
        assert len(held) == len(owners)
        assert not held & set(lanes[len(batch) :])
    assert table.taken_away == 0


def test_padding_rows_borrow_and_spoil_nobodys_ring() -> None:
    table = rings()
    table.publish([1, 2])
    q, k, v = rows(2)
    table.aim(torch.tensor([0, 0]), 2)
    table.attend(q, k, v)
    lanes = table.table.acquire(1), table.table.acquire(2)
    before = table.ring_k[list(lanes)].clone()
    table.publish([1, 2, 2, 2])
    table.aim(torch.tensor([1, 1, 0, 0]), 4)
    table.attend(*rows(4, seed=1))
    after = table.ring_k[list(lanes)]
    assert torch.equal(after[:, 0], before[:, 0])
    assert torch.equal(after[:, 2:], before[:, 2:])


def test_too_many_alive_costs_the_longest_absent_its_ring_not_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table = LaneTable(4)
    for request in (1, 2, 3, 4):
        table.rows([request])
    table.rows([1])
    table.rows([5, 1])
    assert table.taken_away == 1
    assert 2 not in table
    assert 1 in table
    assert "request 2 loses its draft ring" in caplog.text
    with pytest.raises(ConfigError, match="more than 4 requests"):
        table.rows([1, 3, 4, 5, 6])


def test_a_lane_is_empty_when_it_gets_an_owner() -> None:
    table = rings(requests=1)
    table.ring_k.fill_(float("nan"))
    table.publish([1])
    lane = table.table.acquire(1)
    assert not table.ring_k[lane].any()
    table.table.release(1)
    table.ring_k[lane].fill_(float("nan"))
    table.publish([2])
    assert not table.ring_k[table.table.acquire(2)].any()


@pytest.mark.parametrize(
    ("positions", "requests", "contexts", "words"),
    [
        (7, 2, [], "7 draft rows of 2 requests"),
        (10, 2, [], "at most 4"),
        (9, 2, [12], "leave -3 for the other 1"),
    ],
)
def test_rows_that_are_no_chain_are_refused(
    positions: int, requests: int, contexts: list[int], words: str
) -> None:
    table = rings()
    table.publish(list(range(requests)))
    with pytest.raises(ConfigError, match=words):
        table.aim(torch.arange(positions), requests, contexts)


def test_a_batch_that_nobody_announced_is_an_error_of_ours() -> None:
    table = rings()
    with pytest.raises(RuntimeError, match="2 requests draft, 0 were published"):
        table.aim(torch.arange(2), 2)
    with pytest.raises(ConfigError, match="a batch of 5 requests"):
        table.publish([1, 2, 3, 4, 5])
