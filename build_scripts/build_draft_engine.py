"""Compiles the draft head of a checkpoint into an engine directory: ``wmtp build`` as a script.

python build_scripts/build_draft_engine.py --model DIR --target sm120 --out DIR
"""

from __future__ import annotations

import sys

from tllm_wmtp.cli import main


def run() -> int:
    return main(["build", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(run())
