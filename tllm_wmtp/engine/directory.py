"""An engine directory: ``draft.engine``, ``draft.onnx`` (with ``draft.onnx.data`` where weights are
large), ``config.json`` and ``build.log``; a verify engine's files are called ``target.*``."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tllm_wmtp.errors import ConfigError

SCHEMA = "tllm-wmtp engine 1"
CONFIG, LOG = "config.json", "build.log"
KINDS = ("draft", "target")


def is_engine_file(name: str) -> bool:
    """Whether a build writes files of this name."""
    stems = tuple(f"{kind}.{ending}" for kind in KINDS for ending in ("engine", "onnx"))
    return name in (CONFIG, LOG) or name in stems or name.removesuffix(".data") in stems


def hash_file(file: Path) -> str:
    """SHA-256 of its content."""
    digest = hashlib.sha256()
    with open(file, "rb") as opened:
        while chunk := opened.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def check_files(directory: Path) -> dict[str, Any]:
    """config.json, after every byte of engine and graph was compared with its hashes.

    Raises:
        ConfigError: it is no engine directory, or a file is missing, truncated or altered.
    """
    config = read_config(directory)
    try:
        kind = config["kind"]
        graph, engine = config["graph"], config["engine"]
        expected = {
            f"{kind}.engine": engine["sha256"],
            f"{kind}.onnx": graph["sha256"],
            f"{kind}.onnx.data": graph.get("data_sha256"),
        }
    except (KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"{directory / CONFIG}", "it lacks what a build writes there", "build it again"
        ) from None
    for name, sha256 in expected.items():
        if sha256 is None:
            continue
        try:
            found = hash_file(directory / name)
        except OSError as error:
            found = str(error.strerror)
        if found != sha256:
            raise ConfigError(
                f"{directory / name}: {found[:32]}",
                f"its SHA-256 must begin with {str(sha256)[:16]}: it is missing or damaged",
                "build it again",
            )
    return config


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
