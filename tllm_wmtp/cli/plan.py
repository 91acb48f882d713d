"""``wmtp plan``: memory of a model at a context, from its config.json alone."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict, dataclass
from typing import Any

from tllm_wmtp.bench.common import config_hash
from tllm_wmtp.cli import arguments
from tllm_wmtp.cli.bench import output
from tllm_wmtp.errors import CheckpointError
from tllm_wmtp.memory import ARMS, Footprint, LayerKv, MemoryPlan, plan

KV_BYTES = {"float32": 4.0, "bfloat16": 2.0, "fp8": 1.0}
#: Bits per weight of quantized linear layers: NVFP4 has a byte of scale for 16 weights.
WEIGHT_BITS = {"nvfp4": 4.5, "fp8": 8.0}
UNQUANTIZED_BITS = 16.0
SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*(gib|gb|g|mib|mb|m)?$", re.IGNORECASE)
UNITS = {"gib": 2**30, "g": 1e9, "gb": 1e9, "mib": 2**20, "m": 1e6, "mb": 1e6, "": 1}


def memory_size(text: str) -> float:
    """Bytes: ``80g`` and ``80gb`` are 80e9, ``80gib`` is 80 * 2**30."""
    match = SIZE.match(text.strip())
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(
            f"{text!r}: a size is expected; write for example 80g, 180g or 141gib"
        )
    return float(match[1]) * UNITS[(match[2] or "").lower()]


def share(text: str) -> float:
    """A number above 0 and up to 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: it must be above 0 and at most 1")
    return value


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    parser = commands.add_parser(
        "plan", help="memory per request and largest batch, from config.json alone"
    )
    parser.add_argument("model", help="directory with a config.json, or that file, or demo")
    parser.add_argument(
        "--context", type=arguments.context, default=None, help="tokens per request (default: all)"
    )
    parser.add_argument(
        "--gpu-memory", type=memory_size, metavar="SIZE", help="of one GPU, for example 180g"
    )
    parser.add_argument(
        "--utilization",
        type=share,
        default=0.9,
        help="share of that memory for weights and caches (default 0.9)",
    )
    parser.add_argument("--tp", type=arguments.positive, default=1, help="tensor-parallel ranks")
    parser.add_argument("--kv-dtype", choices=KV_BYTES, default="bfloat16")
    parser.add_argument(
        "--weights",
        choices=("auto", "bf16", *WEIGHT_BITS),
        default="auto",
        help="of linear layers; auto: by quantization_config; embeddings and lm_head stay 16 bit",
    )
    arguments.add_speculation(parser)
    output.add_output(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    content = read_json(args.model)
    result = describe(content, args)
    output.write(args.out, result)
    print(json.dumps(result) if args.json else table(result))
    return 0


@dataclass(frozen=True)
class Premises:
    """All that a plan depends on; its hash names the plan."""

    footprint: Footprint
    context: int
    depth: int
    window: int
    n_sink: int
    kv_dtype: str
    tp: int
    gpu_memory: float | None
    utilization: float


def read_json(model: str) -> dict[str, Any]:
    """The parsed config.json of a directory, of a file, or of a bundled checkpoint."""
    path = arguments.model_directory(model)
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file}: {error}", "it must be a readable config.json", "check the path"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{file} holds a {type(content).__name__}", "it must hold a JSON object", "check it"
        )
    return content


def model_name(model: str) -> str:
    """The model's name in results, also where its config.json was named."""
    from tllm_wmtp import demo

    path = arguments.model_directory(model)
    return demo.model_name(path if path.is_dir() else path.parent)


