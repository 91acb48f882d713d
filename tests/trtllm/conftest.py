"""The stand-in for TensorRT-LLM on the import path, and tiny checkpoints that it serves."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_model
import tiny_nemotron
from vendor_stub import common
from vendor_stub.package import LAYOUTS, write_package

from tllm_wmtp.trtllm import models, settings


def forget() -> None:
    """Removes the stand-in and all that the plug-in keeps of it."""
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]
    sys.modules.pop("tllm_wmtp.trtllm.plugin", None)
    for name in [n for n in sys.modules if n in ("vendor_stub.early", "vendor_stub.late")]:
        del sys.modules[name]
    models._published.clear()
    settings.current.cache_clear()


@pytest.fixture(scope="session")
def stub_roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_package(tmp_path_factory.mktemp(name), name) for name in LAYOUTS}


@pytest.fixture(params=LAYOUTS)
def layout(
    request: pytest.FixtureRequest, stub_roots: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A ``tensorrt_llm`` that can be imported, in each layout."""
    forget()
    monkeypatch.syspath_prepend(stub_roots[request.param])
    yield request.param
    forget()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Per architecture, a checkpoint whose config.json names it."""
    qwen = tiny_model.tiny_checkpoint(tmp_path_factory.mktemp("qwen"), seed=3)
    nemotron = tiny_nemotron.tiny_checkpoint(tmp_path_factory.mktemp("nemotron"), seed=3)
    found = {}
    for name, folder in (
        ("Qwen3NextForCausalLM", qwen),
        ("Qwen3_5MoeForConditionalGeneration", qwen),
        ("NemotronHForCausalLM", nemotron),
        ("Glm4MoeForCausalLM", qwen),
        ("DeepseekV3ForCausalLM", qwen),
    ):
        copy = tmp_path_factory.mktemp(name)
        for file in folder.iterdir():
            (copy / file.name).symlink_to(file)
        config = json.loads((folder / "config.json").read_text()) | {"architectures": [name]}
        (copy / "config.json").unlink()
        (copy / "config.json").write_text(json.dumps(config))
        found[name] = copy
    return found


class Vendor:
    """Builds models and executors of the installed stand-in."""

    def __init__(self, layout: str, checkpoints: dict[str, Path]):
        self.layout, self.checkpoints = layout, checkpoints

    def model(self, architecture: str = "Qwen3NextForCausalLM", **spec: Any) -> Any:
        config = common.MTPDecodingConfig(**spec)
        path = self.checkpoints[architecture]
        return common.model_class(architecture)(common.model_config(path, config))

    def restart(self) -> None:
        """As a new process would find it: settings are read once in each."""
        forget()

    @property
    def chunk(self) -> int:
        """Rows of a prompt's chunk: early releases give a chunk's last row a wrong next token,
        which no oracle needs to repeat, so there prompts go in whole."""
        return 16 if self.layout == "late" else 4096

    def executor(self, model: Any, batch_size: int = 4, **options: Any) -> Any:
        from tensorrt_llm._torch.pyexecutor.py_executor_creator import create_py_executor

        return create_py_executor(common.engine_of(model, batch_size, **options))

    def generate(self, executor: Any, prompts: list[list[int]], max_tokens: int) -> Any:
        requests = [
            common.Request(10 + index, list(prompt), max_tokens)
            for index, prompt in enumerate(prompts)
        ]
        for _ in executor.run(requests):
            pass
        return SimpleNamespace(
            tokens=[one.output for one in requests], steps=[one.steps for one in requests]
        )


@pytest.fixture
def vendor(layout: str, checkpoints: dict[str, Path]) -> Vendor:
    return Vendor(layout, checkpoints)


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the plug-in's environment for this test."""

    def set_environment(**values: Any) -> None:
        for name, value in values.items():
            monkeypatch.setenv(f"TRTLLM_WMTP_{name.upper()}", str(value))
        settings.current.cache_clear()

    return set_environment
