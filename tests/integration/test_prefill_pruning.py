"""Pruned prefill is exact and computes no row that nobody reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import engine
from tiny_model import random_prompts, tiny_checkpoint

from tllm_wmtp.config import MtpConfig
from tllm_wmtp.executor.draft import MtpProposer
from tllm_wmtp.executor.engine import Engine
from tllm_wmtp.executor.prefill import spans_read
from tllm_wmtp.executor.request import Phase, Request
from tllm_wmtp.sampling import SamplingParams

WINDOWED = MtpConfig(depth=4, window=20, n_sink=5)
CLOSE = {"atol": 1e-6, "rtol": 1e-6}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=21)


def prefilled(engine: Engine, prompt: list[int]) -> Request:
    request = engine.submit(prompt, SamplingParams(max_tokens=8))
    engine.scheduler.admit()
    while request.phase is Phase.PREFILL:
        with torch.inference_mode():
            engine._prefill(request)
    return request


@pytest.mark.parametrize("speculation", [None, WINDOWED, MtpConfig.native(depth=4)])
@pytest.mark.parametrize("length", [1, 4, 5, 6, 31, 33, 64, 65, 200])
def test_pruned_equals_unpruned(
    checkpoint: Path, speculation: MtpConfig | None, length: int
) -> None:
    prompt = random_prompts([length], 97, seed=length)[0]
    pruned = engine(checkpoint, speculation, max_batch_size=1)
    whole = engine(checkpoint, speculation, max_batch_size=1, prefill_pruning=False)
    requests = [prefilled(machine, prompt) for machine in (pruned, whole)]
    assert requests[0].output_ids == requests[1].output_ids
    hidden = [request.draft_hidden for request in requests]
    assert hidden[0] is not None
    assert hidden[1] is not None
    torch.testing.assert_close(hidden[0], hidden[1], **CLOSE)
    pages = requests[0].pages
    assert pages == requests[1].pages
    for ours, oracle in zip(pruned.kv.k_pages, whole.kv.k_pages, strict=True):
        rows = [x[pages].flatten(0, 1)[:length] for x in (ours, oracle)]
        torch.testing.assert_close(*rows, **CLOSE)
    torch.testing.assert_close(pruned.recurrent.state, whole.recurrent.state, **CLOSE)
    if isinstance(pruned.proposer, MtpProposer) and isinstance(whole.proposer, MtpProposer):
        spec = pruned.proposer.spec
        slots = [spec.slot(p) for p in spec.surviving_positions(0, length - 1)]
        ours, oracle = pruned.proposer.attend.ring_k[0], whole.proposer.attend.ring_k[0]
        torch.testing.assert_close(ours[slots], oracle[slots], **CLOSE)
    assert requests[1].metrics.prefill_last_layer_rows == length


def rows_anyone_reads(length: int, speculation: MtpConfig | None) -> set[int]:
    """By the definition: the last row, and what a ring still holds after rows 0 .. length - 2."""
    read = {length - 1}
    if speculation is None:
        return read
    stored = range(length - 1)
    if speculation.window is None:
        return read | set(stored)
    ring_tail = speculation.window + speculation.depth
    return read | {p for p in stored if p < speculation.n_sink or p >= length - 1 - ring_tail}


@pytest.mark.parametrize("speculation", [None, WINDOWED, MtpConfig.native(depth=4)])
@pytest.mark.parametrize("length", [1, 2, 5, 6, 29, 30, 31, 100, 333])
def test_row_counts(checkpoint: Path, speculation: MtpConfig | None, length: int) -> None:
    machine = engine(checkpoint, speculation, max_batch_size=1)
    request = prefilled(machine, random_prompts([length], 97)[0])
    read = rows_anyone_reads(length, speculation)
    assert request.metrics.prefill_last_layer_rows == len(read)
    drafted = 0 if speculation is None else len(read - {length - 1})
    assert request.metrics.prefill_draft_rows == drafted


@pytest.mark.parametrize("chunk", [1, 7, 32, 1000])
def test_spans_of_all_chunks_are_the_rows_read(chunk: int) -> None:
    for length in range(1, 60):
        read = rows_anyone_reads(length, WINDOWED)
        reads = (WINDOWED.n_sink, max(length - 1 - 24, 0))
        spanned = [
            position
            for start in range(0, length, chunk)
            for span in spans_read(start, min(start + chunk, length), length, reads)
            for position in range(*span)
        ]
        assert spanned == sorted(read)


def test_a_model_that_ends_in_a_recurrent_layer_is_not_pruned(tmp_path: Path) -> None:
    kinds = ["full_attention", "linear_attention"]
    checkpoint = tiny_checkpoint(tmp_path, layer_types=kinds, num_hidden_layers=2)
    request = prefilled(engine(checkpoint, WINDOWED), random_prompts([100], 97)[0])
    assert request.metrics.prefill_last_layer_rows == 100


def test_chunks_that_nobody_reads_work_with_many_experts(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, num_experts=20)
    prompt = random_prompts([150], 97)[0]
    pruned = prefilled(engine(checkpoint), prompt)
    whole = prefilled(engine(checkpoint, prefill_pruning=False), prompt)
    assert pruned.output_ids == whole.output_ids
