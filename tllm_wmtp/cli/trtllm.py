"""``wmtp trtllm``: the plug-in for TensorRT-LLM, on the machine that has it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tllm_wmtp.cli import arguments


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    parser = commands.add_parser("trtllm", help="the plug-in for TensorRT-LLM")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = actions.add_parser(
        "check", help="probe the installed TensorRT-LLM and run a small model in every mode"
    )
    check.add_argument(
        "--model",
        default="demo",
        help="checkpoint to run (default: demo, the small one of this package)",
    )
    check.add_argument("--names-only", action="store_true", help="run no model")
    check.add_argument(
        "--context", type=arguments.context, default=512, help="tokens of the longest prompt"
    )
    check.add_argument(
        "--max-tokens", type=arguments.positive, default=64, help="tokens to generate"
    )
    check.add_argument("--draft-len", type=arguments.positive, default=3, help="drafts per step")
    check.add_argument(
        "--window", type=arguments.count, default=128, help="most recent tokens of the draft"
    )
    check.add_argument("--sink", type=arguments.count, default=16, help="first tokens of the draft")
    check.add_argument("--tp", type=arguments.positive, default=1, help="tensor-parallel GPUs")
    check.add_argument(
        "--engine", type=Path, help="draft engine to run as well, at its own window and depth"
    )
    arguments.add_json(check)
    check.set_defaults(run=run_check)


def run_check(args: argparse.Namespace) -> int:
    from tllm_wmtp.trtllm.check import FAILS, Workload, arm_options, check
    from tllm_wmtp.trtllm.compat import require_installed
    from tllm_wmtp.trtllm.settings import ENGINE, OFF

    require_installed()
    workload = None
    if not args.names_only:
        workload = Workload(
            arguments.model_directory(args.model),
            args.context,
            args.max_tokens,
            args.draft_len,
            args.window,
            args.sink,
            args.tp,
            args.engine,
        )
        # What cannot be read is refused here, before anything runs.
        arm_options(workload, OFF if args.engine is None else ENGINE)
    verdicts = []
    for verdict in check(workload):
        verdicts.append(verdict)
        if not args.json:
            print(f"{verdict.state:<8}  {verdict.feature:<28}  {verdict.detail}", flush=True)
    failed = sum(one.state == FAILS for one in verdicts)
    if args.json:
        print(json.dumps({"failed": failed, "verdicts": [asdict(one) for one in verdicts]}))
    return int(failed > 0)
