"""The prefill benchmark: a windowed draft's share of the work does not grow with the prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_model import tiny_checkpoint

from tllm_wmtp.bench.prefill import CONTESTANTS, PrefillBench, run_prefill_bench
from tllm_wmtp.errors import ConfigError

DEPTH, WINDOW, SINK = 4, 50, 6
CAPACITY = SINK + WINDOW + DEPTH


def test_rows_of_every_contestant(tmp_path: Path) -> None:
    bench = PrefillBench(
        tiny_checkpoint(tmp_path, vocab_size=640),
        contexts=(200, 500),
        depth=DEPTH,
        window=WINDOW,
        n_sink=SINK,
        prefill_chunk=64,
        repeats=2,
    )
    seen: list[tuple[str, int, int]] = []
    result = run_prefill_bench(bench, lambda *progress: seen.append(progress))
    assert seen == [("200", 1, 2), ("200", 2, 2), ("500", 1, 2), ("500", 2, 2)]
    rows = {(row["context"], row["arm"], row["pruned"]): row for row in result["rows"]}
    assert list(rows) == [(context, *who) for context in (200, 500) for who in CONTESTANTS]
    for (context, arm, pruned), row in rows.items():
        prompt = row["prompt_tokens"]
        assert context - 40 < prompt <= context
        # The draft stores what its ring keeps: of the prompt's rows all but the last one.
        assert row["draft_rows"] == (CAPACITY if arm == "windowed" else prompt - 1)
        # Pruned, the last layer answers these and the last row.
        read = row["draft_rows"] + 1
        assert row["last_layer_rows"] == (read if pruned else prompt)
        assert row["n_runs"] == 2
        assert 0 < row["prefill_s"] <= row["ttft_s"]
    assert [(entry["context"], entry["arm"]) for entry in result["ratios"]] == [
        (200, "windowed"),
        (200, "native"),
        (500, "windowed"),
        (500, "native"),
    ]
    assert all(entry["unpruned_over_pruned"] > 0 for entry in result["ratios"])


def test_one_run_has_no_interval(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="repeats 1"):
        PrefillBench(tmp_path, repeats=1)
