"""A checkpoint for longer contexts: the same weights under a config.json with YaRN scaling.

YaRN (arXiv 2309.00071) stretches the slow rotations of the position embedding, so a model reads
positions beyond those of its training. The Qwen families are published with it in mind: a factor
of 4 on 262,144 positions makes 1,048,576. Every prompt is read with the stretched rotations, short
ones too, so the original directory stays the better one for short contexts.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tllm_wmtp.checkpoint.directory import CheckpointDirectory
from tllm_wmtp.checkpoint.partial import PartialDirectory
from tllm_wmtp.errors import CheckpointError
from tllm_wmtp.models.fields import Fields

FACTOR = 4
PLAIN = ("default", "mrope")
LINKS: dict[str, Callable[[Path, Path], Any]] = {
    "symlink": lambda source, path: path.symlink_to(os.path.realpath(source)),
    "hard": lambda source, path: os.link(os.path.realpath(source), path),
    "copy": shutil.copyfile,
}


@dataclass(frozen=True)
class Prepared:
    """What was written."""

    out: Path
    factor: float
    original_max_positions: int
    max_positions: int


def prepare_yarn(
    source: str | Path, out: str | Path, max_positions: int | None = None, link: str = "symlink"
) -> Prepared:
    """Makes the directory ``out``: an edited config.json, and every other file of ``source``.

    Args:
        source: a checkpoint of a Qwen family, not scaled yet; only read.
        out: a new directory.
        max_positions: of the result, :data:`FACTOR` times the original's by default.
        link: ``symlink``, ``hard`` or ``copy``: how the other files come to be there.

    Raises:
        CheckpointError: another family, scaled already, incomplete, or ``out`` exists.
    """
    directory = CheckpointDirectory(source)
    config, factor, original = scaled_config(directory.config, max_positions)
    if Path(os.path.abspath(out)).is_relative_to(os.path.abspath(source)):
        raise CheckpointError(
            f"output {str(out)!r}",
            "it would lie in the original directory, which is only read",
            "choose a directory beside it",
        )
    # A fingerprint of its own: links are made in a moment, so nothing is ever taken up.
    with PartialDirectory(out, uuid.uuid4().hex) as partial:
        _link_files(directory.path, partial.path, link)
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (partial.path / "config.json").write_text(text, encoding="utf-8")
        partial.publish()
    return Prepared(Path(out), factor, original, round(original * factor))


def scaled_config(
    config: dict[str, Any], max_positions: int | None = None
) -> tuple[dict[str, Any], float, int]:
    """A copy of a parsed config.json with YaRN, the factor, and the original positions.

    The scaling is written where the file keeps its rotary embedding: ``rope_parameters``, or in
    older files ``rope_scaling``.
    """
    config = json.loads(json.dumps(config))
    name = "text_config" if config.get("text_config") else "config.json"
    content = config.get("text_config") or config
    text = Fields(content, name)
    _check_family(str(config.get("model_type")))
    key = "rope_parameters" if text.get("rope_parameters") else "rope_scaling"
    rope = Fields(text.get(key, {}), key)
    kind = rope.get("rope_type", rope.get("type", "default"))
    original = text.whole("max_position_embeddings", least=2)
    if kind not in PLAIN or rope.get("factor") is not None:
        raise CheckpointError(
            f"{key} of type {kind!r} with factor {rope.get('factor')}",
            "it is scaled already",
            "use it as it is, or prepare the original checkpoint",
        )
    wanted = FACTOR * original if max_positions is None else max_positions
    if wanted <= original:
        raise CheckpointError(
            f"max positions {wanted}",
            f"the checkpoint has {original} without scaling",
            "use it as it is, or ask for more",
        )
    factor = wanted / original
    kept = {name: value for name, value in text.get(key, {}).items() if name != "type"}
    content[key] = kept | {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
    }
    content["max_position_embeddings"] = wanted
    return config, factor, original


def _check_family(model_type: str) -> None:
    if model_type.startswith("qwen"):
        return
    why = "the Qwen families are the ones whose models are made for it"
    if model_type.startswith("nemotron"):
        why = "its attention has no rotary embedding, so there is nothing to scale"
    raise CheckpointError(
        f"model_type {model_type!r}", why, "use the checkpoint as it is, up to its own limit"
    )


def _link_files(source: Path, out: Path, link: str) -> None:
    """Every file but config.json, at every depth; hidden ones are left out."""
    for folder, folders, files in os.walk(source, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = out / Path(folder).relative_to(source)
        inside.mkdir(exist_ok=True)
        for name in files:
            path = inside / name
            if name.startswith(".") or path == out / "config.json":
                continue
            try:
                LINKS[link](Path(folder) / name, path)
            except OSError as error:
                raise CheckpointError(
                    f"{link} of {Path(folder) / name} at {path} ({error.strerror})",
                    "the file must be reachable from the new directory",
                    "use another --link: symlink, hard or copy",
                ) from error
