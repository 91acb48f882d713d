"""A real builder compiles a graph with the plugin node for SM120, ahead of time, on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from trt_libraries import rtx_environment

pytestmark = pytest.mark.trt

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 128
N_SINK, WINDOW, CAPACITY, LANES = 32, 4064, 4104, 16
FIELDS: dict[str, Any] = {
    "n_sink": N_SINK,
    "window": WINDOW,
    "capacity": CAPACITY,
    "num_q_heads": HEADS,
    "num_kv_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "scale": 0.08,
}


@dataclass(frozen=True)
class Built:
    step: str
    bytes: int
    stores: list[str]
    messages: list[tuple[str, str]]
    calls: Counter[str]
    plugin_errors: str

    def errors(self) -> str:
        return "\n".join(text for severity, text in self.messages if severity.endswith("ERROR"))

    def all_text(self) -> str:
        return "\n".join(text for _, text in self.messages)

    def scratch_bytes(self) -> int:
        found = re.search(r"Max Scratch Memory: (\d+) bytes", self.all_text())
        assert found is not None
        return int(found[1])


def tensor(name: str, dtype: str, *sizes: Any) -> dict[str, Any]:
    """A size given as (name, min, opt, max) is dynamic."""
    shape = [size if isinstance(size, int) else size[0] for size in sizes]
    made: dict[str, Any] = {"name": name, "type": dtype, "shape": shape}
    if any(not isinstance(size, int) for size in sizes):
        made["profile"] = [
            [size if isinstance(size, int) else size[i] for size in sizes] for i in (1, 2, 3)
        ]
    return made


def inputs(rows: str, ring: str, tree: bool = False, dynamic: bool = True) -> list[dict[str, Any]]:
    m: Any = ("m", 1, 4, 64) if dynamic else 4
    n: Any = ("n", 1, 8, 512) if dynamic else 8
    b: Any = ("b", 1, 4, 16) if dynamic else 4
    b1: Any = ("b1", 2, 5, 17) if dynamic else 5
    made = [
        tensor("q", rows, m, HEADS, HEAD_DIM),
        tensor("k", rows, n, KV_HEADS, HEAD_DIM),
        tensor("v", rows, n, KV_HEADS, HEAD_DIM),
        tensor("row_offsets", "int32", b1),
        tensor("query_offsets", "int32", b1),
        tensor("start_positions", "int64", b),
        tensor("lanes", "int32", b),
        tensor("ring_k", ring, LANES, CAPACITY, KV_HEADS, HEAD_DIM),
        tensor("ring_v", ring, LANES, CAPACITY, KV_HEADS, HEAD_DIM),
    ]
    if tree:
        made.append(tensor("ancestor_mask", "int32", m, 1))
    return made


def build(
    folder: Path,
    tensors: list[dict[str, Any]],
    plugin: str = "libwmtp_tensorrt.so",
    aliased_io: bool = True,
    steps: int = 1,
    chained: bool = True,
    **fields: Any,
) -> Built:
    if importlib.util.find_spec("onnx") is None:
        pytest.fail("no onnx: the graphs are made with it; install the package's test extra")
    given = {name: value for name, value in {**FIELDS, **fields}.items() if value is not None}
    request = {
        "plugin": str(folder / "lib" / plugin),
        "inputs": tensors,
        "attributes": given,
        "aliased_io": aliased_io,
        "steps": steps,
        "chained": chained,
        "look_for": ["WindowedDraftAttention", "workspace_bytes"],
    }
    environment = {**os.environ, "WMTP_PLUGIN_TRACE": "1"}
    for name, value in rtx_environment().items():
        environment[name] = os.pathsep.join(filter(None, [value, environment.get(name)]))
    result = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "rtx_build.py")],
        input=json.dumps(request),
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    answer = json.loads(result.stdout)
    traced = [line.split("trace ")[1] for line in result.stderr.splitlines() if " trace " in line]
    said = [line for line in result.stderr.splitlines() if " trace " not in line]
    messages = [(severity, text) for severity, text in answer["messages"]]
    return Built(
        answer["step"],
        answer.get("bytes", 0),
        answer.get("stores", []),
        messages,
        Counter(traced),
        "\n".join(said),
    )


@pytest.mark.parametrize(
    ("rows", "ring", "fields"),
    [
        ("bfloat16", "bfloat16", {}),
        ("float16", "float16", {"kv_dtype": "float16"}),
        ("float32", "float32", {}),
        ("bfloat16", "fp8", {"kv_dtype": "fp8", "k_scale": 0.5, "v_scale": 0.25}),
    ],
    ids=["bf16", "fp16", "fp32", "bf16-fp8"],
)
def test_graph_builds_with_dynamic_shapes(
    plugin_build: Path, rows: str, ring: str, fields: dict[str, Any]
) -> None:
    built = build(plugin_build, inputs(rows, ring), **fields)
    assert built.step == "done", built.errors() + built.plugin_errors
    assert built.plugin_errors == ""
    assert built.stores == ["WindowedDraftAttention", "workspace_bytes"]
    assert "Inserting copy" not in built.all_text()


def test_graph_builds_with_static_shapes(plugin_build: Path) -> None:
    built = build(plugin_build, inputs("bfloat16", "bfloat16", dynamic=False))
    assert built.step == "done", built.errors() + built.plugin_errors


def test_graph_builds_with_ancestor_mask(plugin_build: Path) -> None:
    built = build(plugin_build, inputs("bfloat16", "bfloat16", tree=True))
    assert built.step == "done", built.errors() + built.plugin_errors


def test_three_steps_share_one_ring_without_a_copy(plugin_build: Path) -> None:
    built = build(plugin_build, inputs("bfloat16", "bfloat16"), steps=3)
    assert built.step == "done", built.errors() + built.plugin_errors
    assert built.calls["createPlugin"] == 3
    assert "Inserting copy" not in built.all_text()


def test_ring_that_is_updated_twice_from_one_state_would_be_copied(plugin_build: Path) -> None:
    """The builder does say so, hence its silence above means something."""
    built = build(plugin_build, inputs("bfloat16", "bfloat16"), steps=2, chained=False)
    assert "Inserting copy" in built.all_text()


def test_builder_asks_everything_it_should(plugin_build: Path) -> None:
    calls = build(plugin_build, inputs("bfloat16", "bfloat16")).calls
    assert calls["createPlugin"] == 1
    assert calls["getAliasedInput"] >= 3  # once for each output
    for method in (
        "getOutputShapes",
        "getOutputDataTypes",
        "supportsFormatCombination",
        "configurePlugin",
        "getValidTactics",
        "getWorkspaceSize",
        "attachToContext",
        "getFieldsToSerialize",
    ):
        assert calls[method] >= 1, method
    assert calls["enqueue"] == 0


def test_scratch_memory_is_the_plans(plugin_build: Path) -> None:
    """Partial results of fp32: one row of head_dim + 2 numbers for each split, query and head.

    192 multiprocessors with 3 resident blocks of this head size each are the most that run at
    once; a block has 16 rows of queries and query heads, so that many rows are in flight. The
    reservation holds all of them and no more than twice as many.
    """
    row = (HEAD_DIM + 2) * 4
    in_flight = 192 * 3 * 16
    scratch = build(plugin_build, inputs("bfloat16", "bfloat16")).scratch_bytes()
    assert scratch % row == 0
    assert in_flight // 2 <= scratch // row <= 2 * in_flight


@pytest.mark.parametrize(("rows", "ring"), [("int32", "int32"), ("float16", "bfloat16")])
def test_unsupported_types_are_named(plugin_build: Path, rows: str, ring: str) -> None:
    built = build(plugin_build, inputs(rows, ring))
    assert built.step == "build"
    assert "could not find any supported formats" in built.errors()


def test_missing_preview_flag_is_named(plugin_build: Path) -> None:
    built = build(plugin_build, inputs("bfloat16", "bfloat16"), aliased_io=False)
    assert built.step == "build"
    assert "kALIASED_PLUGIN_IO_10_03 not enabled" in built.errors()


def test_wrong_alias_is_named(plugin_build: Path) -> None:
    tensors = inputs("bfloat16", "fp8")
    built = build(plugin_build, tensors, "libwmtp_tensorrt_misaliased.so", kv_dtype="fp8")
    assert built.step == "build"
    assert re.search("alias", built.errors(), re.IGNORECASE)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": 0}, "window 0 < 1: a query sees at least its own key; raise window"),
        ({"capacity": 100}, "capacity 100 < n_sink 32 + window 4064"),
        ({"kv_dtype": "int8"}, "kv_dtype 'int8': must be auto"),
        ({"window": None}, "field window is missing"),
    ],
)
def test_bad_fields_stop_the_parser(
    plugin_build: Path, fields: dict[str, Any], message: str
) -> None:
    built = build(plugin_build, inputs("bfloat16", "bfloat16"), **fields)
    assert built.step == "parse"
    assert message in built.plugin_errors


def test_ring_of_another_capacity_is_refused(plugin_build: Path) -> None:
    built = build(plugin_build, inputs("bfloat16", "bfloat16"), capacity=CAPACITY - 1)
    assert built.step == "build"
    assert "dimension 1 must be capacity = 4103" in built.plugin_errors
