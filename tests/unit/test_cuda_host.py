"""The CUDA kernels without a GPU: their own source, compiled for a host emulator that runs every
block thread by thread, against a float64 reference. Planning and checking are compared with
arithmetic written down a second time."""

from __future__ import annotations

import ctypes
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import toolchain
import torch
from engines import engine, outputs, run
from tiny_model import random_prompts, tiny_checkpoint
from toolchain import REPOSITORY

from tllm_wmtp.bench import cuda_attention as bench
from tllm_wmtp.config import MtpConfig
from tllm_wmtp.executor import draft
from tllm_wmtp.models import states
from tllm_wmtp.ops import cuda
from tllm_wmtp.sampling import SamplingParams

cases = toolchain.script("tests/gpu/kernel_cases.py")
Case, E4M3 = cases.Case, cases.E4M3


@pytest.fixture(scope="module")
def ops() -> Any:
    folder = REPOSITORY / "build/cuda-emulated"
    toolchain.build(folder, "wmtp_cuda_emulated", "-DWMTP_CUDA_EMULATION=ON")
    return cuda.CudaOps(folder / "lib/libwmtp_cuda_emulated.so")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kv_dtype", [None, E4M3], ids=["same", "e4m3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_attention_agrees_with_float64(
    ops: Any, dtype: torch.dtype, kv_dtype: torch.dtype | None, head_dim: int
) -> None:
    scales = (1 / 32, 1 / 16) if kv_dtype == E4M3 else (1.0, 1.0)
    cases.check_windowed(
        ops,
        Case(
            starts=(5, 190),
            rows=(3, 4),
            queries=(1, 4),
            window=90,
            n_query_heads=6,
            n_kv_heads=2,
            head_dim=head_dim,
            dtype=dtype,
            kv_dtype=kv_dtype,
            k_scale=scales[0],
            v_scale=scales[1],
        ),
    )


@pytest.mark.parametrize("head_dim", [16, 80])
def test_any_head_size_and_mixed_types(ops: Any, head_dim: int) -> None:
    for dtype, kv_dtype in (
        (torch.bfloat16, None),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
    ):
        cases.check_windowed(
            ops,
            Case(
                starts=(70,),
                rows=(2,),
                queries=(2,),
                head_dim=head_dim,
                dtype=dtype,
                kv_dtype=kv_dtype,
            ),
        )


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (16, 1), (6, 2)], ids=str)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_groups_rows_and_trees(ops: Any, heads: tuple[int, int], tree: bool) -> None:
    cases.check_windowed(
        ops,
        Case(
            starts=(0, 61, 333),
            rows=(9, 12, 4),
            queries=(9, 5, 4),
            window=50,
            spare=12,
            n_query_heads=heads[0],
            n_kv_heads=heads[1],
            tree=tree,
            seed=3,
        ),
    )


