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
    check.add_argument("--model", type=Path, help="checkpoint to run; names only when left out")
    check.add_argument("--context", type=int, default=512, help="tokens of the longest prompt")
    check.add_argument("--max-tokens", type=int, default=64, help="tokens to generate")
    check.add_argument("--draft-len", type=int, default=3, help="drafts per step")
    check.add_argument("--window", type=int, default=128, help="most recent tokens of the draft")
    check.add_argument("--sink", type=int, default=16, help="first tokens of the draft")
    check.add_argument("--tp", type=int, default=1, help="tensor-parallel GPUs")
    arguments.add_json(check)
    check.set_defaults(run=run_check)


def run_check(args: argparse.Namespace) -> int:
    from tllm_wmtp.trtllm.check import FAILS, Workload, check

    workload = None
    if args.model is not None:
        workload = Workload(
            args.model,
            args.context,
            args.max_tokens,
            args.draft_len,
            args.window,
            args.sink,
            args.tp,
        )
    verdicts = []
    for verdict in check(workload):
        verdicts.append(verdict)
        if not args.json:
            print(f"{verdict.state:<8}  {verdict.feature:<28}  {verdict.detail}", flush=True)
    if args.json:
        print(json.dumps([asdict(one) for one in verdicts]))
    return int(any(one.state == FAILS for one in verdicts))
