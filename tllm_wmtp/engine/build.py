"""From a checkpoint to an engine directory: graph, compiled engine, config.json, build.log.

The directory appears whole or not at all. Engines are kept in a cache under a hash of everything
that went into them (weights, choices, plugin, builder, this package's own graph code), so the same
build again is a copy.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tllm_wmtp
from tllm_wmtp.engine import plugin
from tllm_wmtp.engine.backends import Backend, find_backend
from tllm_wmtp.engine.directory import (
    KINDS,
    check_files,
    hash_file,
    is_engine_file,
    read_config,
)
from tllm_wmtp.engine.plugin import find_plugin
from tllm_wmtp.errors import ConfigError

#: Files above this size are linked between cache and engine directory, not copied.
_LINKED_BYTES = 1 << 20

Progress = Callable[[str], None]


@dataclass(frozen=True)
class BuildOptions:
    """What a user chooses.

    Args:
        engine: ``draft``, or ``target`` for a verify engine of a dense decoder.
        backend: ``rtx`` (ahead of time, on any machine) or ``tensorrt`` (on the GPU itself).
        target: ``sm120`` and the like.
        weights: ``nvfp4``, ``bf16``, or ``auto``: as the checkpoint has them.
        lanes: requests at a time, each with a ring of ``n_sink + window + depth`` slots.
        max_rows: most rows of one forward; None for ``max(lanes * depth, 512)``. In a verify engine
            they are shared evenly by the lanes.
        max_seq_len: of a verify engine: tokens that a lane's caches hold; None: the model's limit.
        top_k: candidates per answer in place of all logits; 0 for logits.
    """

    engine: str = "draft"
    backend: str = "rtx"
    target: str = "sm120"
    weights: str = "auto"
    lanes: int = 8
    window: int = 4032
    n_sink: int = 64
    depth: int = 7
    max_rows: int | None = None
    top_k: int = 0
    max_seq_len: int | None = None

    def __post_init__(self) -> None:
        self._choice("engine", KINDS)
        self._choice("backend", ("rtx", "tensorrt"))
        self._choice("weights", ("auto", "nvfp4", "bf16"))
        for name, least in (("lanes", 1), ("window", 1), ("n_sink", 0), ("depth", 2), ("top_k", 0)):
            number = getattr(self, name)
            if number < least:
                raise ConfigError(
                    f"{name} {number}", f"it must be {least} or more", f"raise {name}"
                )
        if self.max_seq_len is not None and self.engine != "target":
            raise ConfigError(
                f"max_seq_len {self.max_seq_len} of a draft engine",
                "its rings hold n_sink + window + depth slots whatever the length",
                "leave it out, or build with --engine target",
            )
        if self.max_seq_len is not None and self.max_seq_len < self.rows_per_lane:
            raise ConfigError(
                f"max_seq_len {self.max_seq_len}",
                f"one forward feeds up to {self.rows_per_lane} rows per lane",
                "raise it, or lower max_rows",
            )
        if self.rows < self.lanes:
            raise ConfigError(
                f"max_rows {self.max_rows}",
                f"every one of {self.lanes} lanes feeds a row per forward",
                "raise max_rows or lower lanes",
            )

    def _choice(self, name: str, known: tuple[str, ...]) -> None:
        if getattr(self, name) not in known:
            raise ConfigError(
                f"{name} {getattr(self, name)!r}",
                f"it must be one of {', '.join(known)}",
                f"use {known[0]}",
            )

    @property
    def rows_per_lane(self) -> int:
        """Of a verify engine."""
        return max(self.rows // self.lanes, self.depth)

    @property
    def rows(self) -> int:
        return max(self.lanes * self.depth, 512) if self.max_rows is None else self.max_rows


@dataclass(frozen=True)
class Ingredients:
    """What an engine is made with, beside the checkpoint."""

    options: BuildOptions
    backend: Backend
    plugin: Path | None
    graph_code_sha256: str

    def facts(self) -> dict[str, Any]:
        """As config.json holds them."""
        return {
            "options": asdict(self.options) | {"max_rows": self.options.rows},
            "plugin": None if self.plugin is None else plugin_facts(self.plugin),
            "backend": {"name": self.backend.name, "version": self.backend.version},
            "graph_code_sha256": self.graph_code_sha256,
        }


def plugin_facts(library: Path) -> dict[str, str]:
    return {
        "name": plugin.NAME,
        "version": plugin.VERSION,
        "namespace": plugin.NAMESPACE,
        "sha256": hash_file(library),
    }


@dataclass(frozen=True)
class Built:
    """``config`` is what config.json holds; ``cached`` says that nothing was compiled."""

    directory: Path
    config: dict[str, Any]
    cached: bool


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/tllm-wmtp``, by default ``~/.cache/tllm-wmtp``."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "tllm-wmtp"


def build_engine(
    model: Path,
    out: Path,
    options: BuildOptions,
    cache: Path | None = None,
    progress: Progress = lambda message: None,
) -> Built:
    """Makes ``out`` an engine directory for ``model``.

    Raises:
        CheckpointError: ``model`` is incomplete, or has no draft head.
        ConfigError: the options do not fit the checkpoint, or this machine cannot build so.
        PluginMissing: the plugin library has not been built.
        BuildError: the builder refuses the graph.
    """
    cache, out = default_cache() if cache is None else cache, out.resolve()
    _check_out(out)
    backend = find_backend(options.backend, options.target, cache / "links")
    library = find_plugin() if options.engine == "draft" else None
    ingredients = Ingredients(options, backend, library, graph_code_hash())
    # Files that have not been touched since an earlier build lead to its engine unread.
    note = cache / "requests" / hash_json([ingredients.facts(), _files_of(model)])
    entry = cache / "engines" / note.read_text() if note.exists() else None
    cached = entry is not None and is_whole(entry)
    if entry is None or not cached:
        from tllm_wmtp.engine.compose import compose  # brings torch and onnx

        entry, cached = compose(model, ingredients, cache / "engines", progress)
        _write_note(note, entry.name)
    _publish(entry, out)
    return Built(out, read_config(out), cached)


def is_whole(entry: Path) -> bool:
    """Whether a cache entry is there, undamaged; a damaged one is built again."""
    try:
        check_files(entry)
    except ConfigError:
        return False
    return True


def _files_of(model: Path) -> list[tuple[str, int, int, int, int]]:
    """What identifies every file that a checkpoint is read from; a copy with the old time of
    change (``cp -p``) still has an inode and a change time of its own."""
    if not model.is_dir():
        return []
    files = [file for file in model.iterdir() if file.suffix in (".json", ".safetensors")]
    stats = [(str(file.resolve()), file.stat()) for file in sorted(files)]
    return [
        (name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
        for name, stat in stats
    ]


def _write_note(note: Path, text: str) -> None:
    note.parent.mkdir(parents=True, exist_ok=True)
    fresh = note.with_name(f".{note.name}.{os.getpid()}")
    fresh.write_text(text, encoding="ascii")
    fresh.replace(note)


def _check_out(out: Path) -> None:
    if out.is_dir() and any(out.iterdir()):
        try:
            read_config(out)
        except ConfigError:
            raise ConfigError(
                f"out {str(out)!r}",
                "it holds files that are no engine",
                "pass a new directory, or one that an earlier build made",
            ) from None
        foreign = sorted(file.name for file in out.iterdir() if not is_engine_file(file.name))
        if foreign:
            raise ConfigError(
                f"out {str(out)!r} with {foreign[0]!r}",
                "an earlier engine is replaced as a whole, and no build made this file",
                "move it away, or pass a new directory",
            )
    elif out.exists() and not out.is_dir():
        raise ConfigError(f"out {str(out)!r}", "it is a file", "pass a new directory")


def _publish(entry: Path, out: Path) -> None:
    """Makes ``out`` hold the files of ``entry``: beside it first, then by renaming."""
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        for file in sorted(entry.iterdir()):
            _copy(file, fresh / file.name)
        fresh.chmod(0o755)
        rename_directory(fresh, out)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def rename_directory(fresh: Path, place: Path) -> None:
    """Puts ``fresh`` in the place of the directory ``place``, which is whole at every moment but
    the one between two renames."""
    old = place.with_name(f".{place.name}.{os.getpid()}.old")
    if place.exists():
        place.replace(old)
    fresh.replace(place)
    shutil.rmtree(old, ignore_errors=True)


def _copy(file: Path, target: Path) -> None:
    if file.stat().st_size > _LINKED_BYTES:
        file.chmod(0o444)  # one file in two places: writing to it would spoil the cache
        try:
            os.link(file, target)
            return
        except OSError:
            pass  # another file system
    shutil.copy2(file, target)


def hash_json(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def graph_code_hash() -> str:
    """Of the sources that decide how a graph looks."""
    package = Path(tllm_wmtp.__file__).parent
    digest = hashlib.sha256()
    for part in ("engine", "models", "checkpoint"):
        for file in sorted((package / part).rglob("*.py")):
            digest.update(file.relative_to(package).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()
