"""``wmtp inspect``: what an engine directory holds and how it was made; its files are compared with
their hashes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tllm_wmtp.cli import arguments
from tllm_wmtp.errors import ConfigError


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    parser = commands.add_parser("inspect", help="describe an engine directory")
    parser.add_argument("directory", type=Path, help="what wmtp build made")
    arguments.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tllm_wmtp.engine.directory import CONFIG, check_files

    config = check_files(args.directory)
    try:
        text = json.dumps(config) if args.json else table(args.directory, config)
    except (KeyError, TypeError, ValueError, IndexError):
        raise ConfigError(
            f"{args.directory / CONFIG}", "it lacks what a build writes there", "build it again"
        ) from None
    print(text)
    return 0


def table(directory: Path, config: dict[str, Any]) -> str:
    """config.json as aligned lines of text."""
    options, engine = config["options"], config["engine"]
    plugin, backend = config["plugin"], config["backend"]
    quantized = len(config["nvfp4_weights"])
    weights = f"{options['weights']}, {quantized} weights in NVFP4" if quantized else "bf16"
    rows = [
        ("engine", f"{directory}: {config['kind']}, {engine['bytes']:,} bytes"),
        ("model", f"{config['model']['family']} from {config['checkpoint']}"),
        ("backend", f"{backend['name']} {backend['version']} for {options['target']}"),
        ("weights", weights),
        *(_draft_rows(config) if config["kind"] == "draft" else _target_rows(config)),
        (
            "plugin",
            f"{plugin['name']} {plugin['version']}, sha256 {plugin['sha256'][:16]}"
            if plugin
            else "none",
        ),
        ("graph", f"{config['graph']['bytes']:,} bytes, written in {config['graph']['seconds']} s"),
        ("compiled", f"in {engine['seconds']} s, sha256 {engine['sha256'][:16]}"),
        ("weights sha256", config["model"]["weights_sha256"][:16]),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _draft_rows(config: dict[str, Any]) -> list[tuple[str, str]]:
    options, ring = config["options"], config["state"]
    return [
        (
            "ring",
            f"{ring['lanes']} lanes of {ring['capacity']:,} slots (sink {ring['n_sink']} + window "
            f"{ring['window']} + depth {options['depth']}), {ring['dtype']}",
        ),
        ("rows", f"at most {options['max_rows']} per forward"),
        ("output", f"top {options['top_k']}" if options["top_k"] else "all logits"),
    ]


def _target_rows(config: dict[str, Any]) -> list[tuple[str, str]]:
    cache = config["state"]
    most = config["profiles"]["token_ids"][2][1]
    return [
        (
            "cache",
            f"{cache['lanes']} lanes of {cache['capacity']:,} tokens in {cache['layers']} layers, "
            f"{cache['dtype']}",
        ),
        ("rows", f"at most {most} per lane and forward"),
    ]
