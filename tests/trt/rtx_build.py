"""Builds one ONNX graph with TensorRT-RTX and prints what happened as JSON.

A process of its own for each build: a builder that dies takes no test run with it, and what the
plugin writes to standard error stays apart. Reads a `Build` as JSON from standard input.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import tensorrt_rtx as trt
from onnx import TensorProto, helper

TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "fp8": TensorProto.FLOAT8E4M3FN,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "bool": TensorProto.BOOL,
}


class Log(trt.ILogger):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[list[str]] = []

    def log(self, severity: Any, message: str) -> None:
        self.lines.append([severity.name, message])


def graph(
    inputs: list[dict[str, Any]], attributes: dict[str, Any], steps: int, chained: bool
) -> bytes:
    """``steps`` plugin nodes, each with the last one's output, after a layer of the builder's own,
    as q. ``chained`` nodes also take its rings; others all take the graph's."""
    tensors = [
        helper.make_tensor_value_info(one["name"], TYPES[one["type"]], one["shape"])
        for one in inputs
    ]
    outputs = {"out": 0, "ring_k_out": 7, "ring_v_out": 8}
    results = [
        helper.make_tensor_value_info(name, TYPES[inputs[source]["type"]], inputs[source]["shape"])
        for name, source in outputs.items()
    ]
    nodes = []
    taken = [one["name"] for one in inputs]
    for step in range(steps):
        last = step == steps - 1
        made = list(outputs) if last else [f"{name}_{step}" for name in outputs]
        nodes.append(
            helper.make_node(
                "WindowedDraftAttention",
                taken,
                made,
                domain="wmtp",
                plugin_version="1",
                plugin_namespace="wmtp",
                **attributes,
            )
        )
        if not last:
            nodes.append(helper.make_node("Relu", [made[0]], [f"q_{step + 1}"]))
            rings = made[1:] if chained else taken[7:9]
            taken = [f"q_{step + 1}", *taken[1:7], *rings, *taken[9:]]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("wmtp", 1)]
    draft = helper.make_graph(nodes, "draft", tensors, results)
    return bytes(helper.make_model(draft, opset_imports=opsets).SerializeToString())


def build(request: dict[str, Any]) -> dict[str, Any]:
    log = Log()
    registry = trt.get_plugin_registry()
    if registry.load_library(request["plugin"]) is None:
        return {"step": "load", "messages": log.lines}
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    model = graph(request["inputs"], request["attributes"], request["steps"], request["chained"])
    if not parser.parse(model):
        errors = [["ERROR", parser.get_error(i).desc()] for i in range(parser.num_errors)]
        return {"step": "parse", "messages": log.lines + errors}
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM120, 0)
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, request["aliased_io"])
    profile = builder.create_optimization_profile()
    for one in request["inputs"]:
        if "profile" in one:
            profile.set_shape(one["name"], *one["profile"])
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        return {"step": "build", "messages": log.lines}
    stored = bytes(engine)
    return {
        "step": "done",
        "bytes": len(stored),
        "stores": [name for name in request.get("look_for", []) if name.encode() in stored],
        "messages": log.lines,
    }


if __name__ == "__main__":
    json.dump(build(json.load(sys.stdin)), sys.stdout)
