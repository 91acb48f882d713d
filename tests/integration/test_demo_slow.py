"""What takes minutes: the demonstration at its real length, and the training script end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tllm_wmtp.checkpoint.loader import load_model
from tllm_wmtp.demo import CHECKPOINT, CHECKPOINT_MAMBA2

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


def test_three_arms_agree_at_64k_and_the_windowed_draft_is_accepted() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tllm_wmtp.cli", "demo", "--context", "64k", "--json"],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    shown = json.loads(result.stdout)
    assert shown["lossless"] is True
    assert shown["arms"]["windowed"]["al"] >= 4.0
    assert shown["arms"]["windowed"]["al"] >= 0.85 * shown["arms"]["native"]["al"]
    assert shown["arms"]["windowed"]["draft_kv_bytes"] < shown["arms"]["native"]["draft_kv_bytes"]


@pytest.mark.parametrize(
    ("family", "like"), [("qwen3_5", CHECKPOINT), ("nemotron_h", CHECKPOINT_MAMBA2)]
)
def test_the_training_script_learns_and_writes_a_loadable_checkpoint(
    tmp_path: Path, family: str, like: Path
) -> None:
    script = ROOT / "build_scripts/train_demo_checkpoint.py"
    result = subprocess.run(
        [
            *(sys.executable, str(script), "--out", str(tmp_path)),
            *("--family", family, "--scale", "0.02"),
        ],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    curve = json.loads((tmp_path / "training.json").read_text())["curve"]
    assert curve[-1]["loss"] < curve[0]["loss"] - 0.5
    trained = load_model(tmp_path, with_head=True)
    shipped = load_model(like, with_head=True)
    assert trained.config == shipped.config
    assert trained.head is not None
