"""A sweep over depths with synthetic keys and values: the measurements behind ``wmtp bench fit``.

One engine per arm takes steps of every depth in turn. In each repetition the order of the depths
moves on by one. The arms follow each other at every depth and change places there every second
repetition, so that in both halves, even and odd, each goes first as often.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tllm_wmtp import machine
from tllm_wmtp.bench.common import config_hash
from tllm_wmtp.bench.latency_fit.fits import ArmFit
from tllm_wmtp.bench.latency_fit.predictions import predict
from tllm_wmtp.bench.latency_fit.regression import LEAST_POINTS
from tllm_wmtp.bench.latency_fit.repetitions import Sweep
from tllm_wmtp.bench.step import Contestant, Spread, StepBench
from tllm_wmtp.checkpoint.loader import LoadedModel, load_model, read_config
from tllm_wmtp.config import EngineConfig
from tllm_wmtp.demo import model_name
from tllm_wmtp.errors import ConfigError

ARMS = ("native", "windowed")
WARM_UP = 2
#: Two of each half, the one that predicts and the one that is predicted.
LEAST_REPEATS = 4


@dataclass(frozen=True)
class FitBench:
    """What to measure: ``repeats`` steps per arm, context and depth.

    Raises:
        ConfigError: too few depths or repeats, or a depth below 2.
    """

    model: Path
    contexts: tuple[int, ...] = (16384, 65536)
    depths: tuple[int, ...] = (2, 3, 4, 5, 6, 7, 8, 9)
    window: int = 4032
    n_sink: int = 64
    dtype: str = "float32"
    kv_dtype: str = "auto"
    repeats: int = 120

    def __post_init__(self) -> None:
        if len(set(self.depths)) < LEAST_POINTS or tuple(sorted(set(self.depths))) != self.depths:
            raise ConfigError(
                f"depths {','.join(map(str, self.depths))}",
                f"a line with intervals goes through {LEAST_POINTS} depths or more, in ascending "
                "order",
                "use for example 2..9",
            )
        if self.depths[0] < 2:
            raise ConfigError(
                f"depth {self.depths[0]}",
                "a step with a draft has depth 2 or more",
                "leave it out; the fit's intercept is what remains without drafts",
            )
        if self.repeats < LEAST_REPEATS:
            raise ConfigError(
                f"repeats {self.repeats}",
                "half of the repetitions predict the other half, and an interval needs two: "
                f"{LEAST_REPEATS} or more",
                "raise --repeats",
            )

    @property
    def output(self) -> int:
        """Every token that the steps may emit, and one more step."""
        return (self.repeats + WARM_UP) * sum(self.depths) + self.depths[-1]

    def engine_config(self, arm: str, context: int) -> EngineConfig:
        deepest = StepBench(
            self.model,
            (context,),
            self.depths[-1],
            self.window,
            self.n_sink,
            self.dtype,
            self.kv_dtype,
        )
        return deepest.engine_config(arm, context, self.output)


def run_fit_bench(
    bench: FitBench, on_progress: Callable[[str, int, int], None] | None = None
) -> dict[str, Any]:
    """``{"rows": one per arm, context and depth, "fits": one per arm and context, "predictions":
    one per context and depth, ...}``.

    Args:
        on_progress: called with a label, the repetitions done and all of them.

    Raises:
        WmtpError: a context does not fit the model or the memory.
    """
    positions = read_config(bench.model).max_position_embeddings
    for context in bench.contexts:  # refused at once, before weights are read
        for arm in ARMS:
            bench.engine_config(arm, context).resolved(positions)
    loaded = load_model(bench.model, getattr(torch, bench.dtype), "cpu", with_head=True)
    rows: list[dict[str, Any]] = []
    fits: list[dict[str, Any]] = []
    predictions: list[dict[str, Any]] = []
    for context in bench.contexts:
        native, windowed = measure(bench, loaded, context, on_progress)
        for sweep in (native, windowed):
            rows += [row(sweep, depth) for depth in bench.depths]
            fits.append(ArmFit(sweep).json())
        predictions += predict(native, windowed)
    return {
        "benchmark": "fit",
        "config_hash": config_hash(bench),
        "source": "steps with random keys and values",
        **machine.describe(),
        "model": model_name(bench.model),
        "contexts": list(bench.contexts),
        "depths": list(bench.depths),
        "window": bench.window,
        "n_sink": bench.n_sink,
        "dtype": bench.dtype,
        "kv_dtype": bench.dtype if bench.kv_dtype == "auto" else bench.kv_dtype,
        "batch": 1,
        "repeats": bench.repeats,
        "rows": rows,
        "fits": fits,
        "predictions": predictions,
    }


def measure(
    bench: FitBench,
    loaded: LoadedModel,
    context: int,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> tuple[Sweep, Sweep]:
    """The native and the windowed arm's repetitions, after a warm-up that is not kept."""
    contestants = [Contestant(arm, bench, loaded, context) for arm in ARMS]
    sweeps = [Sweep(arm, context, bench.depths) for arm in ARMS]
    whole = WARM_UP + bench.repeats
    for repeat in range(whole):
        first = repeat % len(bench.depths)
        places = list(enumerate(bench.depths))
        for place, depth in places[first:] + places[:first]:
            pairs = list(zip(contestants, sweeps, strict=True))
            for contestant, sweep in pairs if (place + repeat // 2) % 2 == 0 else pairs[::-1]:
                contestant.step(depth)
                if repeat >= WARM_UP:
                    metrics = contestant.request.metrics
                    sweep.add(
                        depth, metrics.draft_s[-1], metrics.verify_s[-1], metrics.extend_s[-1]
                    )
        if on_progress is not None:
            on_progress(f"{context:,}", repeat + 1, whole)
    return sweeps[0], sweeps[1]


def row(sweep: Sweep, depth: int) -> dict[str, Any]:
    """Medians and quartiles of one depth; ``fwd_ms`` is null where a step has one forward only."""
    cell: dict[str, Any] = {
        "arm": sweep.arm,
        "context": sweep.context,
        "depth": depth,
        "gamma": depth - 1,
        "n_runs": sweep.repetitions,
    }
    for name, times in (
        ("step_ms", sweep.step_ms[depth]),
        ("draft_ms", sweep.draft_ms[depth]),
        ("verify_ms", sweep.verify_ms[depth]),
        ("ctx_ms", sweep.extend_ms[depth]),
        ("fwd_ms", sweep.forwards_ms(depth)),
    ):
        spread = Spread.of(times) if times else None
        cell[name] = None if spread is None else spread.median
        cell[f"{name}_interval"] = None if spread is None else spread.interval
    if depth == 2:
        cell["missing"] = {"fwd_ms": "a step of one draft has one draft forward, the first"}
    return cell
