"""The memory planner against arithmetic by hand and the paper's shares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from published_models import MODELS

from tllm_wmtp.cli import main
from tllm_wmtp.cli.plan import memory_size
from tllm_wmtp.errors import ConfigError
from tllm_wmtp.memory import Footprint, LayerKv, plan

CONTEXT = 1_040_000


def planned(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, *options: str
) -> dict[str, Any]:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
    assert main(["plan", str(tmp_path), "--context", "1m", "--json", *options]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.parametrize(
    ("model", "share", "draft_bytes"),
    [("q35", 9.1, 2048), ("q122", 7.7, 2048), ("nem", 11.1, 1024)],
)
def test_the_papers_shares_come_out_of_the_models_configs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str, share: float, draft_bytes: int
) -> None:
    result = planned(model, capsys, tmp_path)
    assert round(100 * result["draft_share"], 1) == share
    assert result["draft_bytes_per_token"] == draft_bytes
    assert result["ring_slots"] == 64 + 4032 + 7
    assert result["ring_bytes"] == (64 + 4032 + 7) * draft_bytes
    assert result["reclaimed_bytes"] == (CONTEXT - 4103) * draft_bytes
    assert result["max_batch"] is None


def test_the_share_does_not_depend_on_the_type_of_the_keys(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    wide, narrow = (planned("q35", capsys, tmp_path, "--kv-dtype", t) for t in ("bfloat16", "fp8"))
    assert wide["draft_share"] == narrow["draft_share"]
    assert wide["reclaimed_bytes"] == 2 * narrow["reclaimed_bytes"]


def test_a_ring_lets_one_more_request_in(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The paper's batch at 1M on one 180 GB GPU: native runs out of memory one request earlier."""
    options = ("--gpu-memory", "180g", "--utilization", "0.9", "--weights", "nvfp4")
    result = planned("q35", capsys, tmp_path, *options)
    batch = result["max_batch"]
    assert batch["windowed"] == batch["native"] + 1
    # By hand: 10 layers of 2 heads of 256 in bf16, twice; 30 states of 32 x 128 x 128 floats and
    # 3 convolution rows of 8,192.
    states = 30 * (4 * 32 * 128 * 128 + 2 * 3 * (2 * 16 * 128 + 32 * 128))
    native = CONTEXT * 11 * 2048 + states
    assert result["request_bytes"]["native"] == native
    assert batch["native"] == int((180e9 * 0.9 - result["weight_bytes"]) // native)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_ring_is_split_over_ranks_by_head_and_copied_where_ranks_are_more(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tp: int
) -> None:
    """By hand: 4,103 slots of a key and a value, 2 heads of 256, 2 bytes: 2,048 bytes a slot."""
    result = planned("q35", capsys, tmp_path, "--tp", str(tp))
    mine = {1: 2, 2: 1, 4: 1, 8: 1}[tp]
    assert result["kv_heads_per_rank"] == {"target": mine, "draft": mine}
    assert result["ring_bytes_per_rank"] == result["ring_bytes"] == 4103 * 1024 * mine
    assert result["request_bytes"]["windowed"] - result["request_bytes"]["dense"] == (
        4103 * 1024 * mine
    )


def test_copies_of_heads_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["nem"]))
    assert main(["plan", str(tmp_path), "--context", "1m", "--tp", "4"]) == 0
    text = capsys.readouterr().out
    assert "2.1 MB per request and rank" in text  # 4,103 slots x 2 x 128 x 2 bytes
    assert "draft 1 of 2, each on 2 ranks" in text