def test_thirty_two_rows_of_a_tree(ops: Any) -> None:
    cases.check_windowed(
        ops,
        Case(
            starts=(97,), rows=(40,), queries=(32,), window=70, spare=40, n_query_heads=4, tree=True
        ),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_every_boundary(ops: Any, dtype: torch.dtype, rows: int) -> None:
    n_sink, window, spare = 4, 60, 4
    starts = cases.boundary_starts(n_sink, window, spare)
    cases.check_windowed(
        ops,
        Case(
            starts=tuple(starts),
            rows=(rows,) * len(starts),
            queries=(rows,) * len(starts),
            n_sink=n_sink,
            window=window,
            spare=spare,
            n_query_heads=2,
            n_kv_heads=1,
            dtype=dtype,
        ),
    )


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_many_tiles_in_one_split(ops: Any, head_dim: int) -> None:
    cases.check_windowed(
        ops,
        Case(
            starts=(2000, 333, 5000, 90, 7, 444),
            rows=(1,) * 6,
            queries=(1,) * 6,
            window=400,
            head_dim=head_dim,
        ),
    )


def test_a_ring_without_sinks_or_with_a_window_of_one(ops: Any) -> None:
    for n_sink, window in ((0, 30), (3, 1), (0, 1)):
        cases.check_windowed(
            ops,
            Case(starts=(0, 100), rows=(2, 2), queries=(2, 2), n_sink=n_sink, window=window),
        )


def test_requests_without_queries_and_a_batch_wider_than_a_block(ops: Any) -> None:
    batch = 150
    cases.check_windowed(
        ops,
        Case(
            starts=tuple(range(batch)),
            rows=(1,) * batch,
            queries=tuple(int(b % 3 == 0) for b in range(batch)),
            window=8,
            n_query_heads=1,
            n_kv_heads=1,
            dtype=torch.float32,
            head_dim=16,
        ),
    )


@pytest.mark.parametrize("kv_dtype", [None, E4M3], ids=["same", "e4m3"])
def test_append_writes_only_survivors(ops: Any, kv_dtype: torch.dtype | None) -> None:
    cases.check_append_writes_only_survivors(
        ops,
        Case(
            starts=(0, 2, 90, 0),
            rows=(300, 53, 3, 1),
            queries=(1, 1, 3, 1),
            kv_dtype=kv_dtype,
            k_scale=0.5 if kv_dtype else 1.0,
        ),
    )


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"]
)
def test_full_attention_agrees_with_float64(ops: Any, dtype: torch.dtype) -> None:
    cases.check_full_attention(ops, (1, 130, 63), 3, dtype=dtype, page_size=16)
    cases.check_full_attention(ops, (0,), 11, dtype=dtype, page_size=7, heads=(2, 1))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"]
)
def test_verified_trees_agree_with_float64(ops: Any, dtype: torch.dtype) -> None:
    cases.check_full_attention(ops, (1, 130, 63), 7, dtype=dtype, page_size=16, tree=True)
    cases.check_full_attention(
        ops, (61,), 43, dtype=dtype, page_size=7, heads=(2, 1), tree=True, seed=1
    )


def test_gated_delta_agrees_with_float64(ops: Any) -> None:
    cases.check_gated_delta(ops, 2, 3, (1, 2), (24, 48))


def test_order_of_threads_does_not_matter(ops: Any) -> None:
    """A missing barrier would let some order read what is not there yet."""
    case = Case(starts=(150,), rows=(3,), queries=(3,), window=100, head_dim=128)
    answers = []
    for seed in range(4):
        ops._library.wmtp_cuda_emulation_seed(ctypes.c_uint64(seed))
        answers.append(cases.WindowedRun(ops, case)())
    assert all(torch.equal(answers[0], other) for other in answers[1:])


# --- Planning ------------------------------------------------------------------------------------


def windowed_shape(**changes: Any) -> Any:
    heads = cuda.AttentionShape(
        changes.pop("n_query_heads", 16),
        changes.pop("n_kv_heads", 2),
        changes.pop("head_dim", 256),
        changes.pop("row_dtype", 1),
        changes.pop("kv_dtype", 1),
    )
    values = {
        "n_requests": 1,
        "n_rows": 1,
        "n_queries": 1,
        "n_lanes": 4,
        "capacity": 4104,
        "n_sink": 4,
        "window": 4092,
        "mask_words": 0,
    }
    values.update(changes)
    return cuda.WindowedShape(attention=heads, **values)


def test_a_batch_of_one_fills_the_chip(ops: Any) -> None:
    plan = ops.plan_windowed(windowed_shape(), 132)
    # 4,097 keys are 65 tiles of 64: two KV heads make 130 blocks for 132 multiprocessors.
    assert plan.n_splits == 65
    assert plan.workspace_bytes == 65 * 16 * (256 + 2) * 4


