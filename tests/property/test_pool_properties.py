"""Pools lose nothing and lend nothing twice, whatever the order of events."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from engines import engine, outputs, run
from tiny_model import random_prompts, tiny_checkpoint

from tllm_wmtp.config import KvCacheConfig, MtpConfig
from tllm_wmtp.executor.draft import MtpProposer
from tllm_wmtp.executor.engine import Engine
from tllm_wmtp.executor.request import Phase, Request
from tllm_wmtp.models.cache import BlockTables, PagedKvPool, RecurrentPool
from tllm_wmtp.models.spec import CacheSpec, KeyValueShape, RecurrentShape
from tllm_wmtp.ring import Lane, LanePool
from tllm_wmtp.sampling import SamplingParams

CPU = torch.device("cpu")
SPEC = CacheSpec(
    attention_layers=(1,),
    attention=KeyValueShape(1, 2, 1.0),
    draft=KeyValueShape(1, 2, 1.0),
    recurrent_layers=(0,),
    recurrent=RecurrentShape(3, 2, 1, 2, 1, 2),
)


@pytest.mark.parametrize("seed", range(3))
def test_pages_balance_after_ten_thousand_random_operations(seed: int) -> None:
    """The oracle counts owners in a dict; each page's content names its last writer."""
    chance = random.Random(seed)
    pool = PagedKvPool(SPEC, 23, 4, torch.float32, CPU)
    owners: dict[int, int] = {}
    written: dict[int, float] = {}
    groups: list[list[int]] = []  # each holds one share of its pages
    events: Counter[str] = Counter()
    for step in range(10_000):
        event = chance.choice(("acquire", "acquire", "share", "release", "release", "copy"))
        if event == "acquire":
            count = chance.randrange(9)
            if count > 23 - len(owners):
                event = "refused"
                with pytest.raises(RuntimeError, match="are free"):
                    pool.acquire(count)
            else:
                taken = pool.acquire(count)
                assert len(set(taken)) == count
                assert not owners.keys() & set(taken)
                for page in taken:
                    owners[page], written[page] = 1, float(step)
                    pool.k_pages[0][page] = pool.v_pages[0][page] = float(step)
                groups.append(taken)
        elif event == "share" and groups:
            pages = chance.choice(groups)
            pages = pages[: chance.randrange(len(pages) + 1)]
            pool.share(pages)
            for page in pages:
                owners[page] += 1
            groups.append(list(pages))
        elif event == "release" and groups:
            for page in groups[-1]:
                owners[page] -= 1
            gone = [page for page, count in owners.items() if count == 0]
            pool.release(groups.pop())
            for page in gone:
                del owners[page], written[page]
            chance.shuffle(groups)
        elif event == "copy" and len(owners) < 23 and owners:
            source = chance.choice(list(owners))
            (own,) = pool.acquire(1)
            pool.copy(source, own)
            owners[own], written[own] = 1, written[source]
            groups.append([own])
        events[event] += 1
        assert pool.free_pages == 23 - len(owners)
        assert all(pool.owners(page) == owners.get(page, 0) for page in range(23))
        for page, value in written.items():
            assert float(pool.k_pages[0][page, -1, 0, 1]) == value
    assert min(events.values()) > 100, events
    for pages in groups:
        pool.release(pages)
    assert sorted(pool.acquire(23)) == list(range(23))


def test_a_page_that_nobody_owns_is_neither_shared_nor_released() -> None:
    pool = PagedKvPool(SPEC, 4, 4, torch.float32, CPU)
    pages = pool.acquire(2)
    pool.release(pages)
    for misuse in (pool.share, pool.release):
        with pytest.raises(RuntimeError, match="nobody owns it"):
            misuse(pages)
    assert pool.acquire(0) == []
    assert pool.free_pages == 4


