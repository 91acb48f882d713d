"""``wmtp triton-repo``: a model repository for Triton Inference Server."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tllm_wmtp.cli import arguments
from tllm_wmtp.errors import ConfigError
from tllm_wmtp.serving.triton.settings import InstanceSettings

#: Everything is served on the loopback interface, unless its user says otherwise.
START = (
    "tritonserver --model-repository {repository} "
    "--http-address 127.0.0.1 --grpc-address 127.0.0.1 --metrics-address 127.0.0.1"
)


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    parser = commands.add_parser("triton-repo", help="write a Triton model repository")
    parser.add_argument("--model", required=True, help="checkpoint directory, or demo")
    parser.add_argument("--out", required=True, type=Path, help="the repository's directory")
    parser.add_argument("--name", default="wmtp", help="the model's name in it (default wmtp)")
    parser.add_argument(
        "--backend",
        choices=("python", "llmapi"),
        default="python",
        help="python: the embedded runtime; llmapi: TensorRT-LLM's own backend (default python)",
    )
    parser.add_argument(
        "--template",
        type=Path,
        metavar="DIR",
        help="with --backend llmapi: its files (default: where NVIDIA's containers have them)",
    )
    parser.add_argument("--arm", choices=arguments.ARMS, default="windowed")
    arguments.add_speculation(parser)
    parser.add_argument(
        "--n-sink",
        dest="sink",
        type=arguments.count,
        default=argparse.SUPPRESS,
        help="another name of --sink",
    )
    parser.add_argument(
        "--max-batch-size",
        type=arguments.positive,
        default=8,
        help="requests that run at the same time (default 8)",
    )
    parser.add_argument(
        "--max-seq-len",
        type=arguments.positive,
        help="most tokens of a request, prompt and output (default: the model's limit)",
    )
    parser.add_argument(
        "--max-queue-size",
        type=arguments.count,
        default=1024,
        help="requests that may wait; further ones are refused (default 1024)",
    )
    parser.add_argument(
        "--kv-tokens", type=arguments.positive, help="tokens that the KV pool holds"
    )
    arguments.add_types(parser)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    arguments.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    place = write(args)
    start = START.format(repository=args.out)
    if args.json:
        files = sorted(str(p.relative_to(place)) for p in place.rglob("*") if p.is_file())
        print(json.dumps({"model": args.name, "path": str(place), "files": files, "start": start}))
    else:
        print(f"{place}\n{start}")
    return 0


def write(args: argparse.Namespace) -> Path:
    """The model's new folder."""
    from tllm_wmtp.serving.triton import llmapi
    from tllm_wmtp.serving.triton.repository import write_python_repository

    on_llmapi = args.backend == "llmapi"
    if args.template is not None and not on_llmapi:
        raise ConfigError(
            f"template {args.template}",
            "only the llmapi backend is made from one",
            "leave it out, or add --backend llmapi",
        )
    directory = arguments.model_directory(args.model)
    # TensorRT-LLM also takes the name of a model that it fetches itself.
    is_name = on_llmapi and not directory.exists()
    settings = InstanceSettings(
        model=str(directory if is_name else directory.resolve()),
        arm=args.arm,
        depth=args.depth,
        window=args.window,
        n_sink=args.sink,
        max_batch_size=args.max_batch_size,
        max_seq_len=args.max_seq_len,
        dtype=args.dtype,
        kv_dtype=args.kv_dtype,
        kv_tokens=args.kv_tokens,
        device=args.device,
        max_queue_size=args.max_queue_size,
    )
    if on_llmapi:
        template = args.template or llmapi.TEMPLATE
        return llmapi.write_llmapi_repository(args.out, args.name, settings, template)
    return write_python_repository(args.out, args.name, settings)