@pytest.mark.parametrize("batch", [1, 3, 4, 16, 64, 256])
@pytest.mark.parametrize("rows", [1, 4, 32])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("n_sms", [8, 108, 132, 148])
def test_splits_never_need_a_second_wave(
    ops: Any, batch: int, rows: int, head_dim: int, n_sms: int
) -> None:
    resident = {64: 4, 128: 3, 256: 2}[head_dim]
    shape = windowed_shape(
        n_requests=batch,
        n_rows=batch * rows,
        n_queries=batch * rows,
        head_dim=head_dim,
        n_lanes=256,
        capacity=4200,
    )
    plan = ops.plan_windowed(shape, n_sms)
    tiles = max(batch, math.ceil(batch * rows * 8 / 16))
    blocks = tiles * 2
    assert 1 <= plan.n_splits <= min(256, math.ceil(4200 / 64))
    assert plan.n_splits == 1 or blocks * plan.n_splits <= n_sms * resident
    # One more would not fit, unless there are no more keys to share.
    most = min(256, math.ceil(min(4200, 4 + 4092 + batch * rows) / 64))
    assert plan.n_splits == most or blocks * (plan.n_splits + 1) > n_sms * resident
    expected = 0 if plan.n_splits == 1 else plan.n_splits * batch * rows * 16 * (head_dim + 2) * 4
    assert plan.workspace_bytes == expected


def test_a_plan_serves_smaller_batches(ops: Any) -> None:
    largest = ops.plan_windowed(
        windowed_shape(n_requests=8, n_rows=32, n_queries=32, capacity=4200), 132
    )
    heads_and_state = 16 * (256 + 2) * 4
    for queries in (1, 8, 31):
        assert largest.n_splits * queries * heads_and_state <= largest.workspace_bytes


def test_full_attention_splits_by_what_the_pages_can_hold(ops: Any) -> None:
    heads = cuda.AttentionShape(16, 2, 256, 1, 1)
    shape = cuda.PagedShape(heads, 1, 0, 8, 65536, 16, 65536)
    # 8 rows of 8 heads are 4 row tiles: 8 blocks a split, 264 resident.
    assert ops.plan_paged(shape, 132).n_splits == 33
    few_pages = cuda.PagedShape(heads, 1, 0, 8, 65536, 16, 7)
    assert ops.plan_paged(few_pages, 132).n_splits == 2
    prefill = cuda.PagedShape(heads, 1, 0, 4096, 65536, 16, 65536)
    assert ops.plan_paged(prefill, 132).n_splits == 1
    assert ops.plan_paged(prefill, 132).workspace_bytes == 0


# --- Checking ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_dim": 40}, ("head_dim 40", "multiple of 16", "pad")),
        ({"head_dim": 512}, ("head_dim 512", "up to 256")),
        ({"n_query_heads": 15}, ("n_query_heads 15", "n_kv_heads 2")),
        ({"n_kv_heads": 0}, ("n_kv_heads 0",)),
        ({"row_dtype": 3}, ("row dtype code 3", "convert")),
        ({"kv_dtype": 9}, ("KV dtype code 9", "e4m3 (3)")),
        ({"window": 0}, ("window 0", ">= 1")),
        ({"window": 5000}, ("ring capacity 4104", "window 5000", "spare")),
        ({"n_sink": -1}, ("n_sink -1", "0 for none")),
        ({"n_queries": 2}, ("n_queries 2 > n_rows 1",)),
        ({"n_rows": 10, "n_queries": 10}, ("n_queries 10", "spares 8", "raise the capacity")),
        ({"n_lanes": 0}, ("n_lanes 0", "allocate")),
        ({"n_lanes": 1 << 20}, ("2^31", "split the cache")),
        ({"mask_words": -1}, ("mask_words -1", "0 for chains")),
        ({"n_rows": 10, "mask_words": 1}, ("n_rows 10", "spares 8", "raise the capacity")),
        (
            {"n_rows": 40, "capacity": 4200, "mask_words": 1},
            ("mask_words 1", "40 appended rows", "ceil"),
        ),
    ],
)
def test_a_bad_shape_is_named(ops: Any, changes: dict[str, int], words: tuple[str, ...]) -> None:
    assert ops.check_windowed(windowed_shape()) == ""
    text = ops.check_windowed(windowed_shape(**changes))
    for word in words:
        assert word in text


