#!/usr/bin/env python3
"""Compare quantized copies of the demonstration checkpoint with the original.

    wmtp quantize --model demo --out DIR
    python build_scripts/compare_checkpoints.py DIR [DIR ...] [--contexts 4096,16384] [--prompts 4]

Prints a Markdown table. Per kind of document and context: the share of positions where both models
find the same token most likely, over the last 1,024 positions of each document; and the acceptance
length of the native and the windowed draft, with its standard error over steps, each model
verifying its own output. The original comes first. Documents are new to the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tllm_wmtp import LLM, MtpConfig, SamplingParams
from tllm_wmtp.checkpoint.loader import load_model
from tllm_wmtp.demo import CHECKPOINT, language
from tllm_wmtp.models.causal import CausalStates

FIRST_SEED = 30_000
COMPARED_POSITIONS = 1024
DEPTH, N_SINK = 7, 64


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkpoints", type=Path, nargs="+", help="quantized copies of demo")
    parser.add_argument("--contexts", default="4096,16384", help="tokens, separated by commas")
    parser.add_argument("--kinds", default="logs,sentences", help="separated by commas")
    parser.add_argument("--prompts", type=int, default=4, help="documents per kind and context")
    parser.add_argument("--max-tokens", type=int, default=96, help="generated per document")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--out", type=Path, help="also write the rows as JSON")
    return parser.parse_args(argv)


@torch.inference_mode()
def choices(path: Path, documents: list[list[int]]) -> list[torch.Tensor]:
    """The most likely next token at the last positions of each document."""
    model = load_model(path)
    caches = model.config.caches
    kernel = 1 if caches.recurrent is None else caches.recurrent.conv_kernel
    chosen = []
    for ids in documents:
        states = CausalStates(kernel, scale=caches.attention.scale)
        positions = torch.arange(len(ids))[None]
        hidden = model.target(torch.tensor([ids]), positions, states)
        chosen.append(model.target.logits(hidden[0, -COMPARED_POSITIONS:]).argmax(-1))
    return chosen


def acceptance(
    path: Path, texts: list[str], context: int, args: argparse.Namespace
) -> Iterator[tuple[str, tuple[float, float]]]:
    """Arm, the mean AL of ``texts``, and its standard error by the spread of all steps."""
    params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
    arms = {
        "native": MtpConfig.native(DEPTH),
        "windowed": MtpConfig(depth=DEPTH, window=args.window, n_sink=N_SINK),
    }
    for arm, speculation in arms.items():
        room = context + args.max_tokens + DEPTH
        lengths: list[float] = []
        emitted: list[int] = []
        with LLM(path, speculation, max_seq_len=room, max_batch_size=1) as llm:
            for text in texts:
                metrics = llm.generate(text, params).metrics
                assert metrics is not None
                assert metrics.acceptance_length is not None
                lengths.append(metrics.acceptance_length)
                for accepted, steps in enumerate(metrics.accepted_histogram):
                    emitted += [accepted + 1] * steps
        error = statistics.stdev(emitted) / len(emitted) ** 0.5
        yield arm, (statistics.fmean(lengths), error)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    progress = Console(stderr=True)
    rows: list[dict[str, Any]] = []
    for context in map(int, args.contexts.split(",")):
        for kind in args.kinds.split(","):
            seeds = range(FIRST_SEED, FIRST_SEED + args.prompts)
            prompts = [language.prompt(kind, context, seed) for seed in seeds]
            documents = [list(prompt.ids) for prompt in prompts]
            original = choices(CHECKPOINT, documents)
            for path in (CHECKPOINT, *args.checkpoints):
                same = [
                    (ours == theirs).double().mean().item()
                    for ours, theirs in zip(choices(path, documents), original, strict=True)
                ]
                texts = [prompt.text for prompt in prompts]
                row = {
                    "checkpoint": "demo" if path == CHECKPOINT else path.name,
                    "kind": kind,
                    "context": context,
                    "agreement": statistics.fmean(same),
                    **dict(acceptance(path, texts, context, args)),
                }
                progress.print(row)
                rows.append(row)
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print("| checkpoint | documents | context | same top token | AL native | AL windowed |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for row in rows:
        lengths = [f"{al:.2f} ± {error:.2f}" for al, error in (row["native"], row["windowed"])]
        print(
            f"| {row['checkpoint']} | {row['kind']} | {row['context']:,} | "
            f"{row['agreement']:.1%} | {' | '.join(lengths)} |"
        )


if __name__ == "__main__":
    main()
