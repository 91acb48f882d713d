"""A compiled draft in the executor's loop: its graph runs in onnxruntime, the rest is as served."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Oracle
from test_draft_loop import compare_all_steps, requests
from vendor_stub import common

from tllm_wmtp.engine.draft import DraftSpec, write_draft_graph
from tllm_wmtp.engine.reference import OnnxDraft
from tllm_wmtp.engine.weights import open_model
from tllm_wmtp.errors import ConfigError
from tllm_wmtp.ring import RingSpec
from tllm_wmtp.trtllm import engine_head, register, settings, worker

WINDOW, SINK, DRAFT_LEN, MAX_ROWS = 16, 4, 3, 20


@pytest.fixture(scope="module")
def graph(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    spec = DraftSpec(
        ring=RingSpec.for_chain(SINK, WINDOW, DRAFT_LEN + 1),
        lanes=8,
        max_rows=MAX_ROWS,
        lowering="standard",
        dtype="float32",
    )
    folder = tmp_path_factory.mktemp("graph")
    source = open_model(checkpoints["Qwen3NextForCausalLM"])
    file = write_draft_graph(source, spec, folder).file
    return lambda: OnnxDraft(file, spec)


@pytest.mark.parametrize("mrope", [False, True])
def test_drafts_of_an_engine_are_the_embedded_runtimes(
    vendor: Any, configure: Any, graph: Any, monkeypatch: pytest.MonkeyPatch, mrope: bool
) -> None:
    """Prompts longer than a forward takes, and first forwards with rejected rows among them."""
    opened: list[OnnxDraft] = []

    def open_engine(chosen: settings.Settings, draft_len: int) -> OnnxDraft:
        opened.append(graph())
        engine_head.check_ring(opened[-1].ring, chosen, draft_len)
        return opened[-1]

    monkeypatch.setattr(worker, "open_engine", open_engine)
    configure(mode="engine", engine="/engine", window=WINDOW, n_sink=SINK)
    register()
    executor = vendor.executor(
        vendor.model(max_draft_len=DRAFT_LEN), chunk=vendor.chunk, mrope=mrope
    )
    luck = random.Random(7)
    executor.hits = lambda one: luck.randrange(DRAFT_LEN + 1)
    oracle = Oracle(executor, WINDOW, SINK, lanes=8)
    with torch.inference_mode():
        compared = compare_all_steps(executor, oracle, requests([50, 3, 21, 1, 33], 12))
    assert compared > 25
    assert len(opened) == 1


def test_an_engine_for_another_ring_is_refused(graph: Any) -> None:
    chosen = settings.Settings("engine", WINDOW + 1, SINK, "/engine")
    with pytest.raises(ConfigError, match=r"an engine for RingSpec.*window=16"):
        engine_head.check_ring(graph().ring, chosen, DRAFT_LEN)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"window": WINDOW + 1}, "an engine for RingSpec"),
        ({"depth": DRAFT_LEN + 2}, "an engine for RingSpec"),
        ({"top_k": 8}, "of 8 candidates: the executor takes its drafts from all logits"),
        ({}, "opened"),
    ],
)
def test_an_engine_is_held_to_the_settings_before_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], words: str
) -> None:
    from tllm_wmtp.engine import directory, session

    def open_session(folder: Path) -> None:
        raise ConfigError(str(folder), "opened", "-")

    options = {"window": WINDOW, "n_sink": SINK, "depth": DRAFT_LEN + 1, "top_k": 0}
    monkeypatch.setattr(directory, "read_config", lambda _: {"options": options | changes})
    monkeypatch.setattr(session, "EngineSession", open_session)
    with pytest.raises(ConfigError, match=words):
        engine_head.open_engine(settings.Settings("engine", WINDOW, SINK, "/engine"), DRAFT_LEN)


def test_graphs_around_an_engine_are_refused(
    vendor: Any, configure: Any, graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "open_engine", lambda *_: graph())
    configure(mode="engine", engine="/engine", window=WINDOW, n_sink=SINK)
    register()
    model = vendor.model(max_draft_len=DRAFT_LEN)
    with pytest.raises(ConfigError, match="set cuda_graph_config to null"):
        vendor.executor(model, cuda_graph_config=common.CudaGraphConfig())
    vendor.executor(model, cuda_graph_config=None)


def test_an_engine_needs_one_gpu_and_rings_enough(vendor: Any, graph: Any) -> None:
    model = vendor.model(max_draft_len=DRAFT_LEN)
    layer = model.draft_model.mtp_layers[0]
    with pytest.raises(ConfigError, match="tensor_parallel_size 2"):
        engine_head.EngineHead(layer, model.spec_worker, graph(), tp_size=2)
    head = engine_head.EngineHead(layer, model.spec_worker, graph(), tp_size=1)
    with pytest.raises(ConfigError, match="rings for 8 requests"):
        head.start(9)


def test_logits_of_other_rows_are_an_error_of_ours(vendor: Any, graph: Any) -> None:
    model = vendor.model(max_draft_len=DRAFT_LEN)
    layer = model.draft_model.mtp_layers[0]
    engine_head.EngineHead(layer, model.spec_worker, graph(), tp_size=1)
    with pytest.raises(RuntimeError, match="other rows"):
        layer.shared_head(torch.zeros(2, 64), None, None, True)


def test_the_engine_directory_must_exist(vendor: Any, configure: Any) -> None:
    configure(mode="engine", engine="/nowhere", window=WINDOW, n_sink=SINK)
    register()
    with pytest.raises(ConfigError, match="/nowhere"):
        vendor.model()
