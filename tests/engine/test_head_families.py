"""Draft graphs of every family's head, in onnxruntime, against the embedded runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lockstep
import pytest
import tiny_families
import tiny_nemotron
from tiny_model import random_prompts

from tllm_wmtp.checkpoint.loader import load_model
from tllm_wmtp.config import MtpConfig

SPECULATION = MtpConfig(depth=4, window=12, n_sink=3)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mimo": ("mimo", {}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe without groups": ("glm4_moe", {"n_group": 1, "topk_group": 1, "use_qk_norm": False}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3 with YaRN, whole queries": (
        "deepseek_v3",
        {"q_lora_rank": None, "norm_topk_prob": False, **tiny_families.YARN},
    ),
    "nemotron_h": ("nemotron_h", {}),
    "nemotron_h with latent experts": ("nemotron_h", {"moe_latent_size": 32}),
    "nemotron_h with a dense MLP": ("nemotron_h", {"mtp_hybrid_override_pattern": "*-"}),
}


@pytest.mark.parametrize("case", CASES)
def test_heads_draft_the_same_tokens(tmp_path: Path, case: str) -> None:
    family, changes = CASES[case]
    if family == "nemotron_h":
        checkpoint = tiny_nemotron.tiny_checkpoint(tmp_path / "model", seed=5, **changes)
    else:
        checkpoint = tiny_families.tiny_checkpoint(tmp_path / "model", family, seed=5, **changes)
    model = load_model(checkpoint, with_head=True)
    graph = lockstep.graph_of(checkpoint, tmp_path / "graph", SPECULATION, 2)
    record = lockstep.run(model, graph, SPECULATION, random_prompts([7, 33], 97), 16)
    assert record.steps >= 20
    assert record.differing == 0
