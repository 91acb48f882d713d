"""Fixed depths against the depth that follows what is accepted, on real prompts.

Every arm answers the same prompts greedily: no speculation, each fixed depth, and the adaptive one,
whose engine keeps its controller from prompt to prompt. The arms take turns, the one that has made
the fewest tokens first, so that a disturbance of the machine meets all of them; since their outputs
are equal, the seconds of the same tokens are paired.

The prompts are of the demonstration's language, in an order that switches the workload each time.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from tllm_wmtp import machine
from tllm_wmtp.bench.common import config_hash, ratio_of_sums
from tllm_wmtp.checkpoint.loader import LoadedModel, load_model
from tllm_wmtp.config import EngineConfig, KvCacheConfig, MtpConfig
from tllm_wmtp.demo import language, model_name
from tllm_wmtp.errors import ConfigError
from tllm_wmtp.executor.engine import Engine
from tllm_wmtp.executor.request import Phase, Request
from tllm_wmtp.metrics import RequestMetrics, summarise
from tllm_wmtp.sampling import SamplingParams

#: What a head of this language finds easy, and what it does not. Nothing predicts random words.
WORKLOADS = {"easy": "logs", "medium": "recall of 16 words", "hard": "random words"}
MIX = "mix"
ADAPTIVE = "adaptive"
WARM_UP_TOKENS = 300
#: Output tokens whose seconds make one pair.
BLOCK = 32

Progress = Callable[[str, int, int], None]


def make_prompt(workload: str, tokens: int, seed: int) -> list[int]:
    """Token ids of one of the ``WORKLOADS``, about ``tokens`` long.

    Raises:
        ConfigError: too few tokens for it.
    """
    chance = random.Random(f"{workload}/{tokens}/{seed}")
    try:
        if workload == "easy":
            return language.prompt("logs", tokens, seed).ids
        if workload == "medium":
            return language.prompt("recall", tokens, seed, n_symbols=16).ids
    except ValueError as error:
        raise ConfigError(
            f"context {tokens}", str(error), "use a context of 256 tokens or more"
        ) from error
    return [chance.choice(language.SYMBOLS) for _ in range(tokens)]


@dataclass(frozen=True)
class DepthBench:
    """What to measure; ``prompts`` per workload, ``depths`` fixed ones, ``max_depth`` the adaptive
    arm's."""

    model: Path
    context: int = 65536
    max_tokens: int = 256
    depths: tuple[int, ...] = (2, 3, 4, 5, 6, 7)
    max_depth: int = 7
    window: int = 4032
    n_sink: int = 64
    prompts: int = 2
    seed: int = 30_001

    def __post_init__(self) -> None:
        if self.max_tokens < 2 * BLOCK + 1:
            raise ConfigError(
                f"max_tokens {self.max_tokens}",
                f"an interval needs two blocks of {BLOCK} tokens after the first",
                f"use {2 * BLOCK + 1} or more",
            )
        if not self.depths or min(self.depths) < 2:
            raise ConfigError(
                f"depths {self.depths}",
                "a fixed depth is 2 or more; dense is measured anyway",
                "use for example 2,3,5,7",
            )

    @property
    def arms(self) -> dict[str, MtpConfig | None]:
        fixed: dict[str, MtpConfig | None] = {
            f"depth {depth}": MtpConfig(depth, self.window, self.n_sink) for depth in self.depths
        }
        adaptive = MtpConfig(self.max_depth, self.window, self.n_sink, adaptive_depth=True)
        return {"dense": None, **fixed, ADAPTIVE: adaptive}

    def engine(self, loaded: LoadedModel, speculation: MtpConfig | None) -> Engine:
        longest = self.context + self.max_tokens
        room = KvCacheConfig(max_tokens=longest + max(self.max_depth, *self.depths) + 64)
        return Engine(
            loaded,
            EngineConfig(
                speculation=speculation, kv_cache=room, max_batch_size=1, max_seq_len=longest
            ),
        )


