"""The script that compares quantized copies with the original."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import toolchain
from tiny_model import tiny_checkpoint

from tllm_wmtp.checkpoint.quantize import quantize_checkpoint
from tllm_wmtp.checkpoint.recipe import Recipe
from tllm_wmtp.demo.tokenizer import build_tokenizer


def test_a_copy_is_compared_with_the_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = toolchain.script("build_scripts/compare_checkpoints.py")
    original = tiny_checkpoint(tmp_path / "original", vocab_size=640)
    build_tokenizer().save(str(original / "tokenizer.json"))
    quantize_checkpoint(original, tmp_path / "copy", Recipe(), None)
    monkeypatch.setattr(script, "CHECKPOINT", original)
    options = ["--contexts", "128", "--kinds", "logs", "--prompts", "2", "--max-tokens", "12"]
    out = tmp_path / "rows.json"
    script.main([str(tmp_path / "copy"), *options, "--window", "32", "--out", str(out)])
    first, second = json.loads(out.read_text())
    assert (first["checkpoint"], second["checkpoint"]) == ("demo", "copy")
    assert first["agreement"] == 1
    assert 0.2 < second["agreement"] <= 1
    assert all(1 <= row[arm][0] <= 7 for row in (first, second) for arm in ("native", "windowed"))
    assert "| copy | logs | 128 |" in capsys.readouterr().out
