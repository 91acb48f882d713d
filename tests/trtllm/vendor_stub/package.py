"""Writes a ``tensorrt_llm`` package of one layout: thin modules over the classes beside it."""

from __future__ import annotations

from pathlib import Path

LAYOUTS = ("early", "late")

_MODELS = {
    "modeling_qwen3_next": ("Qwen3NextMTP", "Qwen3NextForCausalLM"),
    "modeling_qwen3_5": ("Qwen3_5MoeForCausalLM",),
    "modeling_nemotron_h": ("NemotronHMTP", "NemotronHForCausalLM"),
    "modeling_glm": ("Glm4MTP", "Glm4MoeForCausalLM"),
    "modeling_deepseekv3": ("DeepseekV3MTP", "DeepseekV3ForCausalLM"),
}

#: Module to names, below ``tensorrt_llm``; ``!`` marks names of ``common``.
SHARED = {
    "_torch.models.modeling_utils": ("register_auto_model", "MODEL_CLASS_MAPPING"),
    "_torch.pyexecutor.resource_manager": ("!BaseResourceManager",),
    "_torch.pyexecutor.cuda_graph_runner": ("!CUDA_GRAPH_DUMMY_REQUEST_ID",),
    "_torch.speculative.interface": ("!SpecMetadata", "!SpeculativeDecodingMode"),
    "_torch.speculative.eagle3": (
        "Eagle3OneModelSpecMetadata",
        "Eagle3OneModelWorker",
        "MTPEagleWorker",
    ),
    "_torch.speculative.utils": (
        "get_spec_worker",
        "get_spec_metadata",
        "get_spec_resource_manager",
    ),
    "llmapi": (
        "!MTPDecodingConfig",
        "!KvCacheConfig",
        "!CudaGraphConfig",
        "!SamplingParams",
    ),
}
BY_LAYOUT = {
    "early": {
        "_torch.modules.attention": ("Attention",),
        "_torch.attention_backend.interface": ("!AttentionForwardArgs",),
    },
    "late": {
        "_torch.models.modeling_utils": (
            "register_auto_model",
            "MODEL_CLASS_MAPPING",
            "_EXTERNAL_ARCH_TO_MODULE",
            "export_external_model_modules",
            "register_external_model_modules",
            "get_registered_model_class",
        ),
        "_torch.attention.attention": ("Attention",),
        "_torch.attention": ("Attention",),
        "_torch.attention.backends.interface": ("!AttentionForwardArgs",),
    },
}

_CREATOR = """
from tensorrt_llm._torch.speculative.utils import get_spec_metadata, get_spec_resource_manager
from vendor_stub import common


def create_py_executor(engine):
    manager = get_spec_resource_manager(engine, None)
    return common.Executor(engine, manager, get_spec_metadata)
"""

_WRAPPER = """
from vendor_stub import common


@register_auto_model("Qwen3_5MoeForConditionalGeneration")
class Qwen3_5MoeForConditionalGeneration(common.MultimodalWrapper):
    inner = "Qwen3_5MoeForCausalLM"
"""
_REGISTER = """
{name} = register_auto_model("{name}")(type("{name}", ({name},), {{"__module__": __name__}}))
"""


def write_package(root: Path, layout: str) -> Path:
    """Writes ``root/tensorrt_llm``; ``root`` and this folder's parent go on ``sys.path``."""
    base = root / "tensorrt_llm"
    for module, names in (SHARED | BY_LAYOUT[layout]).items():
        lines = [_import(layout, name) for name in names]
        _write(base, module, "\n".join(lines))
    for module, names in _MODELS.items():
        lines = [_import(layout, name) for name in names]
        lines.append("from tensorrt_llm._torch.models.modeling_utils import register_auto_model")
        text = "\n".join(lines) + _REGISTER.format(name=names[-1])
        if module == "modeling_qwen3_5":
            text += _WRAPPER
        _write(base, f"_torch.models.{module}", text)
    zoo = "\n".join(f"from . import {module}" for module in _MODELS)
    (base / "_torch/models/__init__.py").write_text(zoo if layout == "early" else "")
    _write(base, "_torch.pyexecutor.py_executor_creator", _CREATOR)
    names = "SamplingParams"
    (base / "__init__.py").write_text(
        f'__version__ = "0.0.0+{layout}"\n'
        f"from tensorrt_llm.llmapi import {names}\nfrom vendor_stub.llm import LLM\n"
    )
    return root


def _import(layout: str, name: str) -> str:
    if name.startswith("!"):
        return f"from vendor_stub.common import {name[1:]}"
    return f"from vendor_stub.{layout} import {name}"


def _write(base: Path, module: str, text: str) -> None:
    folder = base
    folder.mkdir(parents=True, exist_ok=True)
    for part in module.split("."):
        (folder / "__init__.py").touch()
        folder = folder / part
        folder.mkdir(exist_ok=True)
    (folder / "__init__.py").write_text(text + "\n")
