#!/usr/bin/env python3
"""Write an NVFP4 copy of a checkpoint: ``wmtp quantize`` as a script.

python build_scripts/quantize_checkpoint.py --model demo --out DIR
"""

from __future__ import annotations

import sys

from tllm_wmtp.cli import main

if __name__ == "__main__":
    sys.exit(main(["quantize", *sys.argv[1:]]))
