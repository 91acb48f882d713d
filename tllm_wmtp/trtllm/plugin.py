"""The module that a TensorRT-LLM process imports: importing it registers the models.

The executor's workers are fresh interpreters. They find an external model by the module its class
names, which is this one, so every registered class is an attribute here.
"""

from __future__ import annotations

from tllm_wmtp.trtllm import register
from tllm_wmtp.trtllm.models import published

register()


def __getattr__(name: str) -> type:
    return published(name)
