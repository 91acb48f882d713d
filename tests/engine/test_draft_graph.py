"""Draft graphs in onnxruntime against the embedded runtime's own head."""

from __future__ import annotations

from pathlib import Path

import engines
import lockstep
import numpy as np
import onnxruntime
import pytest
import torch
from tiny_model import random_prompts, tiny_checkpoint

from tllm_wmtp.checkpoint.loader import load_model
from tllm_wmtp.config import ConfigError, EngineConfig, MtpConfig
from tllm_wmtp.demo import CHECKPOINT, language
from tllm_wmtp.engine.draft import PLUGIN, DraftSpec, write_draft_graph
from tllm_wmtp.engine.proposer import CompiledProposer
from tllm_wmtp.engine.reference import OnnxDraft
from tllm_wmtp.engine.weights import open_model
from tllm_wmtp.executor.engine import Engine
from tllm_wmtp.ring import RingSpec
from tllm_wmtp.sampling import SamplingParams

SPECULATION = MtpConfig(depth=5, window=48, n_sink=4)


def demo_prompts(count: int, tokens: int = 150) -> list[list[int]]:
    kinds = language.KINDS
    return [
        language.prompt(kinds[i % len(kinds)], tokens + 13 * i, seed=i).ids for i in range(count)
    ]


def demo_in_lockstep(folder: Path, requests: int, tokens: int) -> lockstep.Record:
    model = load_model(CHECKPOINT, with_head=True)
    graph = lockstep.graph_of(CHECKPOINT, folder, SPECULATION, requests)
    return lockstep.run(model, graph, SPECULATION, demo_prompts(requests), tokens)


def test_demo_graph_drafts_the_same_tokens_in_every_step(tmp_path: Path) -> None:
    """Steps that accept none, some and all drafts, over many wraps of the ring."""
    record = demo_in_lockstep(tmp_path, requests=8, tokens=100)
    assert record.steps > 200
    assert min(record.histogram) > 0
    assert record.differing == 0


@pytest.mark.slow
def test_demo_graph_drafts_the_same_tokens_over_thousands_of_steps(tmp_path: Path) -> None:
    record = demo_in_lockstep(tmp_path, requests=8, tokens=1200)
    print(f"{record.steps} steps, accepted {record.histogram}")
    assert record.steps >= 2000
    assert record.differing == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"moe": False, "tied": False},
        {"moe": True, "tied": True},
        {"moe": True, "num_experts": 20, "num_experts_per_tok": 3},
        {"moe": False, "attention_bias": True},
    ],
    ids=["dense", "experts", "many experts", "biases"],
)
def test_random_heads_draft_the_same_tokens(tmp_path: Path, changes: dict[str, object]) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model", seed=3, **changes)
    speculation = MtpConfig(depth=4, window=12, n_sink=3)
    model = load_model(checkpoint, with_head=True)
    graph = lockstep.graph_of(checkpoint, tmp_path / "graph", speculation, 3)
    record = lockstep.run(model, graph, speculation, random_prompts([5, 23, 40], 97), 20)
    assert record.steps > 30
    assert record.differing == 0


def test_graph_as_the_only_draft_changes_no_output(tmp_path: Path) -> None:
    model = load_model(CHECKPOINT, with_head=True)
    prompts = demo_prompts(2, 60)
    graph = lockstep.graph_of(CHECKPOINT, tmp_path, SPECULATION, 2)
    proposer = CompiledProposer(model.target, graph, SPECULATION, 2, torch.device("cpu"))
    limits = EngineConfig(speculation=SPECULATION, max_batch_size=2, max_seq_len=512)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    drafted = engines.run(Engine(model, limits, proposer), prompts, params)
    dense = engines.run(engines.engine(CHECKPOINT), prompts, params)
    assert engines.outputs(drafted) == engines.outputs(dense)
    steps = sum(sum(request.metrics.accepted_histogram) for request in drafted)
    assert steps < 0.6 * 80  # the drafts were of use


