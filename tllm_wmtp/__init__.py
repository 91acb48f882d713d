"""Windowed multi-token prediction for TensorRT-LLM."""

__version__ = "0.1.0"
