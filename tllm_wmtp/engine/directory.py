"""An engine directory: ``draft.engine``, ``draft.onnx`` (with ``draft.onnx.data`` where weights are
large), ``config.json`` and ``build.log``; a verify engine's files are called ``target.*``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tllm_wmtp.errors import ConfigError

SCHEMA = "tllm-wmtp engine 1"
CONFIG, LOG = "config.json", "build.log"
KINDS = ("draft", "target")


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of an engine directory.

    Raises:
        ConfigError: it is none.
    """
    try:
        content = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
        known = isinstance(content, dict) and content.get("schema") == SCHEMA
    except (OSError, ValueError):
        known = False
    if not known:
        raise ConfigError(
            f"{directory}",
            f"an engine directory holds a {CONFIG} of schema {SCHEMA!r}",
            "pass what `wmtp build --out` made",
        )
    config: dict[str, Any] = content
    return config