@dataclass
class Answer:
    """One prompt in one arm; ``step_s`` are wall seconds of whole engine steps, the choice of the
    depth included."""

    workload: str
    request: Request
    step_s: list[float] = field(default_factory=list)

    @property
    def metrics(self) -> RequestMetrics:
        return self.request.metrics

    @property
    def tokens(self) -> list[int]:
        return self.request.output_ids


#: Median seconds of a step by its text and its number of drafts.
Typical = dict[tuple[str, int], float]


def typical_seconds(answers: Sequence[Answer]) -> Typical:
    """Of one arm. A step costs more on a text whose drafts are right: what was accepted is fed to
    the draft and kept, so texts are not mixed."""
    groups: dict[tuple[str, int], list[float]] = {}
    for each in answers:
        for drafted, seconds in zip(each.metrics.drafted, each.step_s, strict=True):
            groups.setdefault((each.workload, drafted), []).append(seconds)
    return {which: statistics.median(group) for which, group in groups.items()}


def seconds_per_token(
    metrics: RequestMetrics, step_s: Sequence[float], output_tokens: int
) -> list[float]:
    """Each step's seconds, shared evenly by the tokens that it made; of the first ``output_tokens``
    tokens after the one that the prefill made."""
    shares = [
        seconds / (accepted + 1)
        for seconds, accepted in zip(step_s, metrics.accepted, strict=True)
        for _ in range(accepted + 1)
    ]
    return shares[:output_tokens]


def blocks(seconds: Sequence[float]) -> list[float]:
    """Seconds of each whole block of tokens."""
    whole = len(seconds) // BLOCK * BLOCK
    return [sum(seconds[i : i + BLOCK]) for i in range(0, whole, BLOCK)]


def run_depth_bench(bench: DepthBench, on_progress: Progress | None = None) -> dict[str, Any]:
    """``{"rows": one per workload and arm, "ratios": fixed over adaptive, "lossless", ...}``.

    Args:
        on_progress: called with a label, the tokens done and all of them.

    Raises:
        WmtpError: the context does not fit the model or the memory.
    """
    loaded = load_model(bench.model, torch.float32, "cpu", with_head=True)
    engines = {arm: bench.engine(loaded, choice) for arm, choice in bench.arms.items()}
    for arm, engine in engines.items():
        # Outside of the controller, which is to be measured with its own first steps.
        if arm != ADAPTIVE:
            _finish(engine, make_prompt("easy", WARM_UP_TOKENS, 1))
    answers: dict[str, list[Answer]] = {arm: [] for arm in engines}
    for index in range(bench.prompts):
        for workload in WORKLOADS:
            ids = make_prompt(workload, bench.context, bench.seed + index)
            label = f"{workload} {index + 1}"
            for arm, mine in race(engines, ids, bench.max_tokens, label, on_progress).items():
                answers[arm].append(Answer(workload, *mine))
    return report(bench, answers)


