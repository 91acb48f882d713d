"""Writes a model repository for Triton's Python backend."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from tllm_wmtp.checkpoint.directory import CheckpointDirectory
from tllm_wmtp.checkpoint.loader import read_config
from tllm_wmtp.errors import CheckpointError, ConfigError
from tllm_wmtp.serving.triton.settings import InstanceSettings
from tllm_wmtp.serving.triton.tensors import INPUTS, OUTPUTS, Tensor

NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)

MODEL_PY = '''"""Served by tllm-wmtp; config.pbtxt beside this folder has what may be changed."""

from tllm_wmtp.serving.triton.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''

CONFIG_PBTXT = """\
# Written by wmtp triton-repo. What is served stands under "parameters"; an empty value is the
# default. See docs/triton.md of tllm-wmtp.
name: {name}
backend: "python"

# Prompts per request. Requests are batched by the executor: parameter max_batch_size.
max_batch_size: 1
model_transaction_policy {{ decoupled: true }}

# One instance holds one copy of the model.
instance_group [ {{ count: 1 kind: {kind} }} ]

{parameters}
{inputs}
{outputs}
"""


def write_python_repository(repository: Path, name: str, settings: InstanceSettings) -> Path:
    """Writes ``repository/name`` for :mod:`tllm_wmtp.serving.triton.model`; returns it.

    Raises:
        ConfigError, CheckpointError: the server could not load it, or it exists already.
    """
    check_settings(settings)
    files = {"config.pbtxt": config_pbtxt(name, settings), "1/model.py": MODEL_PY}
    return write_model(repository, name, files)


def write_model(repository: Path, name: str, files: Mapping[str, str]) -> Path:
    """Writes ``repository/name``, complete or not at all.

    Args:
        files: contents by path.

    Raises:
        ConfigError: an unusable name, or something has it already.
    """
    if NAME.fullmatch(name) is None:
        raise ConfigError(
            f"model name {name!r}",
            "it is a folder's name and part of addresses: letters, digits, '_', '-' and '.', not "
            "'.' or '-' first",
            "choose another with --name",
        )
    place = repository / name
    if place.exists() or place.is_symlink():
        raise ConfigError(
            f"directory {place}",
            "it exists, and a model is never overwritten",
            "remove it, or choose another --out or --name",
        )
    # Triton does not take a hidden folder for a model.
    fresh = repository / f".{name}.{os.getpid()}.unfinished"
    try:
        for path, content in files.items():
            (fresh / path).parent.mkdir(parents=True, exist_ok=True)
            (fresh / path).write_text(content, encoding="utf-8")
        fresh.rename(place)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return place


def check_settings(settings: InstanceSettings) -> None:
    """Refuses what the server would refuse when it loads the model, as far as it can be seen
    without loading weights."""
    limits = read_config(settings.model)
    settings.engine_config().resolved(limits.max_position_embeddings)
    if CheckpointDirectory(settings.model).tokenizer() is None:
        raise CheckpointError(
            f"model {settings.model!r}",
            "it has no tokenizer.json, and the server takes and gives text",
            "add the file to the directory",
        )


def config_pbtxt(name: str, settings: InstanceSettings) -> str:
    """The model's configuration, in protobuf's text format."""
    on_gpu = settings.device.startswith("cuda")
    parameters = "".join(
        f"parameters {{ key: {quoted(key)} value {{ string_value: {quoted(value)} }} }}\n"
        for key, value in settings.to_parameters().items()
    )
    return CONFIG_PBTXT.format(
        name=quoted(name),
        kind="KIND_GPU" if on_gpu else "KIND_CPU",
        parameters=parameters,
        inputs="".join(_tensor("input", t, optional=t.name != "text_input") for t in INPUTS),
        outputs="".join(_tensor("output", t, optional=False) for t in OUTPUTS),
    )


def quoted(text: str) -> str:
    """A string of protobuf's text format, whose escapes include those of JSON."""
    return json.dumps(text, ensure_ascii=False)


def _tensor(kind: str, tensor: Tensor, optional: bool) -> str:
    tail = " optional: true" if optional else ""
    return (
        f"{kind} {{ name: {quoted(tensor.name)} data_type: {tensor.data_type} "
        f"dims: [ {tensor.size} ]{tail} }}\n"
    )
