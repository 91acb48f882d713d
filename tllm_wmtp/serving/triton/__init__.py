"""Triton Inference Server: a model repository for its Python backend, and what runs inside it.

``repository.py`` and ``llmapi.py`` write repositories; ``model.py`` is what Triton calls, and the
only file that needs Triton's own module.
"""
