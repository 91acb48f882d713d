"""A model repository for TensorRT-LLM's own ``llmapi`` Triton backend, with our models registered.

The backend's files belong to TensorRT-LLM and come from its installation; two lines are put into
its ``model.py``, behind the statement that imports ``tensorrt_llm``: before it the process must not
have touched the GPU, and after it our models can be registered in time for ``LLM()``.
"""

from __future__ import annotations

import ast
import json
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from tllm_wmtp.errors import ConfigError
from tllm_wmtp.serving.triton.repository import quoted, write_model
from tllm_wmtp.serving.triton.settings import InstanceSettings

#: Where NVIDIA's ``tritonserver:*-trtllm-python-py3`` containers keep the backend's files.
TEMPLATE = Path("/app/all_models/llmapi/tensorrt_llm")
#: What tllm_wmtp.trtllm reads, in the model's version folder.
SETTINGS_FILE = "wmtp.json"
#: Settings that reach ``model.yaml`` or the settings file, or that it cannot do without.
CARRIED = (
    "model", "arm", "depth", "window", "n_sink", "max_batch_size", "max_seq_len", "kv_tokens",
    "device",
)  # fmt: skip
NAME_LINE = re.compile(r'^name:\s*"[^"]*"', re.MULTILINE)


def register_models(model_file: str) -> None:
    """Called by the ``model.py`` at ``model_file``: registers our models with TensorRT-LLM, for
    this process and the workers that it starts, as the file beside it says."""
    import tllm_wmtp.trtllm

    os.environ.setdefault("TRTLLM_WMTP_CONFIG", str(Path(model_file).parent / SETTINGS_FILE))
    tllm_wmtp.trtllm.register()


def write_llmapi_repository(
    repository: Path, name: str, settings: InstanceSettings, template: Path
) -> Path:
    """Writes ``repository/name``; returns it.

    Args:
        template: the folder ``tensorrt_llm`` of TensorRT-LLM's ``all_models/llmapi``.

    Raises:
        ConfigError: the template is not there or not of the known form, the model exists, or a
            setting has no counterpart in what is written.
    """
    _refuse_what_is_not_carried(settings)
    config = NAME_LINE.sub(lambda _: f"name: {quoted(name)}", _read(template, "config.pbtxt"), 1)
    files = {
        "config.pbtxt": config,
        "1/model.py": with_registration(_read(template, "1/model.py")),
        "1/helpers.py": _read(template, "1/helpers.py"),
        "1/model.yaml": model_yaml(settings),
        f"1/{SETTINGS_FILE}": json.dumps(plugin_settings(settings), indent=2) + "\n",
    }
    return write_model(repository, name, files)


def with_registration(source: str) -> str:
    """The backend's ``model.py`` with the registration behind its first import of TensorRT-LLM.

    Raises:
        ConfigError: there is no such import.
    """
    imports = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Import, ast.ImportFrom)) and _is_tensorrt_llm(node)
    ]
    if not imports:
        raise ConfigError(
            "model.py of the llmapi backend",
            "it does not import tensorrt_llm, so there is no place for the registration",
            "pass the template that belongs to your TensorRT-LLM with --template",
        )
    first = min(imports, key=lambda node: node.lineno)
    lines = source.splitlines(keepends=True)
    indent = " " * first.col_offset
    added = (
        f"{indent}from tllm_wmtp.serving.triton.llmapi import register_models\n"
        f"\n{indent}register_models(__file__)\n"
    )
    lines.insert(first.end_lineno or first.lineno, added)
    return "".join(lines)


def model_yaml(settings: InstanceSettings) -> str:
    """Arguments of TensorRT-LLM's ``LLM``, and ``triton_config`` for its backend. Values are JSON,
    which YAML includes."""
    arguments: dict[str, Any] = {
        "model": settings.model,
        "backend": "pytorch",
        "max_batch_size": settings.max_batch_size,
    }
    if settings.max_seq_len is not None:
        arguments["max_seq_len"] = settings.max_seq_len
    kv_cache: dict[str, Any] = {}
    if settings.arm == "windowed":
        # A prefix hit would start a ring cold, and drafts out of it are seldom accepted.
        kv_cache["enable_block_reuse"] = False
    if settings.kv_tokens is not None:
        kv_cache["max_tokens"] = settings.kv_tokens
    if kv_cache:
        arguments["kv_cache_config"] = kv_cache
    if settings.speculation is not None:
        draft_len = settings.speculation.draft_len
        # The same number twice: early releases read one name, later ones the other.
        arguments["speculative_config"] = {
            "decoding_type": "MTP",
            "max_draft_len": draft_len,
            "num_nextn_predict_layers": draft_len,
        }
    # Streams need decoupled responses; the backend takes one prompt per request.
    arguments["triton_config"] = {"max_batch_size": 0, "decoupled": True}
    lines = (
        f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in arguments.items()
    )
    return "".join(lines)


def plugin_settings(settings: InstanceSettings) -> dict[str, Any]:
    """For :mod:`tllm_wmtp.trtllm.settings`: the native and the dense arm leave its draft alone."""
    if settings.arm != "windowed":
        return {"mode": "off"}
    return {"mode": "ring", "window": settings.window, "n_sink": settings.n_sink}


def _refuse_what_is_not_carried(settings: InstanceSettings) -> None:
    for field in fields(settings):
        value = getattr(settings, field.name)
        if field.name not in CARRIED and value != field.default:
            raise ConfigError(
                f"{field.name} {value!r} for the llmapi backend",
                "TensorRT-LLM is not told it, and would go on as if it had not been asked for",
                "leave it out, and write what TensorRT-LLM has instead into model.yaml",
            )


def _is_tensorrt_llm(node: ast.Import | ast.ImportFrom) -> bool:
    if isinstance(node, ast.ImportFrom):
        modules = [node.module or ""]
    else:
        modules = [alias.name for alias in node.names]
    return any(module.split(".")[0] == "tensorrt_llm" for module in modules)


def _read(template: Path, name: str) -> str:
    try:
        return (template / name).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"llmapi template {template}",
            f"{name} of TensorRT-LLM's Triton backend cannot be read there ({error.strerror})",
            "run this in NVIDIA's container, or pass the folder triton_backend/all_models/llmapi/"
            "tensorrt_llm of TensorRT-LLM with --template",
        ) from error