def test_bad_pages_and_states_are_named(ops: Any) -> None:
    heads = cuda.AttentionShape(16, 2, 256, 1, 1)
    assert ops.check_paged(cuda.PagedShape(heads, 1, 1, 1, 8, 16, 4)) == ""
    assert "page_size 0" in ops.check_paged(cuda.PagedShape(heads, 1, 1, 1, 8, 0, 4))
    assert "max_pages 0" in ops.check_paged(cuda.PagedShape(heads, 1, 1, 1, 8, 16, 0))
    assert "2^31" in ops.check_paged(cuda.PagedShape(heads, 1, 1, 1, 1 << 28, 16, 4))
    assert "mask_words -1" in ops.check_paged(cuda.PagedShape(heads, 1, 1, 1, 8, 16, 4, -1))
    assert ops.check_gated_delta(cuda.GatedDeltaShape(1, 1, 2, 4, 128, 128, 4)) == ""
    for shape, words in (
        ((1, 1, 2, 3, 128, 128, 4), "n_value_heads 3"),
        ((1, 1, 2, 4, 512, 128, 4), "key_dim 512"),
        ((1, 1, 2, 4, 128, 24, 4), "value_dim 24"),
        ((1, 1, 2, 4, 128, 128, 0), "n_slots 0"),
    ):
        assert words in ops.check_gated_delta(cuda.GatedDeltaShape(*shape))


def test_bad_buffers_are_named(ops: Any) -> None:
    pointers = [name for name, kind in cuda.WindowedBuffers._fields_ if kind is ctypes.c_void_p]
    pointers.remove("ancestor_mask")
    good = dict.fromkeys(pointers, 4096) | {"softmax_scale": 1.0, "k_scale": 1.0, "v_scale": 1.0}

    def objection(**changes: Any) -> str:
        return str(ops.check_windowed(windowed_shape(), cuda.WindowedBuffers(**(good | changes))))

    assert objection() == ""
    assert "ring_v is null" in objection(ring_v=None)
    assert "q is not aligned to 16" in objection(q=4104)
    assert "KV scales" in objection(k_scale=2.0)
    assert "must be positive" in objection(v_scale=-1.0)
    assert "ancestor_mask" in objection(ancestor_mask=4096)


def test_a_tree_needs_its_mask_and_its_starts(ops: Any) -> None:
    def objection(mask_words: int, **changes: Any) -> str:
        heads = cuda.AttentionShape(16, 2, 256, 1, 1)
        shape = cuda.PagedShape(heads, 1, 0, 1, 8, 16, 4, mask_words)
        pointers = [name for name, kind in cuda.PagedBuffers._fields_ if kind is ctypes.c_void_p]
        good = dict.fromkeys(pointers, 4096)
        scales = {"softmax_scale": 1.0, "k_scale": 1.0, "v_scale": 1.0}
        return str(ops.check_paged(shape, cuda.PagedBuffers(**(good | scales | changes))))

    assert objection(1) == ""
    assert objection(0, ancestor_mask=None, tree_starts=None) == ""
    assert "mask_words 1 without ancestor_mask" in objection(1, ancestor_mask=None)
    assert "mask_words 0 with an ancestor_mask" in objection(0)
    assert "tree_starts is null" in objection(1, tree_starts=None)


def test_trees_without_their_starts_are_refused(ops: Any) -> None:
    pages = torch.zeros(2, 4, 1, 16)
    row, table = torch.zeros(1, 1, 16), torch.zeros(1, 2, dtype=torch.int32)
    offsets, position = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    common = (row, pages, pages.clone(), table, offsets, position, 1.0)
    mask = torch.ones(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="only ancestor_mask: .*pass both for trees"):
        ops.full_attention(*common, mask)
    with pytest.raises(ValueError, match="only tree_starts"):
        ops.full_attention(*common, None, position)
    with pytest.raises(ValueError, match=r"ancestor_mask is .*ceil\(rows / 32\)"):
        ops.full_attention(*common, mask[0], position)