def describe(content: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The plan as JSON: every field of :class:`tllm_wmtp.memory.MemoryPlan` and its premises."""
    import torch

    from tllm_wmtp.config import MtpConfig
    from tllm_wmtp.executor.draft import ring_of
    from tllm_wmtp.models.registry import family_of

    family = family_of(content)
    config = family.config(content)
    context = args.context or config.max_position_embeddings
    speculation = MtpConfig(args.depth, args.window, args.sink).resolved(
        context, config.max_position_embeddings
    )
    if context > config.max_position_embeddings:
        raise CheckpointError(
            f"a context of {context:,} tokens",
            f"config.json gives the model {config.max_position_embeddings:,} positions",
            "lower --context, or extend the positions (build_scripts/prepare_yarn.py)",
        )
    caches = config.caches
    with torch.device("meta"):
        target = family.target(config)
        head = family.head(target)
    ends = {id(target.embed_tokens.weight): target.embed_tokens.weight.numel()}
    ends[id(target.lm_head.weight)] = target.lm_head.weight.numel()
    every = {id(w): w.numel() for part in (target, head) for w in part.parameters()}
    bits = linear_bits(content, args.weights)
    inner = sum(every.values()) - sum(ends.values())
    weight_bytes = (inner * bits + sum(ends.values()) * UNQUANTIZED_BITS) / 8
    footprint = Footprint(
        target=LayerKv(
            len(caches.attention_layers),
            caches.attention.num_kv_heads,
            caches.attention.head_dim,
        ),
        draft=LayerKv(1, caches.draft.num_kv_heads, caches.draft.head_dim),
        recurrent_bytes=recurrent_bytes(caches),
        weight_bytes=weight_bytes,
    )
    premises = Premises(
        footprint,
        context,
        args.depth,
        args.window,
        args.sink,
        args.kv_dtype,
        args.tp,
        args.gpu_memory,
        args.utilization,
    )
    made = plan(
        footprint,
        context,
        ring_of(speculation).capacity,
        KV_BYTES[args.kv_dtype],
        args.tp,
        None if args.gpu_memory is None else args.gpu_memory * args.utilization,
    )
    return {
        "benchmark": "plan",
        "config_hash": config_hash(premises),
        "model": model_name(args.model),
        "family": content["model_type"],
        "full_attention_layers": len(caches.attention_layers),
        "kv_heads": {"target": footprint.target.kv_heads, "draft": footprint.draft.kv_heads},
        "kv_dtype": args.kv_dtype,
        "depth": args.depth,
        "window": args.window,
        "n_sink": args.sink,
        "gpu_memory": args.gpu_memory,
        "utilization": args.utilization,
        "parameters": sum(every.values()),
        "weight_bits": bits,
        "ring_bytes_per_rank": made.ring_bytes,
        **asdict(made),
    }


def recurrent_bytes(caches: Any) -> float:
    """Recurrent states of one request: float32 matrices, convolution inputs in 16 bit."""
    shape = caches.recurrent
    if shape is None:
        return 0.0
    state = 4 * shape.value_heads * shape.key_dim * shape.value_dim
    return len(caches.recurrent_layers) * (state + 2 * shape.history * shape.conv_channels)


def linear_bits(content: dict[str, Any], weights: str) -> float:
    """Bits per weight of the linear layers."""
    if weights == "bf16":
        return UNQUANTIZED_BITS
    if weights in WEIGHT_BITS:
        return WEIGHT_BITS[weights]
    stated = json.dumps(
        content.get("quantization_config")
        or (content.get("text_config") or {}).get("quantization_config")
        or ""
    ).lower()
    return next((bits for name, bits in WEIGHT_BITS.items() if name in stated), UNQUANTIZED_BITS)


def heads(result: dict[str, Any]) -> str:
    """How a layer's key-value heads fall on the ranks, in words."""
    parts = []
    for name, mine in result["kv_heads_per_rank"].items():
        copies = mine * result["tp"] // result["kv_heads"][name]
        kept = f", each on {copies} ranks" if copies > 1 else ""
        parts.append(f"{name} {mine} of {result['kv_heads'][name]}{kept}")
    return "; ".join(parts)


def table(result: dict[str, Any]) -> str:
    """The plan as aligned lines of text."""
    plan_of = {name: result[name] for name in MemoryPlan.__dataclass_fields__}
    batch, request = plan_of["max_batch"], plan_of["request_bytes"]
    rows = [
        ("model", f"{result['family']}, {result['parameters'] / 1e9:.1f} B parameters"),
        ("context", f"{result['context']:,} tokens, {result['kv_dtype']} KV, TP {result['tp']}"),
        (
            "KV per token",
            f"{result['kv_bytes_per_token']:,.0f} bytes in {result['full_attention_layers']} "
            f"layers, {result['draft_bytes_per_token']:,.0f} in the draft",
        ),
        ("draft share", f"{result['draft_share']:.1%} of all KV, natively"),
        (
            "ring",
            f"{result['ring_slots']:,} slots, {result['ring_bytes'] / 1e6:,.1f} MB per request"
            f"{' and rank' if result['tp'] > 1 else ''} "
            f"(sink {result['n_sink']} + window {result['window']} + depth {result['depth']})",
        ),
        (
            "reclaimed",
            f"{result['reclaimed_bytes'] / 1e9:.2f} of {result['native_draft_bytes'] / 1e9:.2f} GB "
            "of draft KV per request",
        ),
        ("recurrent states", f"{result['recurrent_bytes'] / 1e6:,.1f} MB per request"),
        ("per request", ", ".join(f"{arm} {request[arm] / 1e9:.2f} GB" for arm in ARMS)),
        (
            "weights",
            f"{result['weight_bytes'] / 1e9:.1f} GB (estimate: {result['weight_bits']:g} "
            "bits per weight)",
        ),
    ]
    if batch is not None:
        rows.append(("largest batch", ", ".join(f"{arm} {batch[arm]}" for arm in ARMS)))
    if result["tp"] > 1:
        rows.append(("KV heads per rank", heads(result)))
        rows.append(("", "bytes are those of one rank"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
