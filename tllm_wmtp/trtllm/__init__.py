"""The windowed draft inside TensorRT-LLM's PyTorch executor (1.3 and later).

``register()`` puts subclasses of the models into TensorRT-LLM's registry; everything else follows
from there. Nothing of TensorRT-LLM, and no torch, is imported before it is called.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> list[str]:
    """Registers the windowed models with the installed TensorRT-LLM; doing it again is free.

    The configuration (:mod:`tllm_wmtp.trtllm.settings`) is read here, once per process.

    Returns:
        Architectures that are now ours; none if the configuration says ``mode: off``.

    Raises:
        ConfigError: TensorRT-LLM is missing or is a version that the shim does not know, or a
            configured value breaks a rule.
    """
    from tllm_wmtp.trtllm.models import register_models

    return register_models()
