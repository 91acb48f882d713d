"""``wmtp serve``: OpenAI's HTTP interface to one checkpoint."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import sys
from dataclasses import replace
from typing import Any

from tllm_wmtp.cli import arguments
from tllm_wmtp.errors import ConfigError
from tllm_wmtp.serving.openai.settings import ServerSettings

#: Imported by the server; the extra ``serve`` installs them.
NEEDED = ("fastapi", "uvicorn", "jinja2", "prometheus_client")
API_KEY = "WMTP_API_KEY"


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    parser = commands.add_parser("serve", help="answer OpenAI's HTTP interface")
    parser.add_argument("model", help="checkpoint directory, or demo")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen at (default 127.0.0.1: this machine)"
    )
    parser.add_argument(
        "--port", type=int, default=8000, help="port (default 8000; 0 takes a free one)"
    )
    parser.add_argument("--arm", choices=arguments.ARMS, default="windowed")
    arguments.add_speculation(parser)
    parser.add_argument(
        "--adaptive-depth", action="store_true", help="choose each step's depth, up to --depth"
    )
    parser.add_argument(
        "--tree-width",
        type=arguments.positive,
        default=1,
        help="drafts per level; above 1 a tree (default 1)",
    )
    parser.add_argument(
        "--max-batch-size",
        type=arguments.positive,
        default=8,
        help="completions that run at the same time (default 8)",
    )
    parser.add_argument(
        "--max-seq-len",
        type=arguments.positive,
        help="most tokens of a request, prompt and output (default: the model's limit)",
    )
    parser.add_argument(
        "--kv-tokens", type=arguments.positive, help="tokens that the KV pool holds"
    )
    arguments.add_types(parser)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--served-model-name", help="what clients call it (default: MODEL)")
    parser.add_argument("--api-key", help=f"asked of clients (default: ${API_KEY}, or none)")
    parser.add_argument(
        "--max-request-bytes",
        type=arguments.positive,
        help="longest request (default: 64 per token of --max-seq-len, at least 1m)",
    )
    parser.add_argument(
        "--max-concurrent",
        type=arguments.positive,
        default=256,
        help="completions that may run and wait; further ones are refused (default 256)",
    )
    parser.add_argument(
        "--shutdown-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds that requests may go on after a signal to stop (default 60)",
    )
    arguments.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    settings = ServerSettings(
        served_name=args.model if args.served_model_name is None else args.served_model_name,
        api_key=os.environ.get(API_KEY) if args.api_key is None else args.api_key,
        max_request_bytes=args.max_request_bytes,
        max_concurrent=args.max_concurrent,
        shutdown_timeout_s=args.shutdown_timeout,
    )
    speculation = arguments.speculation(args.arm, args)
    if speculation is not None:
        speculation = replace(
            speculation, adaptive_depth=args.adaptive_depth, tree_width=args.tree_width
        )
    elif args.adaptive_depth or args.tree_width > 1:
        raise ConfigError(
            "--adaptive-depth or --tree-width with --arm dense",
            "that arm has no drafts",
            "leave them out, or use another arm",
        )
    directory = arguments.model_directory(args.model)
    _require_packages()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")

    from tllm_wmtp import LLM, KvCacheConfig
    from tllm_wmtp.serving.openai.chat_template import ChatTemplate
    from tllm_wmtp.serving.openai.server import Server, bind, is_loopback, url

    # What can be refused is refused before the weights are read.
    template = ChatTemplate.of(directory)
    with (
        bind(args.host, args.port) as listener,
        LLM(
            directory,
            speculation=speculation,
            kv_cache_config=KvCacheConfig(max_tokens=args.kv_tokens, dtype=args.kv_dtype),
            max_batch_size=args.max_batch_size,
            max_seq_len=args.max_seq_len,
            dtype=args.dtype,
            device=args.device,
        ) as llm,
    ):
        if settings.api_key is None and not is_loopback(listener):
            sys.stderr.write(f"wmtp: {args.host} may be reached by others, and needs no API key\n")
        state = {
            "url": url(listener),
            "model": settings.served_name,
            "arm": llm.arm,
            "max_batch_size": llm.config.max_batch_size,
            "max_seq_len": llm.config.max_seq_len,
            "chat": template is not None,
        }
        Server(llm, settings, template, lambda: _announce(state, args.json)).run([listener])
    return 0


def _announce(state: dict[str, Any], as_json: bool) -> None:
    line = json.dumps(state)
    if not as_json:
        chat = "chat and completions" if state["chat"] else "completions (no chat template)"
        line = f"{state['url']}/v1 serves {state['model']}, {state['arm']}: {chat}"
    print(line, flush=True)


def _require_packages() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            "wmtp serve",
            f"it needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not here",
            "pip install 'tllm-wmtp[serve]'",
        )
