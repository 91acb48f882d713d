"""Speculation never changes the output of a Nemotron-H model either."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import engine, outputs, run
from tiny_model import random_prompts
from tiny_nemotron import tiny_checkpoint

from tllm_wmtp.checkpoint.loader import load_model
from tllm_wmtp.config import MtpConfig
from tllm_wmtp.models.causal import CausalStates
from tllm_wmtp.sampling import SamplingParams

VOCAB = 5  # so few that random drafts are often right
PROMPTS = random_prompts([1, 2, 5, 17, 21, 33, 50, 64, 65, 90], VOCAB)
PARAMS = SamplingParams(max_tokens=32)


@pytest.fixture(scope="module", params=[("MEM*E", 11), ("*M-M", 15)], ids=lambda p: p[0])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nemotron")
    pattern, seed = request.param
    return tiny_checkpoint(folder, seed=seed, pattern=pattern, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def dense_outputs(checkpoint: Path) -> list[list[int]]:
    return outputs(run(engine(checkpoint), PROMPTS, PARAMS))


@torch.inference_mode()
def test_dense_equals_whole_sequence_forwards(
    checkpoint: Path, dense_outputs: list[list[int]]
) -> None:
    target = load_model(checkpoint).target
    for index in (0, 4, 9):
        tokens = list(PROMPTS[index])
        for _ in range(PARAMS.max_tokens):
            positions = torch.arange(len(tokens)).unsqueeze(0)
            hidden = target(torch.tensor([tokens]), positions, CausalStates(4))
            tokens.append(int(target.logits(hidden[0, -1]).argmax()))
        assert dense_outputs[index] == tokens[len(PROMPTS[index]) :]


@pytest.mark.parametrize(
    "speculation",
    [
        MtpConfig(depth=7, window=1, n_sink=0),
        MtpConfig(depth=7, window=16, n_sink=4),
        MtpConfig(depth=2, window=3, n_sink=1),
        MtpConfig.native(depth=7),
        MtpConfig(depth=4, window=16, n_sink=4, tree_width=3),
    ],
    ids=lambda s: f"{s.arm}-d{s.depth}-w{s.window}-s{s.n_sink}-k{s.tree_width}",
)
def test_speculation_equals_dense(
    checkpoint: Path, dense_outputs: list[list[int]], speculation: MtpConfig
) -> None:
    requests = run(engine(checkpoint, speculation), PROMPTS, PARAMS)
    assert outputs(requests) == dense_outputs
    accepted = sum(n * h for r in requests for n, h in enumerate(r.metrics.accepted_histogram))
    assert accepted > 20  # or this test would say nothing about acceptance


def test_rows_after_the_last_attention_layer_are_computed_only_if_read(tmp_path: Path) -> None:
    """An ending "*E": the attention layer's queries and the MoE after it leave unread rows out."""
    folder = tiny_checkpoint(tmp_path, seed=11, pattern="MEM*E", vocab_size=VOCAB)
    speculation = MtpConfig(depth=4, window=8, n_sink=2)
    results = []
    for pruning in (True, False):
        machine = engine(folder, speculation, prefill_pruning=pruning)
        results.append(run(machine, PROMPTS, PARAMS))
    pruned, whole = results
    assert outputs(pruned) == outputs(whole)
    for request in pruned:
        ring = 2 + 8 + 4  # sinks, window, spare; and the last row, which the first token needs
        assert request.metrics.prefill_last_layer_rows <= ring + 1
    assert whole[-1].metrics.prefill_last_layer_rows == 90