def race(
    engines: dict[str, Engine],
    ids: list[int],
    max_tokens: int,
    label: str,
    on_progress: Progress | None,
) -> dict[str, tuple[Request, list[float]]]:
    """One prompt in every arm: prefills one after the other, then steps in turns, with their
    seconds. The first step is made by the call that ends the prefill, so its time is what the
    engine says."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    requests: dict[str, Request] = {}
    for done, (arm, engine) in enumerate(engines.items()):
        if on_progress is not None:
            on_progress(f"{label} prefill", done, len(engines))
        request = engine.submit(ids, params)
        while request.phase in (Phase.WAITING, Phase.PREFILL):
            engine.step()
        requests[arm] = request
    step_s = {arm: list(request.metrics.step_s) for arm, request in requests.items()}
    while running := {arm: r for arm, r in requests.items() if not r.finished}:
        behind = min(running, key=lambda arm: len(running[arm].output_ids))
        begin = perf_counter()
        engines[behind].step()
        step_s[behind].append(perf_counter() - begin)
        if on_progress is not None:
            on_progress(label, len(running[behind].output_ids), max_tokens)
    for request in requests.values():
        if request.error is not None:
            raise request.error
    return {arm: (request, step_s[arm]) for arm, request in requests.items()}


def report(bench: DepthBench, answers: dict[str, list[Answer]]) -> dict[str, Any]:
    about = machine.describe()
    typical = {arm: typical_seconds(mine) for arm, mine in answers.items()}
    rows, ratios = [], []
    for workload in (*WORKLOADS, MIX):
        chosen = {
            arm: [each for each in mine if workload in (each.workload, MIX)]
            for arm, mine in answers.items()
        }
        rows += [
            {**row(workload, arm, mine, typical[arm]), **about} for arm, mine in chosen.items()
        ]
        ratios += ratios_of(workload, chosen, typical)
    first = next(iter(answers.values()))
    return {
        "benchmark": "depth",
        "config_hash": config_hash(bench),
        "model": model_name(bench.model),
        "context": bench.context,
        "window": bench.window,
        "n_sink": bench.n_sink,
        "dtype": "float32",
        "kv_dtype": "float32",
        "batch": 1,
        "workloads": WORKLOADS,
        "prompts": bench.prompts,
        "max_tokens": bench.max_tokens,
        "lossless": all(
            [each.tokens for each in mine] == [each.tokens for each in first]
            for mine in answers.values()
        ),
        **about,
        "rows": rows,
        "ratios": ratios,
    }


def row(workload: str, arm: str, answers: Sequence[Answer], typical: Typical) -> dict[str, Any]:
    """One arm on one workload. ``tpot_ms`` takes every step for as long as a typical one of its
    text and depth, as :func:`tllm_wmtp.metrics.median_step` does; ``ms_per_token`` has all seconds
    as they were."""
    whole = summarise(each.metrics for each in answers)
    if whole.acceptance_length is None:
        raise RuntimeError(f"{arm} made no step")
    drafted = [count for each in answers for count in each.metrics.drafted]
    length = whole.acceptance_length
    used = Counter(count + 1 for count in drafted)
    costs = {
        depth: statistics.fmean(
            typical[each.workload, count]
            for each in answers
            for count in each.metrics.drafted
            if count + 1 == depth
        )
        for depth in sorted(used)
    }
    return {
        "workload": workload,
        "arm": arm,
        "al": length,
        "alpha": [
            {"value": a.value, "interval": list(a.interval), "trials": a.trials}
            for a in whole.alpha
            if a.trials
        ],
        "steps": whole.steps,
        "tokens": sum(len(each.tokens) - 1 for each in answers),
        "tpot_ms": sum(used[depth] * costs[depth] for depth in used) / len(drafted) / length * 1e3,
        "ms_per_token": statistics.fmean(s for each in answers for s in each.step_s) / length * 1e3,
        "draft_share": whole.draft_s / whole.step_s,
        "mean_depth": 1 + statistics.fmean(drafted),
        "steps_by_depth": {str(depth): used[depth] for depth in sorted(used)},
        "step_ms_by_depth": {str(depth): costs[depth] * 1e3 for depth in sorted(used)},
    }


def ratios_of(
    workload: str, answers: dict[str, list[Answer]], typical: dict[str, Typical]
) -> list[dict[str, Any]]:
    """Time of each other arm over that of the adaptive one, paired by blocks of tokens.

    Every step counts for as long as a typical one of its arm, text and depth: a disturbance
    of one step can be longer than a block.
    """

    def paired(arm: str) -> list[float]:
        return [
            block
            for each in answers[arm]
            for block in blocks(
                seconds_per_token(
                    each.metrics,
                    [typical[arm][each.workload, count] for count in each.metrics.drafted],
                    len(each.tokens) - 1,
                )
            )
        ]

    mine = paired(ADAPTIVE)
    out = []
    for arm in answers:
        if arm == ADAPTIVE:
            continue
        value, interval = ratio_of_sums(paired(arm), mine)
        out.append(
            {
                "workload": workload,
                "arm": arm,
                "over_adaptive": value,
                "interval": interval,
                "blocks": len(mine),
            }
        )
    return out


def _finish(engine: Engine, ids: list[int]) -> None:
    request = engine.submit(ids, SamplingParams(max_tokens=8, ignore_eos=True))
    while not request.finished:
        engine.step()
    if request.error is not None:
        raise request.error
