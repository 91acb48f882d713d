"""The depth benchmark: paired seconds by hand, and a small run of all arms."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_model import tiny_checkpoint

from tllm_wmtp.bench.common import config_hash, ratio_of_sums
from tllm_wmtp.bench.depth import (
    ADAPTIVE,
    BLOCK,
    MIX,
    WORKLOADS,
    Answer,
    DepthBench,
    blocks,
    make_prompt,
    ratios_of,
    run_depth_bench,
    seconds_per_token,
)
from tllm_wmtp.errors import ConfigError
from tllm_wmtp.metrics import RequestMetrics

OPTIONS = {"context": 300, "max_tokens": 70, "depths": (2, 4), "max_depth": 4, "window": 60}


def bench_of(model: Path, **changes: object) -> DepthBench:
    return DepthBench(model=model, **(OPTIONS | {"n_sink": 4, "prompts": 1} | changes))  # type: ignore[arg-type]


def test_the_seconds_of_a_step_are_shared_by_its_tokens() -> None:
    metrics = RequestMetrics("windowed", 5, [0] * 4)
    metrics.record_step(2, 0.0, 0.0, 0.6)
    metrics.record_step(0, 0.0, 0.0, 0.5, drafted=0)
    assert seconds_per_token(metrics) == pytest.approx([0.2, 0.2, 0.2, 0.5])


def test_blocks_are_whole() -> None:
    seconds = [1.0] * BLOCK + [2.0] * BLOCK + [9.0] * (BLOCK - 1)
    assert blocks(seconds) == [BLOCK, 2 * BLOCK]


def test_a_ratio_of_sums_pairs_its_measurements() -> None:
    value, (low, high) = ratio_of_sums([2.0, 40.0, 6.0], [1.0, 20.0, 3.0])
    assert (value, low, high) == (2.0, 2.0, 2.0)  # every resample of pairs has the same ratio
    value, (low, high) = ratio_of_sums([1.0, 3.0] * 20, [1.0, 1.0] * 20)
    assert value == 2.0
    assert 1.6 < low < 1.85 < 2.15 < high < 2.4  # standard error 1 / sqrt(40)
    assert ratio_of_sums([1.0, 3.0], [1.0, 1.0]) == ratio_of_sums([1.0, 3.0], [1.0, 1.0])


def test_other_arms_are_compared_with_the_adaptive_one_on_the_same_tokens() -> None:
    def made(second: float) -> list[Answer]:
        metrics = RequestMetrics("windowed", 5, [0])
        return [Answer("easy", [0] * (BLOCK + 1), metrics, [second] * BLOCK)] * 2

    (entry,) = ratios_of("easy", {"depth 2": made(0.3), ADAPTIVE: made(0.2)})
    assert entry["arm"] == "depth 2"
    assert entry["over_adaptive"] == pytest.approx(1.5)
    assert entry["blocks"] == 2


def test_prompts_are_reproducible_and_differ_by_seed() -> None:
    for workload in WORKLOADS:
        first = make_prompt(workload, 400, 1)
        assert first == make_prompt(workload, 400, 1)
        assert first != make_prompt(workload, 400, 2)
        assert 300 < len(first) <= 400


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_tokens 64"):
        bench_of(tmp_path, max_tokens=64)
    with pytest.raises(ConfigError, match="depths"):
        bench_of(tmp_path, depths=(1, 2))
    with pytest.raises(ConfigError, match="context 3"):
        make_prompt("easy", 3, 1)


def test_the_hash_names_the_whole_configuration(tmp_path: Path) -> None:
    others = [bench_of(tmp_path, window=61), bench_of(tmp_path, depths=(2, 3)), bench_of(tmp_path)]
    assert len({config_hash(bench) for bench in others}) == 3
    assert config_hash(others[2]) == config_hash(bench_of(tmp_path))


def test_every_arm_makes_the_same_tokens_and_has_a_row_on_every_workload(tmp_path: Path) -> None:
    bench = bench_of(tiny_checkpoint(tmp_path, vocab_size=640))
    result = run_depth_bench(bench)
    assert result["lossless"]
    arms = ["dense", "depth 2", "depth 4", ADAPTIVE]
    rows = {(row["workload"], row["arm"]): row for row in result["rows"]}
    assert list(rows) == [(workload, arm) for workload in (*WORKLOADS, MIX) for arm in arms]
    for (workload, arm), row in rows.items():
        prompts = 3 if workload == MIX else 1
        assert row["tokens"] == 69 * prompts
        assert sum(row["steps_by_depth"].values()) == row["steps"]
        if arm != ADAPTIVE:
            depth = 1 if arm == "dense" else int(arm.removeprefix("depth "))
            assert row["steps_by_depth"] == {str(depth): row["steps"]}
        assert row["tpot_ms"] > 0
    # Nothing learned its language, so the drafts fail: the adaptive arm must have given up.
    hard = rows["hard", ADAPTIVE]
    assert hard["al"] < 1.3
    assert hard["steps_by_depth"].get("1", 0) > 0
    assert len(result["ratios"]) == 4 * 3