def test_slots_lanes_and_block_tables_balance_after_ten_thousand_random_operations() -> None:
    chance = random.Random(9)
    recurrent = RecurrentPool(SPEC, 5, torch.float32, CPU)
    lanes, tables = LanePool(5), BlockTables(5, 6, CPU)
    held: dict[int, tuple[Lane, list[int]]] = {}  # by slot
    rows: dict[int, list[int]] = {slot: [] for slot in range(5)}
    for step in range(10_000):
        version = tables.version
        if len(held) < 5 and (not held or chance.random() < 0.5):
            slot = recurrent.acquire()
            assert slot not in held
            assert not recurrent.conv[:, slot].any()
            assert not recurrent.state[:, slot].any()
            recurrent.conv[:, slot] = recurrent.state[:, slot] = float(step)
            lane = lanes.acquire()
            assert lane.index not in {other.index for other, _ in held.values()}
            assert lanes.length(lane) == 0
            lanes.extend(lane, chance.randrange(50))
            held[slot] = lane, []
        elif chance.random() < 0.5:
            slot = chance.choice(list(held))
            pages = [chance.randrange(99) for _ in range(chance.randrange(7 - len(rows[slot])))]
            tables.write(slot, len(rows[slot]), pages)
            rows[slot] += pages
            assert (tables.version != version) == bool(pages)
        else:
            slot = chance.choice(list(held))
            lane, _ = held.pop(slot)
            lanes.release(lane)
            with pytest.raises(ValueError, match="stale"):
                lanes.length(lane)
            recurrent.release(slot)
            tables.clear(slot)
            rows[slot] = []
            assert tables.version != version
        assert recurrent.free_slots == lanes.n_free == 5 - len(held)
        for slot, pages in rows.items():
            assert tables.row(slot)[0].tolist() == pages + [-1] * (6 - len(pages))
    with pytest.raises(RuntimeError, match="7 pages for a block table of 6"):
        tables.write(0, 3, [1, 2, 3, 4])


def assert_balance(machine: Engine, requests: list[Request]) -> None:
    """Who holds what, counted from the requests and the snapshots alone."""
    running = machine.scheduler.running
    shares = Counter(page for request in running for page in request.pages)
    for snapshot in machine.prefixes._kept.values():
        shares.update(snapshot.pages)
    for page in range(machine.kv.pages):
        assert machine.kv.owners(page) == shares[page]
    assert machine.kv.free_pages == machine.kv.pages - len(shares)
    assert machine.recurrent.slots - machine.recurrent.free_slots == len(running)
    assert machine.proposer.lanes_used == len(running)
    for request in running:
        assert request.slot is not None
        row = machine.tables.row(request.slot)[0].tolist()
        width = len(row)
        assert row == request.pages + [-1] * (width - len(request.pages))
        assert len(request.pages) >= machine.kv.pages_for(request.kv_length)
    for request in requests:
        if request not in running:
            assert (request.pages, request.slot, request.lane) == ([], None, None)
            assert request.phase in (Phase.WAITING, Phase.FINISHED)
    used = sum(snapshot.nbytes for snapshot in machine.prefixes._kept.values())
    assert used == machine.prefixes.used_bytes <= machine.prefixes.budget_bytes


@pytest.mark.parametrize("kinds", ["linear_attention", "full_attention"])
@pytest.mark.parametrize("reuse", [False, True])
def test_an_engine_balances_after_every_event_and_loses_no_request(
    tmp_path: Path, kinds: str, reuse: bool
) -> None:
    """Submissions, steps, cancellations and preemptions in any order, through too few pages."""
    checkpoint = tiny_checkpoint(
        tmp_path,
        seed=31,
        vocab_size=7,
        moe=False,
        num_hidden_layers=2,
        layer_types=[kinds, "full_attention"],
    )
    prompts = random_prompts([3, 40, 17, 64, 9, 30], 7, seed=2)
    prompts += [prompts[1] + [1, 2], prompts[2] + prompts[4]]  # they begin as others do
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    speculation = MtpConfig(depth=4, window=8, n_sink=2)
    alone = {
        tuple(prompt): tokens
        for prompt, tokens in zip(
            prompts, outputs(run(engine(checkpoint), prompts, params)), strict=True
        )
    }
    kv = KvCacheConfig(
        max_tokens=120, tokens_per_page=8, enable_block_reuse=reuse, reuse_bytes=100_000
    )
    machine = engine(checkpoint, speculation, kv_cache=kv, max_batch_size=4, prefill_chunk=16)
    assert isinstance(machine.proposer, MtpProposer)
    chance, requests = random.Random(5), []
    aborted: set[int] = set()
    for _ in range(160):
        event = chance.random()
        if event < 0.25:
            requests.append(machine.submit(chance.choice(prompts), params))
        elif event < 0.30 and machine.scheduler.running:
            machine.scheduler.preempt(machine.scheduler.running[-1])
        elif event < 0.34 and requests:
            victim = chance.choice(requests)
            if not victim.finished:
                aborted.add(victim.request_id)
            machine.abort(victim)
        else:
            machine.step()
        assert_balance(machine, requests)
    while machine.step():
        assert_balance(machine, requests)
    for request in requests:
        whole = alone[tuple(request.prompt_ids)]
        if request.request_id in aborted:
            assert request.output_ids == whole[: len(request.output_ids)]
        else:
            assert request.finish_reason == "length"
            assert request.output_ids == whole
    assert sum(request.metrics.preemptions for request in requests) > 5
    assert any(request.metrics.prefix_hit_tokens for request in requests) == reuse
    machine.prefixes.clear()
    assert machine.kv.free_pages == machine.kv.pages
