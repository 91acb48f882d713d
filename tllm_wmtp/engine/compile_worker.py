"""Compiles one ONNX graph with TensorRT or TensorRT-RTX; a program of its own.

A builder that dies takes nobody with it, and what plugin and builder write to standard error stays
apart. Reads a request as JSON from standard input, writes the answer as JSON to standard output:
``{"step": "done", "version": ..., "seconds": ..., "bytes": ...}``, or the step that failed with
``"errors"``. ``build.log`` holds every message of the builder.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from tllm_wmtp.engine.plugin import load_plugin


class Failed(Exception):
    """A step that did not work, with what the library said."""

    def __init__(self, step: str, errors: list[str]):
        super().__init__(step)
        self.step, self.errors = step, errors


def make_log(trt: Any, file: Path) -> Any:
    class Log(trt.ILogger):
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []
            self._file = file.open("w", encoding="utf-8")

        def log(self, severity: Any, message: str) -> None:
            name = severity.name
            if name in ("ERROR", "INTERNAL_ERROR"):
                self.errors.append(message)
            if name != "VERBOSE":
                self._file.write(f"[{name}] {message}\n")
                self._file.flush()

    return Log()


def feature(owner: Any, name: str) -> Any:
    """A member that only some versions have."""
    found = getattr(owner, name, None)
    if found is None:
        raise Failed("features", [f"this version has no {owner.__name__}.{name}"])
    return found


def network_flags(trt: Any) -> int:
    """Networks are strongly typed; releases that know no other kind have no flag for it."""
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def compile_graph(request: dict[str, Any]) -> dict[str, Any]:
    trt = importlib.import_module(request["module"])
    log = make_log(trt, Path(request["log"]))
    preview = feature(trt.PreviewFeature, "ALIASED_PLUGIN_IO_10_03")
    if request["plugin"] is not None:
        load_plugin(trt, Path(request["plugin"]))
    begin = time.monotonic()
    builder = trt.Builder(log)
    network = builder.create_network(network_flags(trt))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(request["onnx"]):
        errors = [parser.get_error(i).desc() for i in range(parser.num_errors)]
        raise Failed("parse", [*errors, *log.errors])
    config = builder.create_builder_config()
    config.set_preview_feature(preview, True)
    if request["target"] is not None:
        capability = feature(trt.ComputeCapability, request["target"].upper())
        config.num_compute_capabilities = 1
        config.set_compute_capability(capability, 0)
    profile = builder.create_optimization_profile()
    for name, shapes in request["profiles"].items():
        profile.set_shape(name, *shapes)
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise Failed("build", log.errors)
    size = Path(request["engine"]).write_bytes(memoryview(engine))
    seconds = time.monotonic() - begin
    return {"step": "done", "version": trt.__version__, "seconds": seconds, "bytes": size}


def main() -> int:
    try:
        answer = compile_graph(json.load(sys.stdin))
    except Failed as failed:
        answer = {"step": failed.step, "errors": failed.errors}
    json.dump(answer, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
