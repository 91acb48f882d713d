#!/usr/bin/env python3
"""Prepare a Qwen checkpoint for contexts of a million tokens, by YaRN scaling.

    python build_scripts/prepare_yarn.py MODEL --out DIR [--max-positions 1m] [--link hard]

DIR is new: an edited config.json, and links to everything else. MODEL is not touched.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tllm_wmtp.checkpoint.yarn import FACTOR, LINKS, prepare_yarn
from tllm_wmtp.cli.arguments import Parser, positive
from tllm_wmtp.errors import WmtpError


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", type=Path, help="checkpoint directory of a Qwen family")
    parser.add_argument("--out", type=Path, required=True, help="a new directory")
    parser.add_argument(
        "--max-positions", type=positive, help=f"1m is 1,048,576 (default: {FACTOR} x the model's)"
    )
    parser.add_argument("--link", choices=tuple(LINKS), default="symlink")
    args = parser.parse_args(argv)
    try:
        prepared = prepare_yarn(args.model, args.out, args.max_positions, args.link)
    except WmtpError as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 2
    print(
        f"{prepared.out}: {prepared.max_positions:,} positions, {prepared.factor:g} x "
        f"{prepared.original_max_positions:,}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
