"""What pruning saves of a prefill, per arm and context.

Nobody reads the final hidden state of most prompt rows, so the last layer may leave them out, and a
windowed draft stores only the rows that its ring keeps (:mod:`tllm_wmtp.executor.prefill`). Each
prompt is prefilled with and without pruning in both arms. Contestants take turns chunk by chunk, so
that a disturbance of the machine meets all of them; each one's seconds are its own chunks'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from tllm_wmtp import machine
from tllm_wmtp.bench.common import config_hash
from tllm_wmtp.bench.depth import make_prompt
from tllm_wmtp.bench.step import Spread
from tllm_wmtp.checkpoint.loader import LoadedModel, load_model
from tllm_wmtp.config import EngineConfig, KvCacheConfig, MtpConfig
from tllm_wmtp.demo import model_name
from tllm_wmtp.errors import ConfigError
from tllm_wmtp.executor.engine import Engine
from tllm_wmtp.executor.request import Phase
from tllm_wmtp.metrics import RequestMetrics
from tllm_wmtp.sampling import SamplingParams

#: Arm and whether its prefill is pruned.
CONTESTANTS = (("windowed", True), ("windowed", False), ("native", True), ("native", False))


@dataclass(frozen=True)
class PrefillBench:
    """What to measure; ``repeats`` prefills per contestant and context."""

    model: Path
    contexts: tuple[int, ...] = (4096, 16384, 65536)
    depth: int = 7
    window: int = 4032
    n_sink: int = 64
    prefill_chunk: int = 2048
    repeats: int = 3
    seed: int = 40_001

    def __post_init__(self) -> None:
        if self.repeats < 2:
            raise ConfigError(
                f"repeats {self.repeats}", "an interval needs two runs or more", "raise it"
            )

    def engine(self, loaded: LoadedModel, arm: str, pruned: bool, context: int) -> Engine:
        windowed = MtpConfig(self.depth, self.window, self.n_sink)
        return Engine(
            loaded,
            EngineConfig(
                speculation=windowed if arm == "windowed" else MtpConfig.native(self.depth),
                kv_cache=KvCacheConfig(max_tokens=context + self.depth + 66),
                max_batch_size=1,
                max_seq_len=context + 1,
                prefill_chunk=self.prefill_chunk,
                prefill_pruning=pruned,
            ),
        )


class Prefill:
    """One prompt under way in one engine; ``ttft_s`` counts the seconds of its own calls."""

    def __init__(self, engine: Engine, ids: list[int]):
        self._engine = engine
        self._request = engine.submit(ids, SamplingParams(max_tokens=1, ignore_eos=True))
        self.ttft_s = 0.0

    @property
    def done(self) -> bool:
        return self._request.phase is Phase.FINISHED

    @property
    def metrics(self) -> RequestMetrics:
        return self._request.metrics

    def chunk(self) -> None:
        begin = perf_counter()
        self._engine.step()
        self.ttft_s += perf_counter() - begin
        if self._request.error is not None:
            raise self._request.error


def run_prefill_bench(
    bench: PrefillBench, on_progress: Callable[[str, int, int], None] | None = None
) -> dict[str, Any]:
    """``{"rows": one per context and contestant, "ratios": unpruned over pruned, ...}``.

    Args:
        on_progress: called with a label, the repetitions done and all of them.

    Raises:
        WmtpError: a context does not fit the model or the memory.
    """
    loaded = load_model(bench.model, torch.float32, "cpu", with_head=True)
    about = machine.describe()
    rows: list[dict[str, Any]] = []
    ratios: list[dict[str, Any]] = []
    for context in bench.contexts:
        engines = {
            (arm, pruned): bench.engine(loaded, arm, pruned, context) for arm, pruned in CONTESTANTS
        }
        runs: dict[tuple[str, bool], list[Prefill]] = {who: [] for who in CONTESTANTS}
        for repeat in range(bench.repeats):
            ids = make_prompt("easy", context, bench.seed + repeat)
            race = {who: Prefill(engine, ids) for who, engine in engines.items()}
            turn = list(race.values())
            while any(not each.done for each in turn):
                for each in turn:
                    if not each.done:
                        each.chunk()
                turn = turn[1:] + turn[:1]  # nobody always goes first
            for who, each in race.items():
                runs[who].append(each)
            if on_progress is not None:
                on_progress(f"{context:,}", repeat + 1, bench.repeats)
        rows += [{**row(bench, context, *who, runs[who]), **about} for who in CONTESTANTS]
        ratios += [ratio(context, arm, runs) for arm in ("windowed", "native")]
    return {
        "benchmark": "prefill",
        "config_hash": config_hash(bench),
        **about,
        "rows": rows,
        "ratios": ratios,
    }


def row(
    bench: PrefillBench, context: int, arm: str, pruned: bool, runs: list[Prefill]
) -> dict[str, Any]:
    """One contestant; its row counts are of the longest of its prompts."""
    ttft = Spread.of([each.ttft_s for each in runs])
    prefill = Spread.of([each.metrics.prefill_s for each in runs])
    longest = max((each.metrics for each in runs), key=lambda m: m.prompt_tokens)
    return {
        "arm": arm,
        "pruned": pruned,
        "model": model_name(bench.model),
        "context": context,
        "prompt_tokens": longest.prompt_tokens,
        "depth": bench.depth,
        "window": bench.window,
        "n_sink": bench.n_sink,
        "dtype": "float32",
        "kv_dtype": "float32",
        "batch": 1,
        "n_runs": prefill.runs,
        "ttft_s": ttft.median,
        "ttft_s_interquartile": ttft.interval,
        "prefill_s": prefill.median,
        "prefill_s_interquartile": prefill.interval,
        "last_layer_rows": longest.prefill_last_layer_rows,
        "draft_rows": longest.prefill_draft_rows,
    }


def ratio(context: int, arm: str, runs: dict[tuple[str, bool], list[Prefill]]) -> dict[str, Any]:
    """How many pruned prefills fit into one that is not."""
    pairs = zip(runs[arm, False], runs[arm, True], strict=True)
    spread = Spread.of([whole.ttft_s / pruned.ttft_s for whole, pruned in pairs])
    return {
        "context": context,
        "arm": arm,
        "unpruned_over_pruned": spread.median,
        "unpruned_over_pruned_interquartile": spread.interval,
    }
