"""The CUDA kernels on a GPU against a float64 reference. The same cases run on the host emulator in
``tests/unit/test_cuda_host.py``."""

from __future__ import annotations

import dataclasses
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import (
    E4M3,
    TOLERANCE,
    Case,
    WindowedRun,
    boundary_starts,
    check_append_writes_only_survivors,
    check_full_attention,
    check_gated_delta,
    check_windowed,
)

pytestmark = pytest.mark.gpu

HEADS = [(1, 1), (2, 2), (6, 2), (16, 2), (16, 1)]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("kv_dtype", [None, E4M3], ids=["same", "e4m3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_attention_agrees_with_float64(
    cuda_ops: Any,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    heads: tuple[int, int],
    head_dim: int,
) -> None:
    scales = (1 / 32, 1 / 16) if kv_dtype == E4M3 else (1.0, 1.0)
    for rows, tree in ((1, False), (4, False), (4, True), (32, False), (32, True)):
        check_windowed(
            cuda_ops,
            Case(
                starts=(0, 5, 190, 100_000),
                rows=(rows, rows, rows, 1),
                queries=(rows, 1, rows, 1),
                window=160,
                spare=40,
                n_query_heads=heads[0],
                n_kv_heads=heads[1],
                head_dim=head_dim,
                dtype=dtype,
                kv_dtype=kv_dtype,
                k_scale=scales[0],
                v_scale=scales[1],
                tree=tree,
                seed=rows,
            ),
        )


@pytest.mark.parametrize("batch", [1, 2, 7, 64, 256])
def test_ragged_batches(cuda_ops: Any, batch: int) -> None:
    generator = np.random.default_rng(batch)
    rows = generator.integers(1, 9, batch)
    queries = [int(generator.integers(0, n + 1)) for n in rows]
    queries[0] = max(queries[0], 1)
    check_windowed(
        cuda_ops,
        Case(
            starts=tuple(int(s) for s in generator.integers(0, 400, batch)),
            rows=tuple(int(n) for n in rows),
            queries=tuple(queries),
            window=100,
            seed=batch,
        ),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_every_boundary(cuda_ops: Any, dtype: torch.dtype, rows: int) -> None:
    n_sink, window, spare = 4, 60, 4
    starts = boundary_starts(n_sink, window, spare)
    check_windowed(
        cuda_ops,
        Case(
            starts=tuple(starts),
            rows=(rows,) * len(starts),
            queries=(rows,) * len(starts),
            n_sink=n_sink,
            window=window,
            spare=spare,
            dtype=dtype,
        ),
    )


@pytest.mark.parametrize("kv_dtype", [None, E4M3], ids=["same", "e4m3"])
def test_append_writes_only_survivors(cuda_ops: Any, kv_dtype: torch.dtype | None) -> None:
    check_append_writes_only_survivors(
        cuda_ops,
        Case(
            starts=(0, 2, 90, 0),
            rows=(500, 53, 3, 1),
            queries=(1, 1, 3, 1),
            kv_dtype=kv_dtype,
            k_scale=0.5 if kv_dtype else 1.0,
        ),
    )


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_full_attention_agrees_with_float64(
    cuda_ops: Any, dtype: torch.dtype, head_dim: int
) -> None:
    for lengths, rows in (((0,), 40), ((1, 300, 63, 64), 5), ((2000,), 1)):
        check_full_attention(cuda_ops, lengths, rows, dtype=dtype, head_dim=head_dim)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_verified_trees_agree_with_float64(
    cuda_ops: Any, dtype: torch.dtype, head_dim: int
) -> None:
    for lengths, rows in (((0,), 7), ((1, 300, 63, 64), 25), ((2000,), 43)):
        check_full_attention(cuda_ops, lengths, rows, dtype=dtype, head_dim=head_dim, tree=True)


def test_gated_delta_agrees_with_float64(cuda_ops: Any) -> None:
    check_gated_delta(cuda_ops, 3, 5, (2, 4), (128, 128))
    check_gated_delta(cuda_ops, 1, 2, (1, 3), (24, 48))


def captured(ops: Any, call: Callable[[], object]) -> Callable[[], object]:
    """Replays of a CUDA graph of ``call``. The emulator has no graphs and calls again."""
    call()  # loads the kernels before the capture
    if ops.is_emulated:
        return call
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def follow_growing_requests(ops: Any, case: Case, steps: int, check_every: int) -> None:
    """One graph while lengths and rows change under it; some answers are held to the reference."""
    run = WindowedRun(ops, case)
    out = torch.full_like(run.q, math.nan)
    replay = captured(ops, lambda: run(out))
    lengths = list(case.starts)
    for step in range(1, steps + 1):
        lengths = [length + 1 for length in lengths]
        k, v = run._random(len(lengths))
        run.k.copy_(k)
        run.v.copy_(v)
        run.starts.copy_(torch.tensor(lengths))
        for b, length in enumerate(lengths):
            run._remember(b, length, k[b : b + 1], v[b : b + 1])
        out.fill_(math.nan)
        replay()
        if step % check_every == 0:
            run.case = dataclasses.replace(case, starts=tuple(lengths))
            error = np.abs(out.cpu().float().double().numpy() - run.reference()).max()
            assert error <= TOLERANCE[case.dtype] * 4, step


def test_a_captured_graph_follows_growing_requests(cuda_ops: Any) -> None:
    case = Case(
        starts=(0, 30, 57), rows=(1, 1, 1), queries=(1, 1, 1), window=200, spare=8, head_dim=128
    )
    follow_growing_requests(cuda_ops, case, steps=1000, check_every=50)


def test_operators_run_on_cuda_tensors_by_device_alone(cuda_ops: Any) -> None:
    pytest.importorskip("tllm_wmtp._core")
    import tllm_wmtp.ops  # noqa: F401

    run = WindowedRun(cuda_ops, Case(starts=(100,), rows=(2,), queries=(2,)))
    arguments = (run.q, run.k, run.v, run.ring_k, run.ring_v, run.row_offsets, run.query_offsets)
    out = torch.ops.wmtp.windowed_draft_attention(
        *arguments, run.starts, run.lanes, run.case.n_sink, run.case.window, run.scale, None
    )
    error = np.abs(out.cpu().float().double().numpy() - run.reference()).max()
    assert error <= TOLERANCE[run.case.dtype] * 4


def embedded_tokens(folder: Path, device: str) -> list[list[int]]:
    """What the embedded runtime generates from a tiny checkpoint, with windowed drafts."""
    from engines import outputs, run
    from tiny_model import random_prompts

    from tllm_wmtp.checkpoint.loader import load_model
    from tllm_wmtp.config import EngineConfig, KvCacheConfig, MtpConfig
    from tllm_wmtp.executor.engine import Engine
    from tllm_wmtp.sampling import SamplingParams

    limits = {
        "max_seq_len": 512,
        "prefill_chunk": 32,
        "kv_cache": KvCacheConfig(tokens_per_page=16),
    }
    speculation = MtpConfig(depth=4, window=16, n_sink=4)
    model = load_model(folder, device=device, with_head=True)
    made = Engine(model, EngineConfig(speculation=speculation, device=device, **limits))
    return outputs(run(made, random_prompts([3, 40, 77], 5), SamplingParams(max_tokens=24)))


def test_the_embedded_runtime_gives_the_tokens_of_the_cpu(cuda_ops: Any, tmp_path: Path) -> None:
    pytest.importorskip("tllm_wmtp._core")
    from tiny_model import tiny_checkpoint

    folder = tiny_checkpoint(tmp_path, seed=11, vocab_size=5)
    assert embedded_tokens(folder, "cuda") == embedded_tokens(folder, "cpu")


def test_no_invalid_access_under_compute_sanitizer(cuda_ops: Any) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("no compute-sanitizer")
    here = Path(__file__).resolve()
    command = [sanitizer, "--error-exitcode=9", sys.executable, "-m", "pytest", "-q", "-x"]
    for test in ("test_every_boundary", "test_append_writes_only_survivors"):
        result = subprocess.run(
            [*command, "-m", "gpu", f"{here}::{test}"],
            capture_output=True,
            text=True,
            timeout=240,
            cwd=here.parents[2],
        )
        assert result.returncode == 0, result.stdout[-2000:]