def test_bfloat16_network_drafts_nearly_the_same_tokens(tmp_path: Path) -> None:
    """Every operation rounded to bfloat16, against the runtime in bfloat16: near-ties of 640
    logits with 8 bits of mantissa fall differently in a few steps of a hundred."""
    model = load_model(CHECKPOINT, dtype=torch.bfloat16, with_head=True)
    graph = lockstep.graph_of(CHECKPOINT, tmp_path, SPECULATION, 4, rounding="bfloat16")
    record = lockstep.run(model, graph, SPECULATION, demo_prompts(4), 60, dtype="bfloat16")
    assert record.differing <= 0.1 * record.steps


def test_graph_of_another_ring_is_refused(tmp_path: Path) -> None:
    model = load_model(CHECKPOINT, with_head=True)
    graph = lockstep.graph_of(CHECKPOINT, tmp_path, SPECULATION, 2)
    for speculation, lanes in (
        (MtpConfig(depth=5, window=49, n_sink=4), 2),
        (MtpConfig(depth=5, window=48, n_sink=4, tree_width=2), 2),
        (SPECULATION, 3),
    ):
        with pytest.raises(ConfigError, match="build an engine for it"):
            CompiledProposer(model.target, graph, speculation, lanes, torch.device("cpu"))


def test_plugin_graph_is_no_reference(tmp_path: Path) -> None:
    spec = DraftSpec(RingSpec.for_chain(4, 48, 5), 2, 16, lowering=PLUGIN)
    written = write_draft_graph(open_model(CHECKPOINT), spec, tmp_path)
    with pytest.raises(ConfigError, match="onnxruntime has no plugin"):
        OnnxDraft(written.file, spec)


def test_shared_prefix_brings_the_graphs_rings_along(tmp_path: Path) -> None:
    """One prompt twice, one after the other: what the first left is pasted for the second."""
    model = load_model(CHECKPOINT, with_head=True)
    graph = lockstep.graph_of(CHECKPOINT, tmp_path, SPECULATION, 1)
    prompts = demo_prompts(1, 130) * 2
    record = lockstep.run(model, graph, SPECULATION, prompts, 20, lanes=1)
    assert record.prefix_hit_tokens > 60
    assert record.outputs[0] == record.outputs[1]
    assert record.differing == 0


def test_candidates_are_the_likeliest_of_all_logits(tmp_path: Path) -> None:
    source = open_model(CHECKPOINT)
    feed = {
        "token_ids": np.arange(6), "hidden": np.ones((6, 128), np.float32),
        "positions": np.array([0, 1, 2, 0, 1, 2]), "row_offsets": np.array([0, 3, 6], np.int32),
        "query_offsets": np.array([0, 1, 2], np.int32), "start_positions": np.array([0, 0]),
        "lanes": np.array([1, 0], np.int32),
    }  # fmt: skip
    found = {}
    for top_k in (0, 5):
        folder = tmp_path / str(top_k)
        folder.mkdir()
        spec = DraftSpec(RingSpec.for_chain(4, 48, 5), 2, 16, top_k=top_k)
        written = write_draft_graph(source, spec, folder)
        ring = np.zeros(written.inputs["ring_k"]["shape"], np.float32)
        session = onnxruntime.InferenceSession(str(written.file))
        names = list(written.outputs)
        results = session.run(names, {**feed, "ring_k": ring, "ring_v": ring})
        found[top_k] = dict(zip(names, results, strict=True))
    logits = found[0]["logits"]
    order = np.argsort(-logits, axis=1)[:, :5]
    assert found[5]["top_k_ids"].tolist() == order.tolist()
    expected = np.take_along_axis(logits, order, 1)
    np.testing.assert_allclose(found[5]["top_k_logits"], expected, rtol=1e-6)
    assert found[5]["draft_tokens"].tolist() == order[:, 0].tolist()
