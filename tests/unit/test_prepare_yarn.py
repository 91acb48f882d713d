"""Checkpoints prepared for longer contexts."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import toolchain
import torch
from tiny_model import hf_config, random_prompts, tiny_checkpoint

from tllm_wmtp import LLM, MtpConfig, SamplingParams
from tllm_wmtp.checkpoint import yarn
from tllm_wmtp.checkpoint.loader import load_model, read_config
from tllm_wmtp.checkpoint.yarn import prepare_yarn, scaled_config
from tllm_wmtp.errors import CheckpointError, WmtpError

LIMIT = 64
script = toolchain.script("build_scripts/prepare_yarn.py")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tiny_checkpoint(tmp_path / "source", max_position_embeddings=LIMIT)
    (path / "tokenizer_config.json").write_text("{}")
    (path / "extra").mkdir()
    (path / "extra" / "notes.txt").write_text("notes")
    (path / ".cache").mkdir()
    return path


def hashes(path: Path) -> dict[str, str]:
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    return {str(f.relative_to(path)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def generated(path: Path, prompt: list[int]) -> list[int]:
    arm = MtpConfig(depth=4, window=32, n_sink=4)
    with LLM(path, speculation=arm, max_batch_size=1) as llm:
        output = llm.generate(prompt, SamplingParams(max_tokens=8, ignore_eos=True))
    assert output.error is None
    return output.outputs[0].token_ids


@pytest.mark.parametrize("link", ["symlink", "hard", "copy"])
def test_positions_beyond_the_original_limit_are_served(
    source: Path, tmp_path: Path, link: str
) -> None:
    before = hashes(source)
    prepared = prepare_yarn(source, tmp_path / "long", link=link)
    assert (prepared.factor, prepared.max_positions) == (4.0, 4 * LIMIT)
    prompt = random_prompts([3 * LIMIT], 97)[0]
    assert len(generated(tmp_path / "long", prompt)) == 8
    with pytest.raises(WmtpError, match=f"{LIMIT} positions"):
        generated(source, prompt)
    assert hashes(source) == before
    after = hashes(tmp_path / "long")
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} == {"config.json"}
    assert not (tmp_path / "long" / ".cache").exists()


def test_each_kind_of_link_is_what_it_says(source: Path, tmp_path: Path) -> None:
    file = "model.safetensors"
    for link in ("symlink", "hard", "copy"):
        prepare_yarn(source, tmp_path / link, link=link)
    assert (tmp_path / "symlink" / file).readlink() == source / file
    assert (tmp_path / "hard" / file).samefile(source / file)
    assert not (tmp_path / "hard" / file).is_symlink()
    assert not (tmp_path / "copy" / file).samefile(source / file)


def test_links_of_links_lead_to_the_file_itself(source: Path, tmp_path: Path) -> None:
    """A cached download is a folder of relative links into another one."""
    snapshot = tmp_path / "snapshots" / "x"
    snapshot.mkdir(parents=True)
    for file in source.iterdir():
        (snapshot / file.name).symlink_to(Path("../../source") / file.name)
    for link in ("symlink", "hard"):
        prepare_yarn(snapshot, tmp_path / link, link=link)
        assert (tmp_path / link / "model.safetensors").samefile(source / "model.safetensors")
    assert (tmp_path / "symlink" / "model.safetensors").readlink().is_absolute()


def test_the_rotations_are_those_of_transformers(source: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTextRotaryEmbedding

    prepare_yarn(source, tmp_path / "long")
    content = json.loads((tmp_path / "long" / "config.json").read_text())
    fields = {key: value for key, value in content.items() if key != "model_type"}
    theirs = Qwen3_5MoeTextRotaryEmbedding(transformers.Qwen3_5MoeTextConfig(**fields))
    rope = load_model(tmp_path / "long").target.rope  # type: ignore[attr-defined]
    torch.testing.assert_close(rope.inv_freq, theirs.inv_freq, rtol=1e-6, atol=0)
    assert rope.config.magnitude() == pytest.approx(theirs.attention_scaling)
    plain = load_model(source).target.rope.inv_freq  # type: ignore[attr-defined]
    assert rope.inv_freq[-1].item() == pytest.approx(plain[-1].item() / 4, rel=1e-5)


QWEN = {"model_type": "qwen3_next", "max_position_embeddings": 262_144, "rope_theta": 1e7}
SCALED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262_144}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (QWEN, QWEN | {"rope_scaling": SCALED}),
        (QWEN | {"rope_scaling": None}, QWEN | {"rope_scaling": SCALED}),
        (
            QWEN | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}},
            QWEN | {"rope_scaling": {"mrope_section": [2, 1, 1]} | SCALED},
        ),
        (
            QWEN | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}},
            QWEN | {"rope_parameters": {"rope_theta": 1e7} | SCALED},
        ),
        (
            {"model_type": "qwen3_5_moe", "text_config": QWEN, "vision_config": {"depth": 2}},
            {
                "model_type": "qwen3_5_moe",
                "text_config": QWEN | {"rope_scaling": SCALED},
                "vision_config": {"depth": 2},
            },
        ),
    ],
)
def test_the_scaling_goes_where_the_file_keeps_its_rotation(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    untouched = json.dumps(before)
    config, factor, original = scaled_config(before)
    inner = after.get("text_config", after)
    inner["max_position_embeddings"] = 1_048_576
    assert config == after
    assert (factor, original) == (4.0, 262_144)
    assert json.dumps(before) == untouched


def test_any_number_of_positions_can_be_asked_for(source: Path, tmp_path: Path) -> None:
    prepared = prepare_yarn(source, tmp_path / "long", max_positions=100)
    assert prepared.factor == 100 / LIMIT
    assert read_config(tmp_path / "long").max_position_embeddings == 100


# --- what must be refused ---------------------------------------------------------------------


def edited(source: Path, **changes: Any) -> Path:
    content = json.loads((source / "config.json").read_text()) | changes
    (source / "config.json").write_text(json.dumps(content))
    return source


def yarn_parameters() -> dict[str, Any]:
    return hf_config()["rope_parameters"] | {"rope_type": "yarn", "factor": 2.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": yarn_parameters()}, r"type 'yarn' with factor 2.0: .*scaled already"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2}}, "scaled already"),
        ({"model_type": "nemotron_h"}, "no rotary embedding"),
        ({"model_type": "deepseek_v3"}, "model_type 'deepseek_v3': the Qwen families"),
        ({"max_position_embeddings": None}, "lacks 'max_position_embeddings'"),
        ({"rope_parameters": 7}, "rope_parameters holds 7"),
    ],
)
def test_what_cannot_be_scaled_is_refused(
    source: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        prepare_yarn(edited(source, **changes), tmp_path / "long")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("positions", [LIMIT, 2])
def test_fewer_positions_than_there_are(source: Path, tmp_path: Path, positions: int) -> None:
    with pytest.raises(CheckpointError, match=f"max positions {positions}.*has {LIMIT}"):
        prepare_yarn(source, tmp_path / "long", max_positions=positions)


def test_an_existing_output_and_one_inside_the_original(source: Path, tmp_path: Path) -> None:
    (tmp_path / "long").write_text("mine")
    with pytest.raises(CheckpointError, match="exists already"):
        prepare_yarn(source, tmp_path / "long")
    assert (tmp_path / "long").read_text() == "mine"
    with pytest.raises(CheckpointError, match="in the original directory"):
        prepare_yarn(source, source / "long")


def test_a_link_that_cannot_be_made_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_disk(*_: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setitem(yarn.LINKS, "hard", other_disk)
    with pytest.raises(CheckpointError, match="another --link"):
        prepare_yarn(source, tmp_path / "long", link="hard")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_the_script(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "long")]
    assert script.main([str(source), *out, "--max-positions", "1k"]) == 0
    assert "1,024 positions, 16 x 64" in capsys.readouterr().out
    assert script.main([str(source), *out]) == 2
    assert "exists already" in capsys.readouterr().err
