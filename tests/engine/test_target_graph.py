"""The verify graph in onnxruntime against the embedded runtime, and compiled by TensorRT-RTX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engines
import numpy as np
import onnxruntime
import pytest
import tiny_families
import torch
from nvfp4_checkpoint import quantized_copy
from tiny_model import random_prompts, tiny_checkpoint

from tllm_wmtp.checkpoint.loader import load_model
from tllm_wmtp.engine.build import BuildOptions, build_engine
from tllm_wmtp.engine.target import TargetSpec, write_target_graph
from tllm_wmtp.engine.weights import open_model
from tllm_wmtp.errors import ConfigError
from tllm_wmtp.models.causal import CausalStates
from tllm_wmtp.sampling import SamplingParams

LANES, DEPTH, CAPACITY, CHUNK, LAYERS = 3, 4, 64, 16, 3


class Graph:
    """The verify graph with its caches."""

    def __init__(self, checkpoint: Path, folder: Path, quantized: bool = False):
        folder.mkdir()
        spec = TargetSpec(LANES, CAPACITY, DEPTH, CHUNK, quantized=quantized)
        written = write_target_graph(open_model(checkpoint, with_head=False), spec, folder)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(
            str(written.file), options, providers=["CPUExecutionProvider"]
        )
        self.caches = {
            name: np.zeros(tensor["shape"], np.float32)
            for name, tensor in written.inputs.items()
            if "_cache_" in name
        }
        self.outputs = ["hidden", "logits", "tokens", *(f"{name}_out" for name in self.caches)]

    def run(self, ids: Any, starts: list[int], logit_rows: Any) -> list[np.ndarray]:
        """``hidden, logits, tokens``."""
        feed = {
            "token_ids": np.asarray(ids, np.int64),
            "starts": np.asarray(starts, np.int64),
            "logit_rows": np.asarray(logit_rows, np.int64),
        }
        hidden, logits, tokens, *caches = self.session.run(self.outputs, feed | self.caches)
        self.caches = dict(zip(self.caches, caches, strict=True))
        return [hidden, logits, tokens]


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def checkpoint(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    changes = {"tie_word_embeddings": request.param}
    return tiny_families.tiny_checkpoint(tmp_path / "model", "mimo", seed=7, **changes)


@torch.inference_mode()
def whole(checkpoint: Path, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and logits of every row, with no cache at all."""
    target = load_model(checkpoint).target
    positions = torch.arange(len(tokens)).unsqueeze(0)
    hidden = target(torch.tensor([tokens]), positions, CausalStates(1))[0]
    return hidden, target.logits(hidden)


def test_chunks_and_verified_rows_with_rollback_equal_whole_forwards(
    checkpoint: Path, tmp_path: Path
) -> None:
    graph = Graph(checkpoint, tmp_path / "graph")
    random = np.random.default_rng(0)
    texts = random_prompts([9, 14, 5], 97, seed=1)
    committed = [0] * LANES
    padded = np.zeros((LANES, CHUNK), np.int64)
    for lane, text in enumerate(texts):
        padded[lane, : len(text)] = text
    graph.run(padded, committed, np.zeros((LANES, 1)))
    committed = [len(text) for text in texts]
    for _ in range(10):
        fresh = random.integers(0, 97, (LANES, DEPTH))
        rows = np.tile(np.arange(DEPTH), (LANES, 1))
        hidden, logits, tokens = graph.run(fresh, committed, rows)
        for lane in range(LANES):
            sequence = texts[lane][: committed[lane]] + fresh[lane].tolist()
            expected_hidden, expected = whole(checkpoint, sequence)
            np.testing.assert_allclose(hidden[lane], expected_hidden[-DEPTH:], atol=2e-5)
            np.testing.assert_allclose(logits[lane], expected[-DEPTH:], atol=2e-5)
            assert tokens[lane].tolist() == expected[-DEPTH:].argmax(-1).tolist()
            kept = int(random.integers(0, DEPTH + 1))
            texts[lane] = sequence[: committed[lane] + kept]
            committed[lane] += kept
    assert max(committed) > 20


def test_logits_are_those_of_the_rows_asked_for(checkpoint: Path, tmp_path: Path) -> None:
    graph = Graph(checkpoint, tmp_path / "graph")
    ids = np.array(random_prompts([CHUNK] * LANES, 97, seed=2))
    rows = np.array([[15, 0], [3, 3], [7, 8]])
    _, logits, _ = graph.run(ids, [0] * LANES, rows)
    for lane in range(LANES):
        expected = whole(checkpoint, ids[lane].tolist())[1][rows[lane]]
        np.testing.assert_allclose(logits[lane], expected, atol=2e-5)


def test_greedy_decoding_on_the_graph_is_the_runtimes(checkpoint: Path, tmp_path: Path) -> None:
    prompts = random_prompts([6, 11, 8], 97, seed=3)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    expected = engines.outputs(engines.run(engines.engine(checkpoint), prompts, params))
    graph = Graph(checkpoint, tmp_path / "graph")
    padded = np.zeros((LANES, CHUNK), np.int64)
    for lane, prompt in enumerate(prompts):
        padded[lane, : len(prompt)] = prompt
    lengths = [len(prompt) for prompt in prompts]
    last = np.array(lengths)[:, None] - 1
    found = [graph.run(padded, [0] * LANES, last)[2][:, 0]]
    for _ in range(19):
        found.append(graph.run(found[-1][:, None], lengths, np.zeros((LANES, 1)))[2][:, 0])
        lengths = [length + 1 for length in lengths]
    assert np.stack(found, 1).tolist() == expected


@pytest.mark.trt
def test_nvfp4_target_compiles_for_sm120(builder: None, checkpoint: Path, tmp_path: Path) -> None:
    model = quantized_copy(checkpoint, tmp_path / "nvfp4")
    options = BuildOptions(engine="target", lanes=2, depth=4, max_rows=32, max_seq_len=256)
    built = build_engine(model, tmp_path / "out", options, tmp_path / "cache")
    assert sorted(file.name for file in built.directory.iterdir() if file.suffix != ".data") == [
        "build.log", "config.json", "target.engine", "target.onnx",
    ]  # fmt: skip
    assert built.config["kind"] == "target"
    assert built.config["state"]["layers"] == LAYERS
    assert len(built.config["nvfp4_weights"]) == 7 * LAYERS
    log = (built.directory / "build.log").read_text()
    assert "ERROR" not in log
    assert "Inserting copy" not in log


@pytest.mark.trt
def test_target_of_another_family_is_refused(builder: None, tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model")
    options = BuildOptions(engine="target")
    with pytest.raises(ConfigError, match="dense decoders with full attention: mimo"):
        build_engine(model, tmp_path / "out", options, tmp_path / "cache")


@pytest.mark.trt
def test_longer_cache_than_the_model_is_refused(
    builder: None, checkpoint: Path, tmp_path: Path
) -> None:
    options = BuildOptions(engine="target", max_seq_len=5000)
    with pytest.raises(ConfigError, match="max_seq_len 5000: the model has 4096 positions"):
        build_engine(checkpoint, tmp_path / "out", options, tmp_path / "cache")
