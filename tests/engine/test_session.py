"""Engine sessions, as far as a machine without a GPU goes, and the plan of a captured step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lockstep
import pytest
import torch
from test_draft_graph import SPECULATION, demo_prompts

from tllm_wmtp.checkpoint.loader import load_model
from tllm_wmtp.demo import CHECKPOINT
from tllm_wmtp.engine import backends, plugin, session
from tllm_wmtp.engine.directory import SCHEMA
from tllm_wmtp.engine.proposer import CompiledProposer
from tllm_wmtp.engine.step_plan import AcceptedRows, plan_step, run_step
from tllm_wmtp.errors import ConfigError, RequestError
from tllm_wmtp.executor.draft import Drafts
from tllm_wmtp.executor.request import Request


def test_plan_pads_rows_and_knows_later_positions() -> None:
    plan = plan_step([AcceptedRows(3, 10, (7, 8)), AcceptedRows(0, 4, (9,))], depth=4)
    assert plan.count == 3
    assert plan.token_ids.tolist() == [7, 8, 9, 0, 0, 0, 0, 0]
    assert plan.positions.tolist() == [10, 11, 4, 0, 0, 0, 0, 0]
    assert plan.row_offsets.tolist() == [0, 2, 3]
    assert plan.starts.tolist() == [10, 4]
    assert plan.lanes.tolist() == [3, 0]
    assert plan.one_each.tolist() == [0, 1, 2]
    assert plan.later_positions.tolist() == [[12, 5], [13, 6]]


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([AcceptedRows(0, 0, ())], "0 accepted rows on lane 0: a step feeds 1 to 3"),
        ([AcceptedRows(2, 0, (1, 2, 3, 4))], "4 accepted rows on lane 2"),
        ([AcceptedRows(1, 0, (1,)), AcceptedRows(1, 5, (2,))], "each request owns a ring"),
    ],
)
def test_plan_refuses_what_a_step_cannot_feed(requests: list[AcceptedRows], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        plan_step(requests, depth=3)


class PlannedProposer(CompiledProposer):
    """Drafts by the plan of a captured step: padded, no host decision between forwards."""

    def propose(self, requests: Sequence[Request], draft_len: int, sampler: Any) -> Drafts:
        assert draft_len == self.depth - 1
        rows, hidden = [], []
        for request in requests:
            assert request.lane is not None
            assert request.draft_hidden is not None
            start = request.kv_length - len(request.draft_tokens)
            rows.append(AcceptedRows(request.lane.index, start, tuple(request.draft_tokens)))
            hidden.append(request.draft_hidden)
        plan = plan_step(rows, self.depth)
        return Drafts(run_step(plan, torch.cat(hidden), self.attend.forward))


def test_planned_steps_draft_the_same_tokens(tmp_path: Path) -> None:
    model = load_model(CHECKPOINT, with_head=True)
    graph = lockstep.graph_of(CHECKPOINT, tmp_path, SPECULATION, 4)
    record = lockstep.run(model, graph, SPECULATION, demo_prompts(4), 40, proposer=PlannedProposer)
    assert record.steps > 40
    assert record.differing == 0


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An engine directory whose engine no test gets to read."""
    library = tmp_path / "plugin.so"
    library.write_bytes(b"plugin")
    monkeypatch.setattr(session, "find_plugin", lambda: library)
    engine = tmp_path / "engine"
    engine.mkdir()
    (engine / "draft.engine").write_bytes(bytes(100))
    config = {
        "schema": SCHEMA,
        "kind": "draft",
        "engine": {"bytes": 100},
        "plugin": {"sha256": session.hash_file(library)},
        "options": {"target": "sm120"},
    }
    (engine / "config.json").write_text(json.dumps(config))
    return engine


@pytest.mark.skipif(backends.gpu_target() is not None, reason="there is a GPU")
def test_machine_without_a_gpu_is_told_so(directory: Path) -> None:
    with pytest.raises(ConfigError, match="no driver or no GPU; run it on a machine with sm120"):
        session.EngineSession(directory)


def test_other_gpu_is_named(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "gpu_target", lambda: "sm90")
    with pytest.raises(ConfigError, match="engine for sm120: the GPU at hand is sm90"):
        session.EngineSession(directory)


def test_truncated_engine_is_named(directory: Path) -> None:
    (directory / "draft.engine").write_bytes(bytes(99))
    with pytest.raises(ConfigError, match="draft.engine of 99 bytes: config.json says 100"):
        session.EngineSession(directory)


def test_other_plugin_is_named(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "plugin.so").write_bytes(b"another")
    with pytest.raises(ConfigError, match="the engine was built with another one"):
        session.EngineSession(directory)


def test_directory_without_engine_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="an engine directory holds a config.json of schema"):
        session.EngineSession(tmp_path)


def test_missing_plugin_says_how_to_build_it(
    monkeypatch: pytest.MonkeyPatch, directory: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(session, "find_plugin", plugin.find_plugin)
    monkeypatch.setattr(plugin, "__file__", str(tmp_path / "pkg/engine/plugin.py"))
    with pytest.raises(plugin.PluginMissing, match="cmake --build build/cuda"):
        session.EngineSession(directory)
