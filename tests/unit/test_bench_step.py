"""Arithmetic of the step benchmark, against counts made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_model import hf_config, random_weights, tiny_checkpoint

from tllm_wmtp.bench import step
from tllm_wmtp.bench.step import (
    ARMS,
    WARM_UP_STEPS,
    Contestant,
    Spread,
    StepBench,
    bytes_read,
    ratio,
    run_step_bench,
    weight_bytes,
)
from tllm_wmtp.checkpoint.loader import LoadedModel, load_model
from tllm_wmtp.errors import ConfigError

ROW = 2 * 2 * 32 * 4  # bytes of K and V of one token: 2 heads, 32 wide, float32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> LoadedModel:
    return load_model(checkpoint, with_head=True)


def bench_of(checkpoint: Path, **changes: object) -> StepBench:
    options = {"contexts": (200,), "depth": 4, "window": 50, "n_sink": 6, "repeats": 3} | changes
    return StepBench(model=checkpoint, **options)  # type: ignore[arg-type]


def test_a_spread_is_the_median_between_quartiles() -> None:
    spread = Spread.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (spread.low, spread.median, spread.high, spread.runs) == (2.0, 3.0, 4.0, 5)


def test_the_digest_names_the_whole_configuration(checkpoint: Path) -> None:
    plain = bench_of(checkpoint)
    assert plain.digest == bench_of(checkpoint).digest
    others = [
        bench_of(checkpoint, depth=5),
        bench_of(checkpoint, window=51),
        bench_of(checkpoint, n_sink=7),
        bench_of(checkpoint, kv_dtype="bfloat16"),
        bench_of(checkpoint, contexts=(200, 300)),
        bench_of(checkpoint, repeats=4),
    ]
    assert len({plain.digest, *(other.digest for other in others)}) == 1 + len(others)


def test_one_run_has_no_interval(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="repeats 1"):
        bench_of(checkpoint, repeats=1)


def test_a_context_beyond_the_model_is_refused_before_weights_are_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(step, "load_model", load)
    with pytest.raises(ConfigError, match="max_seq_len"):
        run_step_bench(bench_of(checkpoint, contexts=(200, 1_040_000)))


def test_weight_bytes_count_busy_experts_only(loaded: LoadedModel) -> None:
    weights = random_weights(hf_config())
    for module, prefix in ((loaded.target, "model."), (loaded.head, "mtp.")):
        assert module is not None
        mine = {n: w for n, w in weights.items() if n.startswith(prefix)}
        experts = sum(w.numel() for n, w in mine.items() if ".experts." in n)
        others = sum(w.numel() for w in mine.values()) - experts
        # 2 of 4 experts per token; the embedding is the lm_head, so it is read.
        assert weight_bytes(module, loaded.config) == 4 * (others + experts // 2)


@pytest.mark.parametrize(("arm", "visible"), [("native", 200), ("windowed", 56)])
def test_bytes_of_a_step_are_what_its_queries_see(
    checkpoint: Path, loaded: LoadedModel, arm: str, visible: int
) -> None:
    bench = bench_of(checkpoint)
    counted = bytes_read(bench, loaded, Contestant(arm, bench, loaded, 200), torch.float32)
    assert loaded.head is not None
    head = weight_bytes(loaded.head, loaded.config)
    lm_head = 97 * 64 * 4
    assert counted["draft"] == 3 * (head + lm_head + visible * ROW)
    assert counted["verify"] == weight_bytes(loaded.target, loaded.config) + 200 * ROW


def test_the_dense_arm_drafts_nothing(checkpoint: Path, loaded: LoadedModel) -> None:
    bench = bench_of(checkpoint)
    counted = bytes_read(bench, loaded, Contestant("dense", bench, loaded, 200), torch.float32)
    assert counted["draft"] == 0


def test_a_ratio_is_the_median_of_paired_ratios() -> None:
    seconds = {
        "native": {"step": [2.0, 30.0, 4.0], "draft": [2.0, 2.0, 2.0]},
        "windowed": {"step": [1.0, 10.0, 1.0], "draft": [1.0, 1.0, 1.0]},
    }
    result = ratio(64, seconds)
    assert result["step_native_over_windowed"] == 3.0
    assert result["step_native_over_windowed_interquartile"] == [2.5, 3.5]
    assert result["draft_native_over_windowed"] == 2.0


def test_arms_take_turns_and_nobody_always_goes_first(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    step = Contestant.step

    def recorded(self: Contestant) -> None:
        order.append(self.arm)
        step(self)

    monkeypatch.setattr(Contestant, "step", recorded)
    result = run_step_bench(bench_of(checkpoint))
    rounds = [tuple(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert len(rounds) == WARM_UP_STEPS + 3
    assert all(set(turn) == set(ARMS) for turn in rounds)
    assert {turn[0] for turn in rounds} == set(ARMS)
    assert all(row["n_runs"] == 3 for row in result["rows"])
