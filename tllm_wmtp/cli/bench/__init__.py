"""``wmtp bench WHAT``: one module per kind of measurement."""

from __future__ import annotations

import argparse
from typing import Any

from tllm_wmtp.cli.bench import attention, depth, fit, prefill, run, step

KINDS = (run, step, depth, prefill, fit, attention)


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    kinds = commands.add_parser("bench", help="measure").add_subparsers(
        dest="bench", metavar="WHAT", required=True
    )
    for kind in KINDS:
        kind.add_parser(kinds)
