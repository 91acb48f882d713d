"""Windowed multi-token prediction for TensorRT-LLM."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tllm_wmtp.config import KvCacheConfig, MtpConfig
    from tllm_wmtp.errors import CheckpointError, ConfigError, RequestError, WmtpError
    from tllm_wmtp.llm import LLM, RequestHandle
    from tllm_wmtp.metrics import EngineMetrics, EngineUsage, RequestMetrics
    from tllm_wmtp.outputs import CompletionOutput, RequestOutput
    from tllm_wmtp.sampling import SamplingParams

# Found on first use, so that importing one part of the package does not load all of it.
_HOME = {
    "LLM": "llm",
    "RequestHandle": "llm",
    "KvCacheConfig": "config",
    "MtpConfig": "config",
    "SamplingParams": "sampling",
    "CompletionOutput": "outputs",
    "RequestOutput": "outputs",
    "EngineMetrics": "metrics",
    "EngineUsage": "metrics",
    "RequestMetrics": "metrics",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "RequestError": "errors",
    "WmtpError": "errors",
}

__all__ = [
    "LLM",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "EngineMetrics",
    "EngineUsage",
    "KvCacheConfig",
    "MtpConfig",
    "RequestError",
    "RequestHandle",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "WmtpError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