def test_a_plan_is_named_by_all_that_it_depends_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model, out = tmp_path / "q35", tmp_path / "out"
    model.mkdir()
    plain = planned("q35", capsys, model)
    assert plain["benchmark"] == "plan"
    assert plain["model"] == "q35"
    others = [
        planned("q35", capsys, model, *options)
        for options in (
            ["--tp", "2"],
            ["--kv-dtype", "fp8"],
            ["--window", "2048"],
            ["--weights", "nvfp4"],
            ["--gpu-memory", "180g"],
        )
    ]
    hashes = {one["config_hash"] for one in [plain, *others]}
    assert len(hashes) == 6
    again = planned("q35", capsys, model, "--out", str(out))
    assert [file.name for file in out.iterdir()] == [f"plan-{plain['config_hash']}.json"]
    assert json.loads(next(out.iterdir()).read_text()) == again == plain


def test_the_text_model_of_a_multimodal_config_is_planned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    nested = {"model_type": "qwen3_5_moe", "text_config": MODELS["q35"]}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert main(["plan", str(tmp_path / "config.json"), "--context", "1m", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert round(100 * result["draft_share"], 1) == 9.1
    assert result["model"] == tmp_path.name


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80g", 80e9),
        ("80gb", 80e9),
        ("80 GiB", 80 * 2**30),
        ("512m", 512e6),
        ("1.5gib", 1.5 * 2**30),
    ],
)
def test_sizes_are_decimal_unless_they_say_binary(text: str, size: float) -> None:
    assert memory_size(text) == size


def test_ranks_share_heads_and_repeat_them_when_there_are_more_ranks() -> None:
    layer = LayerKv(layers=10, kv_heads=2, head_dim=256)
    per_token = {tp: layer.bytes_per_token(2.0, tp) for tp in (1, 2, 4, 8)}
    assert per_token == {1: 20480, 2: 10240, 4: 10240, 8: 10240}
    with pytest.raises(ConfigError, match="tensor parallelism 3 over 2"):
        layer.bytes_per_token(2.0, 3)
    assert layer.ring_bytes(100, 2.0, 8) == 100 * 10240


def test_weights_and_states_are_split_over_ranks_and_weights_must_fit() -> None:
    layer = LayerKv(1, 4, 8)
    footprint = Footprint(layer, layer, recurrent_bytes=1000.0, weight_bytes=4000.0)
    one, four = (plan(footprint, 100, 10, 1.0, tp, memory_bytes=1e6) for tp in (1, 4))
    assert (one.recurrent_bytes, four.recurrent_bytes) == (1000.0, 250.0)
    # By hand: 64 bytes per token; 6,400 of keys and 1,000 of states; a ring of 640.
    assert one.request_bytes == {"dense": 7400.0, "native": 13800.0, "windowed": 8040.0}
    assert one.max_batch == {"dense": 134, "native": 72, "windowed": 123}
    with pytest.raises(ConfigError, match="of weights per rank"):
        plan(footprint, 100, 10, memory_bytes=4000.0)


def test_a_ring_that_holds_the_context_reclaims_nothing() -> None:
    layer = LayerKv(1, 1, 8)
    assert plan(Footprint(layer, layer), context=50, ring_slots=4103).reclaimed_bytes == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpu-memory", "lots"], "a size is expected"),
        (["--utilization", "1.5"], "at most 1"),
        (["--tp", "0"], "1 or more"),
        (["--tp", "3"], "one number must divide the other"),
        (["--context", "2000k"], "positions"),
        (["--gpu-memory", "1g"], "of weights per rank"),
    ],
)
def test_bad_input_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: list[str], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["q35"]))
    try:
        code = main(["plan", str(tmp_path), *options])
    except SystemExit as end:
        code = end.code  # type: ignore[assignment]
    assert code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, "{", "[]", '{"model_type": "gpt2"}'])
def test_a_config_that_is_none_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert main(["plan", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err or content == '{"model_type": "gpt2"}'


def test_the_table_names_every_arm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "demo", "--context", "64k", "--gpu-memory", "2gib"]) == 0
    text = capsys.readouterr().out
    for word in ("draft share", "ring", "reclaimed", "dense", "native", "windowed"):
        assert word in text