def test_bad_tensors_are_named(ops: Any) -> None:
    run = cases.WindowedRun(ops, Case(starts=(10,), rows=(1,), queries=(1,)))
    run.lanes = run.lanes.to(torch.int64)
    with pytest.raises(
        ValueError, match=r"lanes is torch\.int64.*must be a contiguous torch\.int32"
    ):
        run()
    run = cases.WindowedRun(ops, Case(starts=(10,), rows=(1,), queries=(1,)))
    run.q = run.q.transpose(1, 2)
    with pytest.raises(ValueError, match="q is"):
        run()


# --- Formats -------------------------------------------------------------------------------------


def append_bits(ops: Any, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What one appended row of ``values`` becomes in a cache of ``dtype``."""
    count = values.numel()
    ring = torch.zeros(1, 2, count // 16, 16).to(dtype)
    other = ring.clone()
    rows = values.view(1, count // 16, 16)
    one = torch.tensor([0, 1], dtype=torch.int32)
    start, lanes = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    ops.ring_append(rows, rows, ring, other, one, start, lanes, 0)
    return ring[0, 0].flatten()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, E4M3], ids=str)
def test_rounding_is_torchs(ops: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    exponents = torch.randint(-20, 9, (4096,)).float()
    values = torch.randn(4096) * torch.exp2(exponents)
    ties = (torch.arange(0, 4096).float() - 2048) / 1024  # many lie half way between two codes
    for tensor in (values, ties):
        clamped = tensor.clamp(-448, 448) if dtype == E4M3 else tensor
        got = append_bits(ops, clamped, dtype)
        # torch flushes nothing and rounds to nearest even; so must the kernel.
        assert torch.equal(got.float(), clamped.to(dtype).float())


def test_e4m3_saturates(ops: Any) -> None:
    values = torch.tensor([449.0, 1e9, -1e9, float("inf")] * 4)
    got = append_bits(ops, values, E4M3).float()
    assert got.tolist() == [448.0, 448.0, -448.0, 448.0] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_e4m3_code_reads_exactly(ops: Any, dtype: torch.dtype) -> None:
    """A query that sees only its own key answers that key's value: every code of V comes back."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = torch.where(codes % 128 == 127, 0, codes)  # not the two NaN codes
    values = codes.view(E4M3).float()
    v = values.view(4, 1, 64).to(dtype)
    assert torch.equal(v.float().flatten(), values)
    ring = torch.zeros(4, 8, 1, 64).to(E4M3)
    offsets = torch.arange(5, dtype=torch.int32)
    out = ops.windowed_draft_attention(
        torch.randn(4, 1, 64).to(dtype),
        torch.randn(4, 1, 64).to(dtype),
        v,
        ring,
        ring.clone(),
        offsets,
        offsets,
        torch.zeros(4, dtype=torch.int64),
        torch.arange(4, dtype=torch.int32),
        0,
        4,
        0.125,
    )
    assert torch.equal(out.float().flatten(), values)


@pytest.mark.parametrize("tree_width", [1, 2], ids=["chain", "tree"])
def test_the_embedded_runtime_gives_the_same_tokens(
    ops: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tree_width: int
) -> None:
    """Prefill, draft, verify and commit on these kernels, and the tokens of the CPU kernels."""
    folder = tiny_checkpoint(tmp_path, seed=11, vocab_size=5)
    prompts = random_prompts([3, 40], 5)
    params = SamplingParams(max_tokens=12)
    speculation = MtpConfig(depth=4, window=16, n_sink=4, tree_width=tree_width)
    expected = outputs(run(engine(folder, speculation), prompts, params))
    calls: dict[str, int] = {}

    def counted(name: str) -> Any:
        def call(*arguments: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return getattr(ops, name)(*arguments)

        return call

    for module, names in (
        (draft, ("ring_append", "windowed_draft_attention")),
        (states, ("paged_append", "full_attention", "gated_delta_rows", "gated_delta_commit")),
    ):
        for name in names:
            monkeypatch.setattr(module, f"_{name}", counted(name))
    assert outputs(run(engine(folder, speculation), prompts, params)) == expected
    # A tree's recurrent rows have a closed form in torch.
    assert len(calls) == (6 if tree_width == 1 else 5)


# --- What only a GPU runs -------------------------------------------------------------------------


def test_the_gpu_tests_themselves(ops: Any, tmp_path: Path) -> None:
    """Their bodies pass on the emulator, so a failure on a GPU is the GPU's."""
    gpu = toolchain.script("tests/gpu/test_cuda_kernels.py")
    gpu.test_attention_agrees_with_float64(ops, torch.bfloat16, E4M3, (6, 2), 64)
    gpu.test_ragged_batches(ops, 7)
    gpu.test_every_boundary(ops, torch.bfloat16, 3)
    gpu.test_append_writes_only_survivors(ops, None)
    gpu.test_full_attention_agrees_with_float64(ops, torch.float32, 64)
    case = Case(starts=(0, 57), rows=(1, 1), queries=(1, 1), window=50)
    gpu.follow_growing_requests(ops, case, steps=70, check_every=7)
    assert len(gpu.embedded_tokens(tiny_checkpoint(tmp_path, vocab_size=5), "cpu")) == 3


def test_every_row_of_the_bench_is_complete(ops: Any) -> None:
    setup = bench.Setup(
        window=60,
        spare=4,
        n_query_heads=4,
        head_dims=(64,),
        batches=(1, 16, 64),
        native_contexts=(70,),
        position=500,
        rotate_bytes=1 << 14,
        copy_bytes=1 << 16,
        runs=3,
    )
    result = bench.measure(ops, setup, log=lambda line: None)
    by_what = {
        (row["what"], row["arm"], row["batch"], row["kv_dtype"]): row for row in result["rows"]
    }
    for batch in setup.batches:
        for kv_dtype in ("bfloat16", "float8_e4m3fn"):
            ours = by_what["ours", "windowed", batch, kv_dtype]
            copy = by_what["copy", "windowed", batch, kv_dtype]
            assert ours["bytes"] == copy["bytes"]
            assert ours["keys"] == 64
            element = 2 if kv_dtype == "bfloat16" else 1
            assert ours["bytes"] >= batch * 64 * 2 * 2 * 64 * element
        assert ("sdpa", "windowed", batch, "bfloat16") in by_what
    assert ("ours", "native", 1, "bfloat16") in by_what
    for row in result["rows"]:
        numbers = [value for value in row.values() if isinstance(value, float)]
        assert all(math.isfinite(number) and number > 0 for number in numbers)
        assert row["us_low"] <= row["us"] <= row["us_high"]
        assert row["floor_us"] == pytest.approx(row["us"] * row["of_copy_bandwidth"])
    assert all(row["reason"] for row in result["missing"])
    goals = bench.goals(result["rows"])
    assert sorted({goal["batch"] for goal in goals}) == [1, 16, 64]
    assert len(setup.name()) == 12


def test_gpu_check_builds_every_source_and_stops_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    check = toolchain.script("build_scripts/gpu_check.py")
    command = " ".join(check.build_command("nvcc", check.target_of((9, 0))))
    assert "arch=compute_90a,code=sm_90a" in command
    assert check.target_of((8, 0)) == "80"
    for source in ("launch.cpp", "check.cpp", "device_info.cpp", "c_api.cpp", "kernels.cu"):
        assert f"cpp/src/cuda/{source}" in command
    assert "emulation" not in command
    if not torch.cuda.is_available():
        out = tmp_path / "result.json"
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(out)])
        assert check.main() == check.NO_GPU
        assert "no CUDA device" in capsys.readouterr().out
        assert not out.exists()
