"""The depth benchmark: paired seconds by hand, and a small run of all arms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

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
    typical_seconds,
)
from tllm_wmtp.errors import ConfigError
from tllm_wmtp.metrics import RequestMetrics

OPTIONS = {"context": 260, "max_tokens": 66, "depths": (3,), "max_depth": 4, "window": 60}


def bench_of(model: Path, **changes: object) -> DepthBench:
    return DepthBench(model=model, **(OPTIONS | {"n_sink": 4, "prompts": 1} | changes))  # type: ignore[arg-type]


def test_the_seconds_of_a_step_are_shared_by_its_tokens() -> None:
    metrics = RequestMetrics("windowed", 5, [0] * 4)
    metrics.record_step(2, 0.0, 0.0, 0.0)
    metrics.record_step(0, 0.0, 0.0, 0.0, drafted=0)
    assert seconds_per_token(metrics, [0.6, 0.5], 9) == pytest.approx([0.2, 0.2, 0.2, 0.5])
    assert seconds_per_token(metrics, [0.6, 0.5], 3) == pytest.approx([0.2, 0.2, 0.2])


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


def answered(steps: Sequence[tuple[int, int, float]], workload: str = "easy") -> Answer:
    """(drafted, accepted, seconds) of each step."""
    metrics = RequestMetrics("windowed", 5, [0] * 7)
    for drafted, accepted, _ in steps:
        metrics.record_step(accepted, 0.0, 0.0, 0.0, drafted)
    made = sum(accepted + 1 for _, accepted, _ in steps)
    request = SimpleNamespace(metrics=metrics, output_ids=[0] * (made + 1))
    return Answer(workload, request, [seconds for _, _, seconds in steps])  # type: ignore[arg-type]


def test_a_typical_step_is_the_median_of_its_text_and_depth() -> None:
    first = answered([(6, 2, 0.014), (6, 2, 0.500), (0, 0, 0.005)])
    second = answered([(6, 0, 0.015), (0, 0, 0.007)])
    other = answered([(6, 6, 0.030)], "hard")
    assert typical_seconds([first, second, other]) == pytest.approx(
        {("easy", 6): 0.015, ("easy", 0): 0.006, ("hard", 6): 0.030}
    )


def test_other_arms_are_compared_with_the_adaptive_one_on_the_same_tokens() -> None:
    # 32 tokens in 16 steps of 4 ms, in each of two answers; one step was disturbed.
    fixed = [answered([(1, 1, 0.004)] * 15 + [(1, 1, 9.0)])] * 2
    # The same in 4 steps of 7 ms and 4 of 5 ms that draft nothing, and four tokens too many.
    adaptive = [answered([(6, 6, 0.007)] * 4 + [(0, 0, 0.005)] * 4 + [(3, 3, 0.006)])] * 2
    answers = {"depth 2": fixed, ADAPTIVE: adaptive}
    typical = {arm: typical_seconds(mine) for arm, mine in answers.items()}
    (entry,) = ratios_of("easy", answers, typical)
    assert entry["arm"] == "depth 2"
    assert entry["over_adaptive"] == pytest.approx(64 / 48)
    assert entry["blocks"] == 2


def test_prompts_are_reproducible_and_differ_by_seed() -> None:
    for workload in WORKLOADS:
        first = make_prompt(workload, 300, 1)
        assert first == make_prompt(workload, 300, 1)
        assert first != make_prompt(workload, 300, 2)
        assert 200 < len(first) <= 300


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
    arms = ["dense", "depth 3", ADAPTIVE]
    rows = {(row["workload"], row["arm"]): row for row in result["rows"]}
    assert list(rows) == [(workload, arm) for workload in (*WORKLOADS, MIX) for arm in arms]
    for (workload, arm), row in rows.items():
        prompts = 3 if workload == MIX else 1
        assert row["tokens"] == 65 * prompts
        assert sum(row["steps_by_depth"].values()) == row["steps"]
        if arm != ADAPTIVE:
            depth = 1 if arm == "dense" else int(arm.removeprefix("depth "))
            assert row["steps_by_depth"] == {str(depth): row["steps"]}
        assert row["tpot_ms"] > 0
    # Nothing learned its language, so the drafts fail: the adaptive arm must have given up.
    hard = rows["hard", ADAPTIVE]
    assert hard["al"] < 1.3
    assert hard["steps_by_depth"].get("1", 0) > 0
    assert len(result["ratios"]) == 4 * 2
