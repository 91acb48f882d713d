"""``wmtp build``: compiles a checkpoint's draft head, or its target, into an engine directory."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from tllm_wmtp.cli import arguments, inspect
from tllm_wmtp.errors import ConfigError


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    parser = commands.add_parser("build", help="compile a draft or verify engine")
    parser.add_argument("--model", required=True, help="checkpoint directory, or demo")
    parser.add_argument("--out", required=True, type=Path, help="the engine directory to make")
    parser.add_argument(
        "--engine",
        choices=("draft", "target"),
        default="draft",
        help="the draft head (default), or the verify forward of a dense decoder",
    )
    parser.add_argument(
        "--backend",
        choices=("rtx", "tensorrt"),
        default="rtx",
        help="TensorRT-RTX ahead of time on any machine (default), or TensorRT on its GPU",
    )
    parser.add_argument("--target", default="sm120", help="GPU architecture (default sm120)")
    parser.add_argument(
        "--weights",
        choices=("auto", "nvfp4", "bf16"),
        default="auto",
        help="of quantized layers (default: as the checkpoint has them)",
    )
    parser.add_argument(
        "--lanes", type=arguments.positive, default=8, help="requests at a time (default 8)"
    )
    parser.add_argument("--depth", type=arguments.count, default=7, help="default 7")
    parser.add_argument("--window", type=arguments.count, default=4032, help="default 4032")
    parser.add_argument(
        "--sink", "--n-sink", dest="sink", type=arguments.count, default=64, help="default 64"
    )
    parser.add_argument(
        "--max-rows", type=arguments.positive, help="most rows per forward (default 512 or more)"
    )
    parser.add_argument(
        "--top-k", type=arguments.count, default=0, help="candidates in place of all logits"
    )
    parser.add_argument(
        "--max-seq-len",
        type=arguments.positive,
        help="tokens per lane of a verify engine (default: the model's limit)",
    )
    parser.add_argument(
        "--cache-dir", type=Path, help="default: $XDG_CACHE_HOME/tllm-wmtp, or ~/.cache/tllm-wmtp"
    )
    arguments.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    model = arguments.model_directory(args.model)
    try:
        from tllm_wmtp.engine.build import BuildOptions, build_engine
    except ModuleNotFoundError as error:
        if error.name != "onnx":
            raise
        raise ConfigError(
            "package onnx",
            "engines are compiled from ONNX graphs, and it is not installed",
            "pip install 'tllm-wmtp[engine]'",
        ) from None
    options = BuildOptions(
        engine=args.engine,
        backend=args.backend,
        target=args.target,
        weights=args.weights,
        lanes=args.lanes,
        window=args.window,
        n_sink=args.sink,
        depth=args.depth,
        max_rows=args.max_rows,
        top_k=args.top_k,
        max_seq_len=args.max_seq_len,
    )
    begin = time.monotonic()
    built = build_engine(model, args.out, options, args.cache_dir, _progress)
    seconds = time.monotonic() - begin
    if args.json:
        answer = {"out": str(args.out), "cached": built.cached, "seconds": seconds}
        print(json.dumps(answer | {"config": built.config}))
        return 0
    print(inspect.table(args.out, built.config))
    print(f"{'from the cache' if built.cached else 'built'} in {seconds:.1f} s")
    return 0


def _progress(message: str) -> None:
    print(f"wmtp build: {message}", file=sys.stderr, flush=True)
