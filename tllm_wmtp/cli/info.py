"""``wmtp info``: what a checkpoint is, from its config and the headers of its weight files."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from tllm_wmtp.cli import arguments

TYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    parser = commands.add_parser("info", help="describe a checkpoint without loading its weights")
    parser.add_argument("model", help="checkpoint directory, or demo")
    arguments.add_speculation(parser)
    parser.add_argument(
        "--kv-dtype", choices=("float32", "bfloat16"), default="bfloat16", help="for KV sizes"
    )
    arguments.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    speculation = arguments.speculation("windowed", args)
    facts = describe(arguments.model_directory(args.model), args.kv_dtype)
    if speculation is None or speculation.window is None:
        raise RuntimeError("the windowed arm has a window")
    if facts["mtp_head"]:
        slots = speculation.n_sink + speculation.window + speculation.depth
        facts["ring"] = {
            "depth": speculation.depth,
            "window": speculation.window,
            "n_sink": speculation.n_sink,
            "slots": slots,
            "bytes": slots * facts["draft_kv_bytes_per_token"],
        }
    if args.json:
        print(json.dumps(facts))
    else:
        print(table(facts))
    return 0


def describe(directory: Path, kv_dtype: str) -> dict[str, Any]:
    """Facts of a checkpoint; sizes in bytes, KV sizes for ``kv_dtype``.

    Raises:
        CheckpointError: unknown family, missing or damaged files.
    """
    import torch

    from tllm_wmtp.checkpoint.directory import CheckpointDirectory
    from tllm_wmtp.models.registry import family_of

    checkpoint = CheckpointDirectory(directory)
    family = family_of(checkpoint.config)
    config = family.config(checkpoint.config)
    parameters, head_parameters, stored_bytes = 0, 0, 0
    types: Counter[str] = Counter()
    for name in checkpoint.names:
        if name.startswith(family.ignored_prefixes):
            continue
        size, kind = math.prod(checkpoint.shape(name)), checkpoint.element_type(name)
        parameters += size
        head_parameters += 0 if family.head_name(config, name) is None else size
        stored_bytes += checkpoint.stored_bytes(name)
        types[kind] += size
    with torch.device("meta"):
        prunable = family.target(config).prunable
    caches, element = config.caches, getattr(torch, kv_dtype)
    kv_bytes, draft_bytes = (
        caches.kv_bytes_per_token(element),
        caches.draft.bytes_per_token(element),
    )
    main_type = types.most_common(1)[0][0]
    has_head = head_parameters > 0
    return {
        "path": str(directory),
        "family": checkpoint.config["model_type"],
        "layers": config.num_hidden_layers,
        "full_attention_layers": len(caches.attention_layers),
        "recurrent_layers": len(caches.recurrent_layers),
        "hidden_size": config.hidden_size,
        "query_heads": config.num_attention_heads,
        "kv_heads": caches.attention.num_kv_heads,
        "head_dim": caches.attention.head_dim,
        "experts": config.num_experts,
        "experts_per_token": config.num_experts_per_tok,
        "vocab_size": config.vocab_size,
        "max_positions": config.max_position_embeddings,
        "dtype": TYPE_NAMES.get(main_type, main_type),
        "parameters": parameters,
        "stored_bytes": stored_bytes,
        "mtp_head": has_head,
        "mtp_parameters": head_parameters,
        "kv_dtype": kv_dtype,
        "kv_bytes_per_token": kv_bytes,
        "draft_kv_bytes_per_token": draft_bytes if has_head else 0,
        "draft_share_of_kv": draft_bytes / (kv_bytes + draft_bytes) if has_head else 0.0,
        "prefill_pruning": prunable,
        "tokenizer": (directory / "tokenizer.json").exists(),
    }


def table(facts: dict[str, Any]) -> str:
    """The facts as aligned lines of text."""
    rows = [
        ("path", facts["path"]),
        ("family", facts["family"]),
        (
            "layers",
            f"{facts['layers']}: {facts['full_attention_layers']} full attention, "
            f"{facts['recurrent_layers']} recurrent",
        ),
        (
            "heads",
            f"{facts['query_heads']} query, {facts['kv_heads']} key-value, "
            f"{facts['head_dim']} wide",
        ),
        ("hidden size", str(facts["hidden_size"])),
        (
            "experts",
            f"{facts['experts']}, {facts['experts_per_token']} per token"
            if facts["experts"]
            else "none (dense)",
        ),
        ("vocabulary", str(facts["vocab_size"])),
        ("tokenizer", "tokenizer.json" if facts["tokenizer"] else "none: token ids only"),
        ("max positions", f"{facts['max_positions']:,}"),
        ("parameters", f"{facts['parameters']:,} ({facts['dtype']})"),
        (
            "MTP head",
            f"{facts['mtp_parameters']:,} parameters" if facts["mtp_head"] else "none: dense only",
        ),
        ("KV per token", f"{facts['kv_bytes_per_token']:,} bytes ({facts['kv_dtype']})"),
        ("prefill", "pruned" if facts["prefill_pruning"] else "every row of every layer"),
    ]
    if "ring" in facts:
        ring = facts["ring"]
        rows += [
            (
                "draft KV",
                f"{facts['draft_kv_bytes_per_token']:,} bytes per token if native, "
                f"{facts['draft_share_of_kv']:.1%} of all KV",
            ),
            (
                "ring",
                f"{ring['slots']:,} slots, {ring['bytes']:,} bytes per request "
                f"(sink {ring['n_sink']} + window {ring['window']} + depth {ring['depth']})",
            ),
        ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
