"""Results as the benchmarks write them, made by formulas: for tests of the report."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tllm_wmtp.metrics import acceptance_length, wilson_interval

MACHINE = {
    "date": "2026-01-02", "device": "cpu", "processor": "a processor", "threads": 2, "isa": "avx2",
}  # fmt: skip
OTHER_MACHINE = {**MACHINE, "processor": "another processor", "threads": 64}
ARMS = ("dense", "native", "windowed")


def near(value: float, share: float = 0.03) -> list[float]:
    """An interval around a value."""
    return [value * (1 - share), value * (1 + share)]


def short_hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def step_ms(arm: str, context: int, depth: int = 7, window: int = 4032) -> tuple[float, float]:
    """Draft and verify: a line in the keys that the draft sees."""
    verify = 3 + 0.15 * depth + context * 6e-5
    if arm == "dense":
        return 0.0, 3 + context * 4e-5
    seen = context if arm == "native" else min(context, 64 + window)
    return (depth - 1) * (0.7 + seen * 3.6e-5), verify


def step(
    contexts: tuple[int, ...] = (16384, 65536, 262144, 1_040_000),
    kv_dtype: str = "float32",
    **changes: Any,
) -> dict[str, Any]:
    rows, ratios = [], []
    narrow = 1.0 if kv_dtype == "float32" else 0.8
    for context in contexts:
        steps = {}
        for arm in ARMS:
            draft, verify = (part * narrow for part in step_ms(arm, context))
            steps[arm] = draft + verify, draft
            rows.append(
                {
                    "arm": arm, "model": "demo", "context": context, "depth": 7, "window": 4032,
                    "n_sink": 64, "dtype": "float32", "kv_dtype": kv_dtype, "batch": 1,
                    "n_runs": 15, "step_ms": draft + verify,
                    "step_ms_interquartile": near(draft + verify), "draft_ms": draft,
                    "draft_ms_interquartile": near(draft), "verify_ms": verify,
                    "verify_ms_interquartile": near(verify), "bytes_moved": 1024 * context,
                    "floor_ms": verify / 2, "fraction_of_floor": 0.5, **MACHINE, **changes,
                }
            )  # fmt: skip
        ratio, draft = (steps["native"][i] / steps["windowed"][i] for i in (0, 1))
        ratios.append(
            {
                "context": context,
                "step_native_over_windowed": ratio,
                "step_native_over_windowed_interquartile": near(ratio, 0.02),
                "draft_native_over_windowed": draft,
                "draft_native_over_windowed_interquartile": near(draft, 0.02),
            }
        )
    name = short_hash([contexts, kv_dtype])
    return {"benchmark": "step", "config_hash": name, "rows": rows, "ratios": ratios}


def histogram(rate: float, depth: int, steps: int = 400) -> list[int]:
    """Steps by accepted drafts if each is accepted at ``rate``."""
    counts = [round(steps * rate**n * (1 - rate)) for n in range(depth - 1)]
    return [*counts, round(steps * rate ** (depth - 1))]


def run_row(arm: str = "windowed", **changes: Any) -> dict[str, Any]:
    """One row of ``wmtp bench run``; ``rate`` of acceptance may be among the changes."""
    given = {
        "model": "demo", "input": "logs", "context": 16384, "depth": 7, "window": 4032,
        "batch": 1, "kv_dtype": "float32", "seed": 0, "temperature": 0.0, "rate": 0.88,
        "target": "embedded", "difficulty": "medium", "score": None, "output_digest": "same",
        "repeats": 4,
    } | changes  # fmt: skip
    repeats = given.pop("repeats")
    rate, depth = given.pop("rate"), given["depth"] if arm != "dense" else 1
    window = given["window"] if arm == "windowed" else None
    if window is not None:
        rate *= 1 - 60 / (window + 300)
    draft, verify = step_ms(arm, given["context"], depth, window or 0)
    batch, grown = given["batch"], given["batch"] ** 0.6
    counts = histogram(rate, depth) if depth > 1 else [400]
    al = acceptance_length(counts)
    step_time = (draft + verify) * grown
    reached = [sum(counts[n:]) for n in range(depth)]
    row = {
        "benchmark": "run", "schema": 1, "arm": arm, **given,
        "depth": depth, "window": window, "n_sink": 64 if window else 0, "dtype": "float32",
        "max_tokens": 256, **MACHINE, "n_runs": 4, "prompt_tokens": 4 * given["context"],
        "output_tokens": 1024, "steps": 400, "steps_kept": 390, "steps_clipped": 6, "steps_ramp": 4,
        "screened": 0, "accepted_histogram": counts,
        "alpha": [
            {"value": n / t if t else None, "interval": list(wilson_interval(n, t)), "trials": t}
            for n, t in zip(reached[1:], reached[:-1], strict=True)
        ],
        "al": al, "al_interval": near(al, 0.04), "b_eff": batch,
        "t_iter_ms": step_time / batch, "t_iter_ms_interval": near(step_time / batch),
        "tpot_ms": step_time / al, "tpot_ms_interval": near(step_time / al, 0.02),
        "tokens_per_s": 1e3 * batch * al / step_time, "ttft_s": given["context"] / 16384,
        "step_ms": step_time, "draft_ms": draft * grown, "verify_ms": verify * grown,
        "ctx_ms": None, "fwd_ms": None, "draft_kv_bytes": 1024, "bytes_moved": 10**8,
        "floor_ms": 2.0, "fraction_of_floor": 0.2, "read_bandwidth_gb_per_s": 40.0,
        "missing": {"ctx_ms": "not timed", "fwd_ms": "not timed"},
    }  # fmt: skip
    row |= {name: value for name, value in changes.items() if name in row}
    for name in ("score", "output_digest", "al", "tpot_ms", "al_interval"):
        if row[name] is None:
            row["missing"].setdefault(name, f"the input has no {name}")
    row["config"] = {
        **{name: row[name] for name in ("arm", "model", "context", "depth", "window", "n_sink",
                                        "dtype", "kv_dtype", "batch", "seed")},
        "target": {"kind": row["target"], "url": None}, "device": "cpu",
        "input": {"task": row["input"], "lexicon": "english", "difficulty": row["difficulty"]},
        "repeats": repeats, "prefill_chunk": 2048,
        "sampling": {"max_tokens": 256, "temperature": row["temperature"], "ignore_eos": True},
    }  # fmt: skip
    row.setdefault("config_hash", short_hash(row["config"]))
    return row


def suite() -> list[dict[str, Any]]:
    """Sweeps over inputs, windows, depths and batches of two models."""
    rows = []
    for model in ("demo", "demo-mamba2"):
        for name, rate in (("logs", 0.9), ("sentences", 0.8), ("niah_multiquery", 0.65)):
            same = {"model": model, "input": name, "rate": rate if model == "demo" else rate - 0.07}
            if name.startswith("niah"):
                same["score"] = 0.75
            for context in (4096, 16384):
                rows += [run_row(arm, context=context, **same) for arm in ARMS]
    for name, rate in (("logs", 0.9), ("sentences", 0.8)):
        for window in (256, 512, 1024, 2048):
            rows.append(run_row(input=name, rate=rate, window=window))
        for depth in (3, 5, 9):
            rows += [run_row(arm, input=name, rate=rate, depth=depth) for arm in ARMS[1:]]
    for batch in (2, 4, 8):
        rows += [run_row(arm, context=4096, batch=batch, rate=0.9) for arm in ARMS]
    return rows


def fit(contexts: tuple[int, ...] = (16384, 65536)) -> dict[str, Any]:
    rows, fits, predictions = [], [], []
    for context in contexts:
        for arm in ARMS[1:]:
            forward = step_ms(arm, context, 2)[0]
            for depth in range(2, 10):
                draft, verify = step_ms(arm, context, depth)
                rows.append(
                    {
                        "arm": arm, "context": context, "depth": depth, "gamma": depth - 1,
                        "n_runs": 60, "step_ms": draft + verify + 0.2,
                        "step_ms_interval": near(draft + verify + 0.2, 0.02),
                        "draft_ms": draft + 0.2, "draft_ms_interval": near(draft + 0.2, 0.02),
                        "verify_ms": verify, "verify_ms_interval": near(verify, 0.02),
                        "ctx_ms": forward + 0.2, "ctx_ms_interval": near(forward + 0.2),
                        "fwd_ms": forward if depth > 2 else None,
                        "fwd_ms_interval": near(forward) if depth > 2 else None,
                    }
                )  # fmt: skip
            intercept = 3.35 + context * 6e-5
            fits.append(
                {
                    "arm": arm, "context": context, "gammas": list(range(1, 9)),
                    "slope_ms": forward + 0.15, "slope_ms_interval": near(forward + 0.15),
                    "intercept_ms": intercept, "intercept_ms_interval": near(intercept),
                    "r_squared": 0.9991, "break": None, "break_p_value": 0.4,
                    "timers": {
                        "t_fwd_ms": forward, "t_fwd_ms_interval": near(forward),
                        "t_ctx_ms": 0.2, "t_ctx_ms_interval": [0.1, 0.3],
                    },
                }
            )  # fmt: skip
        for depth in (3, 7):
            native, windowed = (sum(step_ms(arm, context, depth)) for arm in ARMS[1:])
            predictions.append(
                {
                    "context": context, "depth": depth, "delta_ms": native - windowed * 1.01,
                    "delta_ms_interval": near(native - windowed * 1.01),
                    "native_step_ms": native, "windowed_step_ms": windowed,
                    "predicted_windowed_step_ms": windowed * 1.01, "relative_error": 0.01,
                    "relative_error_interval": [-0.01, 0.02],
                }
            )  # fmt: skip
    return {
        "benchmark": "fit", "config_hash": short_hash(contexts), **MACHINE, "model": "demo",
        "depths": list(range(2, 10)), "rows": rows, "fits": fits, "predictions": predictions,
    }  # fmt: skip


def probe_part(agreement: float, drafts: int = 384, window: int = 4032) -> dict[str, Any]:
    same = round(agreement * drafts)
    share = {
        "agreement": same / drafts,
        "interval": list(wilson_interval(same, drafts)),
        "drafts": drafts,
        "flips": drafts - same,
        "kl": 0.02,
    }
    curve = []
    for each in (256, 512, 1024, 2048, window):
        kept = round(same * (1 - 40 / (each + 200)))
        curve.append(
            {
                **share, "window": each, "agreement": kept / drafts, "flips": drafts - kept,
                "interval": list(wilson_interval(kept, drafts)),
            }
        )  # fmt: skip
    return {
        "drafts": drafts, "agreement": same / drafts,
        "agreement_interval": list(wilson_interval(same, drafts)), "flips": drafts - same,
        "margin_at_flips": 0.4, "margin_elsewhere": 3.6,
        "mass": {"sink": 0.31, "window": 0.52, "tail": 0.17},
        "mass_interval": {"sink": [0.3, 0.32], "window": [0.5, 0.54], "tail": [0.16, 0.18]},
        "value_norm": {"sink": 1.1, "window": 2.2, "tail": 2.4}, "tail_keys": 12288.0,
        "tail_entropy": 8.1, "tail_entropy_share": 0.86, "tail_participation": 1210.0,
        "router_jaccard": 0.93,
        "perturbations": {
            "tail_values_shuffled": share,
            "tail_values_mean": share,
            "window_values_shuffled": {**share, "agreement": 0.4, "interval": [0.35, 0.45]},
        },
        "missing": {}, "curve": curve,
    }  # fmt: skip


def probe(model: str = "demo") -> dict[str, Any]:
    summary = probe_part(0.93, 768)
    return {
        "benchmark": "probe", "config_hash": short_hash(model), **MACHINE, "model": model,
        "context": 16384, "window": 4032, "n_sink": 64, "depth": 7, "positions": 64,
        "rows": [{"input": name, "index": 0, **probe_part(rate)}
                 for name, rate in (("logs", 0.96), ("sentences", 0.9))],
        "curve": summary.pop("curve"), "summary": summary,
    }  # fmt: skip


def plan(context: int = 1_040_000, **changes: Any) -> dict[str, Any]:
    target, draft, ring = 512.0 * context, 512.0 * context, 512.0 * 4103
    return {
        "benchmark": "plan", "config_hash": short_hash([context, changes]), "model": "demo",
        "family": "qwen3_5_moe_text", "full_attention_layers": 1, "kv_dtype": "bfloat16",
        "depth": 7, "window": 4032, "n_sink": 64, "context": context, "tp": 1, "draft_share": 0.5,
        "ring_bytes": ring, "native_draft_bytes": draft, "recurrent_bytes": 1e5,
        "request_bytes": {"dense": target, "native": target + draft, "windowed": target + ring},
        "weight_bytes": 4e6, "max_batch": {"dense": 43, "native": 21, "windowed": 43},
        "memory_bytes": 2.3e10, **changes,
    }  # fmt: skip


def prefill(contexts: tuple[int, ...] = (4096, 16384)) -> dict[str, Any]:
    rows, ratios = [], []
    for context in contexts:
        for arm in ("windowed", "native"):
            for pruned in (True, False):
                seconds = context / 16384 * (1 if pruned else 1.6) * (1.5 if arm == "native" else 1)
                rows.append(
                    {
                        "arm": arm, "pruned": pruned, "model": "demo", "context": context,
                        "prompt_tokens": context - 3, "window": 4032, "n_sink": 64, "n_runs": 3,
                        "ttft_s": seconds, "ttft_s_interquartile": near(seconds),
                        "last_layer_rows": 4096 if pruned else context, "draft_rows": 4096,
                        **MACHINE,
                    }
                )  # fmt: skip
            ratios.append(
                {
                    "context": context, "arm": arm, "unpruned_over_pruned": 1.6,
                    "unpruned_over_pruned_interquartile": [1.5, 1.7],
                }
            )  # fmt: skip
    name = short_hash(contexts)
    result = {"benchmark": "prefill", "config_hash": name, **MACHINE}
    return {**result, "rows": rows, "ratios": ratios}


def depth() -> dict[str, Any]:
    rows, ratios = [], []
    for workload, best in (("easy", 7), ("hard", 2)):
        for arm in ("dense", "depth 2", "depth 7", "adaptive"):
            over = 1 + 0.1 * abs(best - int(arm[-1])) if arm[-1].isdigit() else 1.5
            rows.append(
                {
                    "workload": workload, "arm": arm, "al": 2.5, "tpot_ms": 4 * over,
                    "mean_depth": 3.0, **MACHINE,
                }
            )  # fmt: skip
            if arm != "adaptive":
                ratios.append(
                    {
                        "workload": workload, "arm": arm, "over_adaptive": over,
                        "interval": near(over), "blocks": 16,
                    }
                )  # fmt: skip
    return {
        "benchmark": "depth", "config_hash": "depth0000000", **MACHINE, "model": "demo",
        "context": 65536, "window": 4032, "n_sink": 64, "lossless": True, "rows": rows,
        "ratios": ratios,
    }  # fmt: skip


def attention() -> dict[str, Any]:
    rows = [
        {
            "context": keys, "n_rows": n_rows, "head_dim": head_dim, "kv_dtype": kv_dtype,
            "n_runs": 9, "seconds": keys * 1e-8, "seconds_interquartile": near(keys * 1e-8),
            "sdpa_gqa_seconds": keys * 3e-8, "sdpa_fold_seconds": keys * 2e-8,
            "speedup_over_best_sdpa": 2.0, "gb_per_second": 30.0,
            "fraction_of_read_bandwidth": 0.9,
        }
        for keys in (65536, 262144)
        for n_rows in (1, 7)
        for head_dim in (64, 128)
        for kv_dtype in ("float32", "bfloat16")
    ]  # fmt: skip
    return {"benchmark": "attention", "config_hash": "attention000", **MACHINE, "rows": rows}


def demo() -> dict[str, Any]:
    arms = {
        arm: {
            "tokens": 512, "al": al, "tpot_ms": 5.0 / al, "step_ms": 5.0, "draft_ms": 2.0,
            "verify_ms": 3.0, "ttft_ms": 4000.0, "draft_kv_bytes": 4 << 20, "steps": 80,
        }
        for arm, al in (("dense", 1.0), ("native", 6.35), ("windowed", 6.43))
    }  # fmt: skip
    return {
        "lossless": True, "context": 65536, "depth": 7, "window": 4032, "n_sink": 64,
        "model": "demo", "dtype": "float32", "prompts": [{}, {}], "arms": arms, **MACHINE,
    }  # fmt: skip


def everything() -> dict[str, Any]:
    """One file of every kind, by name; a list is written as lines."""
    return {
        "step.json": step(),
        "step-bf16.json": step(kv_dtype="bfloat16"),
        "run-abc.jsonl": suite(),
        "fit.json": fit(),
        "probe.json": probe(),
        "probe-mamba2.json": probe("demo-mamba2"),
        "plan.json": plan(),
        "prefill.json": prefill(),
        "depth.json": depth(),
        "attention.json": attention(),
        "demo.json": demo(),
    }


def write(folder: Path, files: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        lines = content if name.endswith(".jsonl") else [content]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / name).write_text(text, encoding="utf-8")
    return folder
